"""Fixed groups of secure sums: drop-outs, liars, restarts, and what a run says of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.parts.secure_client import SecureSums
from fedmodels.errors import RunFailed
from fedmodels.training.secure_upload import SecureUpload
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.commits import Commits
from fedsrv.parts.secure_failures import IN_A_ROW, SpoiledSums
from fedsrv.parts.secure_rounds import hidden_line
from fedsrv.progress.events import EventLog
from fedsrv.state.verification import falsified
from fedsrv.transport.remote_cohort import RemoteCohort
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage, silent
from tests.runs import Killed

TRAIN, SHARE = rpc.ORDER_KIND_TRAIN, rpc.ORDER_KIND_SHARE
EVEN, ODD = [0, 2, 4], [1, 3, 5]
"""The groups of six clients."""


def six(rounds: int = 2, **sums: Any) -> Any:
    """Return an experiment of six clients in two fixed groups, of which one suffices."""
    return tiny_experiment(
        schedule={"rounds": rounds, "clients": 6}, scenario={"tasks": 1},
        server={"min_clients": 3}, evaluate={"every": 0},
        privacy={"secure_sum": {"trust": "coordinator", "groups": 2, **sums}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory):
    made, root = six(), tmp_path_factory.mktemp("six") / "data"
    run_partition(made.data, made.scenario, 6, made.seed, root, Console(quiet=True))
    return root


@pytest.fixture
def lines(monkeypatch):
    """Return the lines of what a run tells."""
    told: list[str] = []
    monkeypatch.setattr(
        EventLog, "tell", lambda log, *_, **facts: told.append(str(facts.get("line")))
    )
    return told


def on(lie: Any, *interactions: int, kind: Any = TRAIN) -> Any:
    """Return a lie that is told in some interactions, in all unless given."""

    def told(client, order, answer):
        hit = order.kind == kind and (not interactions or order.interaction in interactions)
        return lie(client, order, answer) if hit else answer

    return told


def beyond(client, order, answer):
    """Add to the integers under the mask what no honest upload comes to."""
    masked = answer[0].weights["masked"] + torch.tensor(2**30, dtype=torch.int32)
    return replace(answer[0], weights={**answer[0].weights, "masked": masked}), *answer[1:]


def cohorts(stage: Stage) -> list[list[int]]:
    return [record["cohort"] for record in records_of(stage.out)]


@pytest.mark.parametrize("kind", [SHARE, TRAIN])
def test_a_client_that_drops_out_costs_its_group_the_round(kind, data, tmp_path):
    stage = Stage(six(), data, tmp_path / "run", on(silent, 0, kind=kind))
    stage.run()
    first, second = records_of(stage.out)
    assert (first["cohort"], second["cohort"]) == (ODD, [*range(6)])
    assert first["failed"]["0"] == "its group has 2 clients left for a secure sum; it takes 3"
    assert second["secure_sum"]["groups"] == [EVEN, ODD]


def test_a_drop_out_of_the_only_group_ends_no_run(data, tmp_path):
    """Nothing of the round counts; the model stays, and the next round goes on."""
    stage = Stage(six(3, groups=1), data, tmp_path / "run", on(silent, 1))
    stage.run()
    assert cohorts(stage) == [[*range(6)], [], [*range(6)]]
    assert "secure_sum" not in records_of(stage.out)[1]


def test_a_client_that_is_set_aside_ends_its_group_and_the_others_go_on(data, tmp_path):
    stage = Stage(six(), data, tmp_path / "run", on(silent))
    stage.lie = lambda client, order, answer: answer
    stage.run(without=(2,))
    assert cohorts(stage) == [ODD, ODD]
    assert records_of(stage.out)[0]["failed"]["0"] == "its fixed group lacks clients 2"
    alone = Stage(six(groups=1), data, tmp_path / "alone", stage.lie)
    line = r"each fixed group .* lacks clients that left .client 2."
    with pytest.raises(RunFailed, match=line):
        alone.run(without=(2,))


@pytest.mark.parametrize(
    ("method", "groups", "counts"),
    [("scaffold", 2, [ODD]), ("fedavg", 2, [[*range(6)]]), ("scaffold", 1, [])],
)
def test_a_client_that_begins_anew_is_in_no_fixed_group(
    method, groups, counts, data, tmp_path, monkeypatch, lines
):
    """Its upload would change and the others' would not, so the difference would be its own."""
    add = Commits.add

    def forgets(commits, *given, **more):
        add(commits, *given, **more)
        commits.last_trained = {c: n for c, n in commits.last_trained.items() if c != 4}

    monkeypatch.setattr(Commits, "add", forgets)
    made = tiny_experiment(**{**six(groups=groups).to_dict(), "method": method})
    why = "client 4 starts over, but "
    run_in_process(made, data, tmp_path / "run")
    first, *others = records_of(tmp_path / "run")
    assert [one["cohort"] for one in (first, *others)] == [[*range(6)], *counts]
    if not others:  # no group is left, and the run ends with the model of the first round
        assert any(why in line for line in lines)
        return
    (second,) = others
    left = {int(c) for c, line in second.get("failed", {}).items() if line.startswith(why)}
    assert left == {*range(6)} - {*second["cohort"]}


