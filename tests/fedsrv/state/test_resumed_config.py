"""A run that goes on keeps the defaults that it began with, whatever a later release has."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w

from fedmodels.config.changes import difference
from fedmodels.errors import ConfigError
from fedsrv.state.resumed_config import read_resumed
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment

KEY = "evaluate.batch_size"


def begun(path: Path, batch_size: int, **facts: str) -> None:
    """Make a run whose batches for scores have another size than the default of this release."""
    store = Store(path, tiny_experiment(evaluate={"batch_size": batch_size}), resume=False)
    if facts:
        store.ledger.set_facts(**facts)
    store.close()


def config_of(path: Path, **tables) -> Path:
    """Write a config that leaves out whatever is not given, as people write it."""
    whole = tiny_experiment().to_dict()
    given = {"data", "scenario", "net", "method", "schedule"}
    path.write_text(tomli_w.dumps({k: v for k, v in whole.items() if k in given} | tables))
    return path


def test_what_the_run_resolved_wins_over_a_changed_default(tmp_path, caplog):
    begun(tmp_path / "run", 7, defaults=f'{{"{KEY}": 7}}')
    config = config_of(tmp_path / "e.toml", training=tiny_experiment().to_dict()["training"])
    with caplog.at_level(logging.WARNING):
        found = read_resumed(config, [], tmp_path / "run")
    assert found.evaluate.batch_size == 7
    assert caplog.messages == [
        f"note: the config leaves out {KEY}: the run keeps the default that it began with, "
        f"{KEY} = 7"
    ]
    Store(tmp_path / "run", found, resume=True).close()
    assert read_resumed(config, [], tmp_path / "run").evaluate.batch_size == 7  # and again


def test_a_run_that_holds_a_key_which_was_removed_at_its_default_goes_on(tmp_path):
    """``[training] together`` was 1 unless a config said something else."""
    tables = tiny_experiment(evaluate={"batch_size": 7}).to_dict()
    tables["training"]["together"] = 1
    held = {"experiment": json.dumps(tables), "defaults": '{"training.together": 1}'}
    begun(tmp_path / "run", 7, **held)
    before = config_of(tmp_path / "before.toml", training=tables["training"])
    found = read_resumed(before, [f"{KEY}=7"], tmp_path / "run")
    assert "together" not in found.to_dict()["training"]
    again = tiny_experiment(evaluate={"batch_size": 7})
    Store(tmp_path / "run", again, resume=True).close()


def test_a_run_of_a_version_that_recorded_no_defaults(tmp_path):
    begun(tmp_path / "run", 7)
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as db:
        db.execute("DELETE FROM meta WHERE key = 'defaults'")
        db.commit()
    config = config_of(tmp_path / "e.toml", training=tiny_experiment().to_dict()["training"])
    found = read_resumed(config, [], tmp_path / "run")
    assert difference(tiny_experiment(evaluate={"batch_size": 7}), found) == []


@pytest.mark.parametrize("how", ["taken out", "changed", "by option"])
def test_what_was_said_may_not_be_unsaid(tmp_path, how):
    begun(tmp_path / "run", 7)
    tables = {"evaluate": {"batch_size": 8}} if how == "changed" else {}
    training = tiny_experiment().to_dict()["training"]
    config = config_of(tmp_path / "e.toml", training=training, **tables)
    sets = [f"{KEY}=9"] if how == "by option" else []
    now = read_resumed(config, sets, tmp_path / "run")
    with pytest.raises(ConfigError, match=f"it differs in {KEY}"):
        Store(tmp_path / "run", now, resume=True)


def test_a_changed_value_is_the_default_of_no_release(tmp_path):
    begun(tmp_path / "run", 7, defaults=f'{{"{KEY}": 6, "training.lr": 5}}')
    store = Store(tmp_path / "run", tiny_experiment(evaluate={"batch_size": 7}), resume=True)
    defaults = store.ledger.fact("defaults", dict)
    store.close()
    assert KEY not in defaults
    assert defaults["server.max_rollback"] == tiny_experiment().server.max_rollback
