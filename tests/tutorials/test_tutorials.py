"""The tutorials, from an empty folder to the end: files and commands as the pages print them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import fork_server, steer
from tests.integration.harness import ForkServer

__all__ = ["fork_server", "steer"]

DOCS = Path(__file__).parent.parent.parent / "docs"
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


@pytest.mark.loopback
@pytest.mark.timeout(300)
def test_images(tmp_path: Path, fork_server: ForkServer) -> None:
    printed = follow("tutorial-images.md", tmp_path, fork_server)
    assert (tmp_path / "run" / "report.html").exists()
    assert re.search(r"71\.png: disc", printed), "the right class"
    assert a_loc(printed) > 90
    assert list((tmp_path / "run").rglob("*.safetensors")) or list(tmp_path.glob("*.safetensors"))


@pytest.mark.loopback
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="needs the extra tables")
def test_sensors(tmp_path: Path, fork_server: ForkServer) -> None:
    printed = follow("tutorial-sensors.md", tmp_path, fork_server)
    page = (DOCS / "tutorial-sensors.md").read_text()
    assert all(row in printed for row in re.findall(r"^│.*│$", page, re.MULTILINE))
    assert (tmp_path / "run" / "report.html").exists()
    assert "new.csv: walk 3" in printed
    assert (tmp_path / "predictions.csv").read_text().startswith("input,from,to,class,probability,")
    assert a_loc(printed) > 90