def test_a_group_that_keeps_coming_to_nothing_takes_no_further_part(data, tmp_path, lines):
    stage = Stage(six(5), data, tmp_path / "run", on(beyond))
    stage.run()
    assert cohorts(stage) == [ODD] * 5
    records = records_of(stage.out)
    assert [r["secure_sum"]["void"] for r in records] == [[EVEN]] * IN_A_ROW + [[]] * 2
    assert [r["secure_sum"]["groups"] for r in records[-2:]] == [[ODD]] * 2
    (line,) = [line for line in lines if "excluded from secure sums" in line]
    assert line == (
        "clients 0, 2, 4 are excluded from secure sums: their last 3 failed, as if "
        "one of them had lied"
    )


def test_a_group_whose_fault_passes_goes_on(data, tmp_path):
    stage = Stage(six(4), data, tmp_path / "run", on(beyond, 0, 1))
    stage.run()
    assert cohorts(stage) == [ODD, ODD, [*range(6)], [*range(6)]]


def test_a_run_whose_only_group_keeps_coming_to_nothing_ends_with_a_line(data, tmp_path, lines):
    """It keeps the last model that counts, and does not train in vain to its last round."""
    stage = Stage(six(9, groups=1), data, tmp_path / "run", on(beyond, *range(1, 9)))
    summary = stage.run()
    assert cohorts(stage) == [[*range(6)], [], [], []]
    assert [record["interaction"] for record in records_of(stage.out)] == [0, 1, 2, 3]
    assert falsified(stage.out) == []
    assert (
        summary["state_sha256"]
        == Stage(six(1, groups=1), data, tmp_path / "one", on(silent, 9)).run()["state_sha256"]
    )
    (line,) = [line for line in lines if "keep failing" in line]
    assert line.startswith("the run ends after round 4: the secure sums of all groups keep")
    assert "groups lets one group fail" in line


def test_whose_sums_came_to_nothing_is_known_after_a_restart(data, tmp_path, monkeypatch):
    """Everybody is killed after the second sum that came to nothing, and after the third one."""
    stage, ask = Stage(six(5), data, tmp_path / "run", on(beyond)), RemoteCohort.send_and_receive
    for interaction in (2, 3):

        def dying(self, trip, interaction=interaction):
            if trip.sample.interaction == interaction:
                raise Killed
            return ask(self, trip)

        monkeypatch.setattr(RemoteCohort, "send_and_receive", dying)
        with pytest.raises(Killed):
            stage.run(resume=True)
    monkeypatch.undo()
    again = stage.run(resume=True)
    whole = Stage(six(5), data, tmp_path / "whole", on(beyond)).run()
    assert again["state_sha256"] == whole["state_sha256"]
    assert [r["secure_sum"]["void"] for r in records_of(stage.out)] == [[EVEN]] * 3 + [[]] * 2


def test_of_groups_that_change_the_liar_is_found_by_its_sums():
    """Who is in a sum that comes to something leaves the row; a void of somebody who is gone says
    nothing of others."""
    groups = [[[0, 1, 2], [3, 4, 5]], [[0, 3, 4], [1, 2, 5]], [[0, 2, 5], [1, 3, 4]]]
    found = SpoiledSums([], ())
    out = [found.count(each, [each[0]]) for each in groups]
    assert out == [[], [], [0]]
    without = SpoiledSums([], (0,))
    assert [without.count(each, [each[0]]) for each in groups] == [[], [], []]


