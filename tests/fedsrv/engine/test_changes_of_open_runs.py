"""What of an open run is changed by ``--resume``: from when on it holds, and what a crash does."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedcli.data.store.growing import add_task
from fedmodels.errors import ConfigError
from fedsrv.state.ledger import Ledger
from fedsrv.state.recovery import recover
from tests.conftest import records_of
from tests.fedsrv.engine.test_open_run import Dies, arrays_in, opened, own
from tests.runs import Killed

__all__ = ["own"]


def changes_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return what was changed before which interaction, as the records have it."""
    growths = [g for record in records_of(run) for g in record.get("growths", ())]
    return {g["interaction"]: g["changes"] for g in growths if "changes" in g}


def changed(own: Path, run: Path, kills: dict[int, int], method: str) -> dict[str, Any]:
    """Learn a month, then two with another rate, more rounds and drift, and one as it began."""
    other = {"training": {"lr": 0.5}, "rounds": 2, "evaluate": {"drift": True}}
    summary = None
    for number, tables in enumerate([{}, other, other, {}]):
        for client in (0, 1) if number else ():
            source = arrays_in(own.parent / f"in-{number}-{client}", [1, 2], number)
            add_task(own, client, source)
        at_rest, how = "close" if number == 3 else "pause", {"rounds": 1, **tables}
        if number in kills:
            with pytest.raises(Killed):
                opened(own, run, at_rest, before=Dies(kills[number]), method=method, **how)
        summary = opened(own, run, at_rest, method=method, **how)
    assert summary is not None
    return summary


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_a_change_holds_from_the_next_stage_on_and_a_crash_changes_no_bit(method, own, tmp_path):
    """Drift needs states that clients of FedAvg kept none of; it comes and goes."""
    other = tmp_path / "other" / "data"
    shutil.copytree(own, other)
    whole = changed(own, tmp_path / "whole", {}, method)
    found = changes_of(tmp_path / "whole")
    keys = ["evaluate.drift", "schedule.rounds", "training.lr"]
    assert {n: sorted(changes) for n, changes in found.items()} == {1: keys, 5: keys}
    assert found[1]["training.lr"] == [0.05, 0.5] == found[5]["training.lr"][::-1]
    records = records_of(tmp_path / "whole")
    assert ["input_drift" in r["clients"]["0"] for r in records] == [False] * 3 + [True] * 2 + [
        False
    ]
    moved = [r["clients"]["0"]["difference_norm"] for r in records]
    assert moved[1] > 10 * moved[0]
    again = changed(other, tmp_path / "again", {0: 1, 1: 2, 2: 3, 3: 0}, method)
    assert again["state_sha256"] == whole["state_sha256"]
    assert changes_of(tmp_path / "again") == found


def test_a_database_made_anew_knows_what_a_run_began_with(own, tmp_path):
    run, new = tmp_path / "run", {"facts": True, "training": {"lr": 0.5}, "trigger": {"every_s": 9}}
    opened(own, run, facts=True)
    opened(own, run, **new)
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 1))
    opened(own, run, **new)
    began = began_of(run)
    for file in run.glob("run.db*"):
        file.unlink()
    recover(run, lambda line: None)
    assert began_of(run) == began
    assert began["training.lr"] == 0.05
    assert "trigger.every_s" not in began


def began_of(run: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(run / "run.db")) as db:
        ((found,),) = db.execute("SELECT value FROM meta WHERE key = 'began'").fetchall()
    return dict(json.loads(found))


def test_what_cannot_change_is_refused_in_a_line(own, tmp_path):
    run = tmp_path / "run"
    opened(own, run)
    with pytest.raises(ConfigError, match=r"method\.name cannot change in it: resume with what"):
        opened(own, run, method="fedprox")
    with pytest.raises(ConfigError, match=r"clients = 1, and client 1 is in the run: 2 at least"):
        opened(own, run, schedule={"clients": 1})
    with closing(Ledger(run / "run.db", strict=False, new=False)) as ledger:
        ledger.set_facts(end='{"summary": {}}')
    with pytest.raises(ConfigError, match=r"has ended: training\.lr cannot change any more"):
        opened(own, run, training={"lr": 0.5})
