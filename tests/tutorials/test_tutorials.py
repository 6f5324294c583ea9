"""The tutorials, from an empty folder to the end: files and commands as the pages print them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import ForkServer, until

DOCS = Path(__file__).parent.parent.parent / "docs"
pytestmark = [pytest.mark.loopback, pytest.mark.slow]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def follow(page: str, folder: Path, forks: ForkServer) -> str:
    """Write the files of a page and type its commands; return what they printed."""
    text, printed = (DOCS / page).read_text(), ""
    for language, title, content in BLOCK.findall(text):
        if title:
            (folder / title).write_text(content)
        elif language == "sh":
            for line in content.splitlines():
                program, *words = line.split()
                if program == "python":
                    subprocess.run([sys.executable, *words], cwd=folder, check=True)
                    continue
                status, said = forks.typed(folder, program, *words)
                assert status == 0, f"{line}\n{said}"
                printed += said
    return printed


def a_loc(printed: str) -> float:
    """Return the percentage that the last table of a run gives."""
    return float(re.findall(r"\(a_loc\) %\W+([\d.]+)", printed)[-1])


def test_images(tmp_path, fork_server):
    printed = follow("tutorial-images.md", tmp_path, fork_server)
    assert (tmp_path / "run" / "report.html").exists()
    assert re.search(r"71\.png: disc", printed), "the right class"
    assert a_loc(printed) > 90
    assert list((tmp_path / "run").rglob("*.safetensors")) or list(tmp_path.glob("*.safetensors"))


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs the extra tables")
def test_sensors(tmp_path, fork_server):
    printed = follow("tutorial-sensors.md", tmp_path, fork_server)
    page = (DOCS / "tutorial-sensors.md").read_text()
    assert all(row in printed for row in re.findall(r"^│.*│$", page, re.MULTILINE))
    assert (tmp_path / "run" / "report.html").exists()
    assert "new.csv: walk 3" in printed
    assert (tmp_path / "predictions.csv").read_text().startswith("input,from,to,class,probability,")
    assert a_loc(printed) > 90


class FirstTerminal:
    """A command that goes on while others are typed elsewhere."""

    def __init__(self, line: str, folder: Path, forks: ForkServer) -> None:
        self.command = forks.begun(folder, *line.split())
        self.read = 0

    @property
    def printed(self) -> str:
        return self.command.output()

    def until(self, words: str) -> None:
        """Read what it prints, from where this ended last, until there are these words."""
        until(
            lambda: words in self.printed[self.read :] or self.command.has_ended(),
            f"no {words!r} came:\n{self.printed}",
        )
        found = self.printed.find(words, self.read)
        assert found >= 0, f"it ended without {words!r}:\n{self.printed}"
        self.read = found + len(words)

    def end(self) -> int:
        """Wait for its end, and return its status."""
        return self.command.wait(60)


def test_stream(tmp_path, fork_server):
    """The run waits whenever it has learned all it has; so each command comes after such a wait."""
    rests, predicted = "learned all it has", ""
    text = (DOCS / "tutorial-stream.md").read_text()
    for language, title, content in BLOCK.findall(text):
        if title:
            (tmp_path / title).write_text(content)
        elif language == "console":
            first = FirstTerminal(content, tmp_path, fork_server)
            first.until(rests)
        elif "months.py" in content:
            subprocess.run([sys.executable, "months.py"], cwd=tmp_path, check=True)
        else:
            port = re.findall(r"at 127\.0\.0\.1:(\d+)", first.printed)[0]
            status, said = fork_server.typed(tmp_path, *content.replace("PORT", port).split())
            assert status == 0, said
            predicted = said
            if "add-task" in content:
                first.until(rests)
            elif "close" in content:
                first.until("report: ")
                assert first.end() == 0
    told = re.findall(r"the run continues: (.*)", first.printed)
    assert told == ["client 0 with another task", "client 1 with another task; new classes 2"]
    assert all(f"the run continues: {line}" in text for line in told)
    assert "training data" in (tmp_path / "run" / "logs" / "client-1.log").read_text()
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert [row.split(",")[3] for row in rows].count("2") > 10, predicted