def without_examples(data: Path, place: Path, *clients: int) -> Path:
    """Copy a partition whose clients here have nothing to train on."""
    shutil.copytree(data, place)
    for client in clients:
        home = place / str(client)
        for name in ("x", "y"):
            file = home / "task-0" / f"train_{name}.npy"
            np.save(file, np.load(file)[:0])
        facts = json.loads((home / "client.json").read_text())
        facts["tasks"][0]["train"] = [0] * 10
        (home / "client.json").write_text(json.dumps(facts))
    return place


def test_a_group_in_which_too_few_have_examples_is_not_summed(data, tmp_path):
    """Who has none adds nothing, so the sum would be the upload of client 4."""
    few = without_examples(data, tmp_path / "few", 0, 2)
    stage = Stage(six(1), few, tmp_path / "run", on(silent, 9))
    stage.run()
    (record,) = records_of(stage.out)
    assert (record["cohort"], record["secure_sum"]["groups"]) == (ODD, [ODD])
    assert record["failed"]["4"] == "1 clients of its group have examples; a secure sum takes 3"


# --- the bound of a change ------------------------------------------------------------------------


def reversing(monkeypatch: pytest.MonkeyPatch, client: int = 2, times: float = 10.0) -> None:
    """Let a client send its change reversed and larger; its masks are made as ever."""
    leaves = SecureSums.leaves

    def lying(self, half, upload):
        given = half.payload.weights
        if half.ctx.client == client:
            weights = {k: given[k] - times * (w - given[k]) for k, w in upload.weights.items()}
            upload = replace(upload, weights=weights)
        return leaves(self, half, upload)

    monkeypatch.setattr(SecureSums, "leaves", lying)


@pytest.mark.parametrize(("clip", "most"), [(None, 0.5), (0.2, None), (0.0, None)])
def test_a_change_is_bounded_unless_a_run_says_otherwise(clip, most, data, tmp_path, monkeypatch):
    """By default by half the norm of the weights that clients were given."""
    seen: list[tuple[float, float]] = []
    encoded = SecureUpload.encoded

    def noting(self, upload, received, numbers):
        seen.append((self._size(received), self.rules.bound(self._size(received))))
        return encoded(self, upload, received, numbers)

    monkeypatch.setattr(SecureUpload, "encoded", noting)
    given = {} if clip is None else {"clip": clip}
    run_in_process(six(1, **given), data, tmp_path / "run")
    for size, bound in seen:
        expected = max(1.0, size / 2) if most else (clip or float("inf"))
        assert bound == pytest.approx(expected)


def test_one_of_six_that_reverses_its_change_moves_no_sum_far(data, tmp_path, monkeypatch):
    reversing(monkeypatch, times=1000.0)
    moved = {}
    for clip in (None, 0.0):
        given = {} if clip is None else {"clip": clip}
        out = tmp_path / str(clip)
        run_in_process(six(1, groups=1, largest=1e4, bits=64, **given), data, out)
        (record,) = records_of(out)
        moved[clip] = record["secure_sum"]["moved"][0]["weights"]
    assert moved[0.0] > 20 * moved[None]


# --- what a run says ------------------------------------------------------------------------------

ONE_ROUND = "hides a single round's upload and nothing more"


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({}, "2 fixed groups of 3 clients, and nobody sees more of a task than the sum"),
        ({"schedule": {"clients": 7}}, "2 fixed groups of 3 to 4 clients"),
        ({"schedule": {"clients": 9, "per_round": 6}}, ONE_ROUND),
        ({"privacy": {"secure_sum": {"fixed": False}}}, ONE_ROUND),
        (
            {"privacy": {"level": "client", "where": "clients", "noise_multiplier": 1.0,
                         "delta": 1e-3, "secure_sum": True}, "data": {"mean": [0.3], "std": [0.3]}},
            "the noise of clients hides them",
        ),
    ],
)  # fmt: skip
def test_a_run_says_what_its_sums_hide(tables, line):
    given = {"schedule": {"clients": 6}, "privacy": {"secure_sum": {"groups": 2}}, **tables}
    assert line in hidden_line(tiny_experiment(**given))
    if "fixed" in line:
        assert "what is alike in a client's uploads shows" in hidden_line(
            tiny_experiment(**given), 2
        )
