"""The built wheel in an environment of its own: commands and a run, from another directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
RUN = """
import fedtide
assert fedtide.__file__.startswith({home!r}), fedtide.__file__
tiny = {{"schedule.rounds": 1, "schedule.clients": 2, "scenario.tasks": 1, "scenario.shards": 5}}
tiny |= {{"data.max_per_class": 12, "data.max_test_per_class": 5, "training.local_epochs": 1}}
run = fedtide.run("quickstart.toml", tiny, backend="inprocess", out="run")
print(run.personal_model(0))
"""


def ended(words: list[str], folder: Path) -> str:
    """Run a command where nothing of this checkout can be imported; return what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        words, cwd=folder, env=env, text=True, timeout=110,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(300)
def test_an_installed_wheel_runs(tmp_path: Path) -> None:
    ended([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "venv"
    ended([sys.executable, "-m", "venv", "--without-pip", str(home)], tmp_path)
    python, fedsrv = str(home / "bin" / "python"), str(home / "bin" / "fedsrv")
    pip = [sys.executable, "-m", "pip", "--python", python]
    ended([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], tmp_path)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    assert ended([fedsrv, "--version"], tmp_path).startswith("fedtide ")
    assert "quickstart.toml" in ended([fedsrv, "init", "quickstart"], tmp_path)
    ended([python, "-c", RUN.format(home=str(home))], tmp_path)
    assert (tmp_path / "run" / "summary.json").exists()
