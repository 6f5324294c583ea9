"""Options of ``serve`` and ``launch`` that plugins bring, and where pages may be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedmodels.errors import ConfigError
from fedsrv.commands import watchers as module
from fedsrv.commands.watchers import Watcher, wanted, with_watchers
from fedsrv.progress.events import EventLog

TOLD: list[object] = []
LAMP = Watcher("--lamp-port", "A lamp.", lambda *given: TOLD.append(given) or TOLD.clear)


@pytest.fixture
def lamp(monkeypatch) -> None:
    """Have a plugin bring the option ``--lamp-port``."""
    monkeypatch.setattr(module, "watchers", lambda: (LAMP,))


@pytest.mark.usefixtures("lamp")
def test_an_option_of_a_watcher_comes_to_the_command_as_what_is_watched():
    app, given = typer.Typer(), list[object]()

    @app.command()
    @with_watchers
    def run(out: Path = Path("run"), watched: Mapping[str, str] = {}) -> None:
        given.append((out, watched))

    names = ["--allowed-hosts", "a.example", "--allowed-hosts", "*.b"]
    lit = {"--lamp-port": "8080"}
    for words in ([], ["--lamp-port", "8080", "--out", "x"], ["--lamp-port", "8080", *names]):
        assert CliRunner().invoke(app, words).exit_code == 0
    named = {**lit, "--allowed-hosts": "a.example,*.b"}
    assert given == [(Path("run"), {}), (Path("x"), lit), (Path("run"), named)]
    assert "A lamp." in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.usefixtures("lamp")
def test_a_watcher_gets_the_events_the_directory_and_its_place():
    events = EventLog()
    watched = {"--lamp-port": "8080", "--allowed-hosts": "a.example,*.b"}
    (follow,) = wanted(watched, Path("run"), False)
    end = follow(events)
    assert [(events, Path("run"), "127.0.0.1", 8080, ("a.example", "*.b"))] == TOLD
    end()
    assert TOLD == []
    assert wanted({}, Path("run"), False) == []


@pytest.mark.usefixtures("lamp")
def test_a_place_that_others_reach_must_be_meant():
    line = "--lamp-port 0.0.0.0:80 can be reached from other machines without TLS"
    with pytest.raises(ConfigError, match=line):
        wanted({"--lamp-port": "0.0.0.0:80"}, Path("run"), False)
    assert len(wanted({"--lamp-port": "0.0.0.0:80"}, Path("run"), True)) == 1


@pytest.mark.usefixtures("lamp")
def test_names_that_may_ask_for_no_page_are_refused():
    with pytest.raises(ConfigError, match="--allowed-hosts is only used with --lamp-port"):
        wanted({"--allowed-hosts": "a.example"}, Path("run"), False)
