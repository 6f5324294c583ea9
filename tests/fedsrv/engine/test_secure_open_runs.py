"""Secure sums and examples' privacy while classes, cohorts and settings of an open run change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcli.data.store.growing import add_task
from fedcli.parts import secure_client
from fedmodels.config.privacy import SecureSum
from fedmodels.errors import TooFewClients
from fedmodels.numerics.secrecy import Secret
from fedsrv.parts import secure_group
from fedsrv.parts.secure_rounds import SecureRound, SecureRounds
from fedsrv.parts.stages import RunPaused
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies, arrays_in
from tests.fedsrv.engine.test_private_rounds import NOISE
from tests.runs import Killed

SECURE = {"secure_sum": {"trust": "coordinator"}}


def site(data: Path, client: int) -> None:
    """Make a client's data with one task of the classes 0 to 2."""
    arrays_in(data / str(client) / "task-0", [0, 1, 2], client)
    about = {"format": 1, "input_shape": [1, 8, 8], "num_classes": 3}
    (data / str(client) / "client.json").write_text(json.dumps(about))


def lived(
    data: Path, out: Path, kills: dict[int, int], method: str, noise: Any = None
) -> dict[str, Any]:
    """Let three clients learn; one brings a class, a fourth joins; the rate and a class change.

    Args:
        data: an empty directory.
        out: the run directory.
        kills: after how many orders the process dies, in which of the three stretches.
        method: what is run.
        noise: keys of ``[privacy]`` with which clients hide what they upload.
    """
    summary = None
    for client in range(3):
        site(data, client)
    for stretch in range(3):
        if stretch == 1:
            add_task(data, 0, arrays_in(data.parent / "new", [0, 7], 9))
            site(data, 3)
        if stretch == 2:
            add_task(data, 1, arrays_in(data.parent / "more", [1, 2], 8))
            (out / "classes.json").write_text('[[0, "7", "2"]]')  # the class 7 becomes part of 2
        schedule = {"order": "tasks_outer", "open": True, "rounds": 1, "clients": 4}
        given = tiny_experiment(
            method=method, schedule={**schedule, "begin_with": 3},
            privacy={**SECURE, **(noise or {})}, server={"min_clients": 3} if noise else {},
            training={"lr": 0.02 if stretch == 2 else 0.05}, evaluate={"last_tasks": stretch + 1},
        ).model_copy(update={"scenario": None, "data": None})  # fmt: skip
        how: dict[str, Any] = {"resume": True, "at_rest": "close" if stretch == 2 else "pause"}
        if stretch in kills:
            with pytest.raises(Killed):
                run_in_process(given, data, out, before=Dies(kills[stretch]), **how)
        try:
            summary = run_in_process(given, data, out, **how)
        except RunPaused:
            continue
    assert summary is not None
    return summary


def test_masks_change_no_bit_of_a_run_that_grows_and_no_crash_does(tmp_path, monkeypatch):
    """Uploads get longer with a class; what everybody trains with is part of the terms."""
    method = "fedproto"
    whole = lived(tmp_path / "a/data", tmp_path / "a/run", {}, method)
    records = records_of(tmp_path / "a/run")
    groups = [record["secure_sum"]["groups"] for record in records]
    assert groups == [[[0, 1, 2]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]]
    assert [g["changes"] for r in records for g in r["growths"] if "training.lr" in str(g)]
    assert records[2]["growths"][0]["class_changes"] == [["7", "2"]]
    assert not any(record.get("failed") for record in records)
    again = lived(tmp_path / "b/data", tmp_path / "b/run", {0: 7, 1: 9, 2: 14}, method)
    assert again["state_sha256"] == whole["state_sha256"]
    for module in (secure_client, secure_group):
        monkeypatch.setattr(module, "add_mask", lambda *_: None)
    shutil.rmtree(tmp_path / "b")
    plain = lived(tmp_path / "b/data", tmp_path / "b/run", {}, method)
    assert plain["state_sha256"] == whole["state_sha256"]


