"""What a sweep shows while its runs go on: read from their logs, with the time left."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from fedplugins.studies import progress as module
from fedplugins.studies.plan import PlannedRun
from fedplugins.studies.progress import MAX_SHOWN, SweepProgress
from fedsrv.progress.event_lines import EventFormatter
from fedsrv.progress.events import Event


@dataclass
class Run:
    """A run of a sweep whose log a test writes."""

    directory: Path

    @property
    def is_finished(self) -> bool:
        return (self.directory / "summary.json").exists()

    def finish(self) -> None:
        (self.directory / "summary.json").touch()

    def log(self, text: str) -> None:
        with self.directory.with_name(f"{self.directory.name}.log").open("a") as file:
            file.write(text)

    def commits(self, interaction: int, of: int) -> None:
        """Log what the launcher says of a commit."""
        facts = {"task": 0, "of": of, "loss": 1.5, "bytes": {"down": 1, "up": 2}}
        event = Event("commit", interaction=interaction, round=interaction, detail=facts)
        self.log(f"{EventFormatter().line(event)}\n")


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    made = [Run(tmp_path / name) for name in ("a-seed0", "b-seed0", "c-seed0")]
    for run in made:
        run.directory.mkdir()
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what sets the time that is told."""
    told = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: told[0])

    def at(seconds: float) -> float:
        told[0] = seconds
        return seconds

    return at


def shown(runs: list[Run], said: list[str], console: Console | None = None) -> SweepProgress:
    return SweepProgress([cast("PlannedRun", run) for run in runs], said.append, console)


def test_without_a_terminal_a_line_says_now_and_then_how_far_the_runs_are(runs, clock):
    first, second, third = runs
    third.finish()
    first.log("of an earlier time: interaction 9 of 9: round 9 committed\n")
    said: list[str] = []
    progress = shown(runs, said)
    progress.look(clock(20))
    assert said == [], "none has begun"
    first.log("waiting for 2 clients\n")
    progress.look(clock(21))
    assert said == ["a-seed0 begins; 1 of 3 runs have ended"]
    for step in range(3):
        first.commits(step, 10)
        progress.look(clock(22 + step))
    assert len(said) == 1, "not so often"
    progress.look(clock(31))
    assert said[1:] == [
        "a-seed0 3 of 10, about 7 s left; 1 of 3 runs have ended, about 24 s left"
    ]  # 7 s, and b as long as a takes in all: 10 s since 21 and 7 s
    progress.look(clock(60))
    assert len(said) == 2 or said[2].startswith("a-seed0 3 of 10")
    first.finish()
    progress.look(clock(61))
    assert said[-1] == "a-seed0 has finished after 40 s: 2 of 3 runs have ended"
    second.log("error: its disk is full\n")
    progress.look(clock(62))
    before = len(said)
    progress.end(cast("PlannedRun", second))
    assert len(said) == before, "what failed is said elsewhere"
    assert progress.summary() == "3 of 3 runs have ended"


def test_half_a_line_is_read_when_it_is_whole(runs, clock):
    run = runs[0]
    progress = shown(runs, [])
    run.log("interaction 1 of 7: round 1, task 0 comm")
    progress.look(clock(1))
    run.log("itted, loss 1\n")
    progress.look(clock(2))
    now = progress.runs[run.directory]
    assert (now.interactions, now.of) == (1, 7)
    assert now.line == "interaction 1 of 7: round 1, task 0 committed, loss 1"


def test_a_terminal_has_a_table_of_the_runs_under_way(runs, clock):
    written, said = io.StringIO(), list[str]()
    console = Console(file=written, force_terminal=True, width=120)
    runs[2].finish()
    with shown(runs, said, console) as progress:
        runs[0].commits(0, 4)
        progress.look(clock(1))
        runs[0].commits(1, 4)
        runs[1].log("a [b] c\n")
        progress.look(clock(100))
    text = written.getvalue()
    assert "a-seed0 2 of 4, about 3 min 18 s left" in text
    assert "b-seed0 begins" in text
    assert "a [b] c" in text
    assert "1 of 3 runs have ended" in text
    assert said == []


def test_of_many_runs_under_way_some_are_shown(tmp_path, clock):
    runs = [Run(tmp_path / f"{k:02}") for k in range(MAX_SHOWN + 3)]
    written = io.StringIO()
    progress = shown(runs, [], Console(file=written, force_terminal=True, width=120))
    for run in runs:
        run.log("begins\n")
    progress.look(clock(1))
    Console(file=written, width=120).print(progress._render())
    assert "and 3 more" in written.getvalue()
