"""What serve and join say while they work, and how quiet they can be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedcli.cli
import fedsrv.cli
from fedsrv.events import EventLog
from fedtide.inprocess import run_in_process
from fedtide.trial import tiny_experiment


def test_a_server_says_what_happens(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    events.tell("joined", 3)
    events.tell("order", 3, interaction=0, round=0)
    events.tell("failed", 3, interaction=0, round=0, reason="its disk is full")
    events.tell("commit", interaction=0, round=0, task=0, loss=0.25, of=2)
    events.close()
    with caplog.at_level(logging.INFO, "fedsrv"):
        fedsrv.cli._log_events(events)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "client 3 joined"),
        ("WARNING", "client 3 failed: its disk is full"),
        ("INFO", "round 0, task 0, interaction 0 (of 2) committed, loss 0.25"),
    ]


def test_a_client_says_what_it_did(
    digits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fedcli"):
        run_in_process(tiny_experiment(schedule={"rounds": 1}), digits, tmp_path / "run")
    said = [r.message for r in caplog.records if r.name == "fedcli.runtime.worker"]
    assert said[0].startswith("client 0, round 0, task 0: loss ")
    assert said[0].endswith(" bytes go back")
    assert f"client 1: the run is over; its model is in {tmp_path / 'run/clients/1'}" in said


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (["--quiet"], "WARNING"),
        (["--log-level", "error"], "ERROR"),
        (["--log-level", "debug"], "DEBUG"),
        ([], "INFO"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "join"])
def test_how_much_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, words: list[str], level: str
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **options: found.update(options))
    if command == "serve":
        CliRunner().invoke(fedsrv.cli.app, ["serve", str(tmp_path / "no.toml"), *words])
    else:
        where = ["--client-id", "x", "--server", "h:1", "--data", str(tmp_path)]
        CliRunner().invoke(fedcli.cli.app, ["join", *where, *words])
    assert found["level"] == level
