"""What made a run is kept: versions and machine, also of its earlier parts."""

from __future__ import annotations

import json

import pytest

from fedsrv.coordinator import Listen, serve, write_facts
from fedsrv.progress.events import Event, EventLog
from tests.conftest import tiny_experiment


def test_a_run_keeps_what_made_its_earlier_parts(tmp_path):
    """Another release of torch rounds otherwise: nobody else could tell why a digest differs."""
    experiment, env = tiny_experiment(), tmp_path / "env.json"
    assert write_facts(tmp_path, experiment) == ""
    now = json.loads(env.read_text())
    assert "earlier" not in now
    env.write_text(json.dumps({**now, "torch": "2.9", "cpus": 96}))
    assert write_facts(tmp_path, experiment) == "torch 2.9, cpus 96"
    assert json.loads(env.read_text()) == {**now, "earlier": "torch 2.9, cpus 96"}
    assert write_facts(tmp_path, experiment) == ""
    env.write_text(json.dumps({**now, "torch": "2.8", "earlier": "torch 2.9"}))
    write_facts(tmp_path, experiment, computes=False)
    assert json.loads(env.read_text())["torch"] == "2.8", "a run that has ended was made by it"
    write_facts(tmp_path, experiment)
    assert json.loads(env.read_text())["earlier"] == "torch 2.9; torch 2.8"
    env.write_text("nonsense")
    assert write_facts(tmp_path, experiment) == ""
    assert json.loads(env.read_text()) == now


def test_a_run_that_goes_on_under_another_version_says_so(tmp_path):
    told: list[Event] = []

    def begun(address: str, events: EventLog) -> None:
        events.close()
        told.extend(event for event in events.listen(from_start=True) if event.kind == "note")
        raise KeyboardInterrupt

    experiment = tiny_experiment()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            serve(experiment, tmp_path / "run", Listen("127.0.0.1:0"), resume=True, on_ready=begun)
        env = tmp_path / "run" / "env.json"
        env.write_text(json.dumps({**json.loads(env.read_text()), "fedtide": "0.0.9"}))
    (note,) = told
    assert "computed so far with fedtide 0.0.9: others may round" in note.detail["line"]