def test_clients_add_noise_under_masks_in_a_run_that_grows(tmp_path, monkeypatch):
    """Each sum has the noise of three clients, also where four upload; a crash draws none anew."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    found, deaths = [], dict[str, dict[int, int]](a={}, b={0: 7, 1: 9, 2: 14})
    for name, kills in deaths.items():
        keys = map(Secret, (bytes([n]) * 32 for n in range(1, 99)))
        monkeypatch.setattr(Secret, "fresh", classmethod(lambda cls, keys=keys: next(keys)))
        noise = {**NOISE, "where": "clients"}
        place = tmp_path / name
        found.append(lived(place / "data", place / "run", kills, "fedavg", noise))
    whole, again = found
    assert whole["state_sha256"] == again["state_sha256"]
    assert whole["privacy"]["releases"] == 3
    assert "a sum has the noise of 3 clients at least" in whole["privacy"]["assumes"]


def spent(place: Path, kills: int = 0, change: str = '[[0, "7", "2"]]') -> tuple[Any, str]:
    """Let two clients learn with example privacy; a class comes, and becomes part of another.

    Returns what each client has spent after each round, and the digest of the state.
    """
    data, out = place / "data", place / "run"
    allowed = ["announced", "examples", "loss", "scores"]
    hides = {"level": "example", "noise_multiplier": 1.0, "clip": 1.0, "epsilon": 50.0}
    given = tiny_experiment(
        method="fedavg",
        schedule={"order": "tasks_outer", "open": True, "rounds": 1, "clients": 2},
        privacy={**hides, "delta": 1e-3, "allow": allowed},
    ).model_copy(update={"scenario": None, "data": None})
    for client in range(2):
        site(data, client)
    add_task(data, 0, arrays_in(place / "new", [0, 7], 9))
    with pytest.raises(RunPaused):
        run_in_process(given, data, out, resume=True, at_rest="pause")
    add_task(data, 1, arrays_in(place / "more", [1, 2], 8))
    (out / "classes.json").write_text(change)
    how: dict[str, Any] = {"resume": True, "at_rest": "close"}
    if kills:
        with pytest.raises(Killed):
            run_in_process(given, data, out, before=Dies(kills), **how)
    summary = run_in_process(given, data, out, **how)
    rows = [record["clients"] for record in records_of(out)]
    return [{c: one["epsilon"] for c, one in row.items()} for row in rows], summary["state_sha256"]


def test_a_merge_charges_examples_as_if_their_class_had_stayed(tmp_path, monkeypatch):
    """Whoever kills the run after the merge changes no bit, and spends nothing twice."""
    found = []
    for name, kills, change in (("a", 0, None), ("b", 3, None), ("c", 0, "[]")):
        keys = map(Secret, (bytes([n]) * 32 for n in range(1, 99)))
        monkeypatch.setattr(Secret, "fresh", classmethod(lambda cls, keys=keys: next(keys)))
        found.append(spent(tmp_path / name, kills, *([change] if change else [])))
    (whole, bits), (killed, again), (apart, other) = found
    assert whole == killed == apart
    assert bits == again != other
    (_, _, merged) = records_of(tmp_path / "b" / "run")
    assert merged["growths"][0]["class_changes"] == [["7", "2"]]


def test_a_cohort_whose_secrets_never_open_ends_in_a_line():
    """Nobody was asked anything, so nobody failed: the line named the first of none."""
    rounds: Any = SecureRounds.__new__(SecureRounds)
    rounds._unopened, rounds.rules, rounds._fixed = {0, 1, 2}, SecureSum(), None
    rounds.parts = SimpleNamespace(plan=SimpleNamespace(needed=len))
    ctx: Any = SimpleNamespace(round=4, cohort=(0, 1, 2))
    with pytest.raises(TooFewClients, match=r"round 5: .*Client 0: its secrets did not open"):
        rounds._check_left(ctx, SecureRound("work"))
