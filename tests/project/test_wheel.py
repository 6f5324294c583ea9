"""The built wheel in an environment of its own: commands and a run, from another directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sizes import PACKAGES, ROOT, sources

RUN = """
import fedtide
assert fedtide.__file__.startswith({home!r}), fedtide.__file__
run = fedtide.run("quickstart", {short!r}, backend="inprocess", out="again")
print(run.personal_model(0))
"""


def ended(words: list[str], folder: Path) -> str:
    """Run a command where nothing of this checkout can be imported; return what it printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        words, cwd=folder, env=env, text=True, timeout=600,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def check_content(wheel: Path) -> None:
    """Check that a wheel holds the packages, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    tops = {name.split("/")[0] for name in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert len(tops) == len(PACKAGES) + 1
    assert {f"{package}/py.typed" for package in PACKAGES} <= held
    files = [path for package in PACKAGES for path in sources(package)]
    files += PACKAGES["fedpb"].rglob("*.proto")
    places = (path.relative_to(ROOT).as_posix() for path in files)
    assert {re.sub(r"^(models|proto)/", "", place) for place in places} <= held
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in held)
    assert not {name for name in held if "__pycache__" in name or name.endswith(".pyc")}


SHORT = {"schedule.rounds": 1, "data.max_per_class": 20}


def launched(words: list[str], folder: Path, out: str) -> dict[str, Any]:
    """Launch a run; return its summary, of which the command prints the digest."""
    said = ended(words, folder)
    found: dict[str, Any] = json.loads((folder / out / "summary.json").read_text())
    assert re.findall(r"^state digest: (\w{64})$", said, flags=re.M) == [found["state_sha256"]]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    ended([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)], ROOT)
    (found,) = place.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def home(wheel: Path) -> Path:
    """Return an environment in which the wheel is installed."""
    found = wheel.parent / "venv"
    ended([sys.executable, "-m", "venv", "--without-pip", str(found)], wheel.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(found / "bin" / "python")]
    words = ["install", "--quiet", "--no-compile", "--no-index", "--no-deps", str(wheel)]
    ended([*pip, *words], wheel.parent)
    (site,) = found.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installed_wheel_runs(wheel, home, tmp_path):
    """A short quickstart ends in the same state from the shell and from Python."""
    check_content(wheel)
    python, fedsrv = str(home / "bin" / "python"), str(home / "bin" / "fedsrv")
    assert ended([fedsrv, "--version"], tmp_path).startswith("fedtide ")
    assert "quickstart.toml" in ended([fedsrv, "init", "quickstart"], tmp_path)
    ended([python, "-c", RUN.format(home=str(home), short=SHORT)], tmp_path)
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    sets = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    words = [fedsrv, "launch", "quickstart.toml", "--out", "run", *sets]
    assert launched(words, tmp_path, "run")["state_sha256"] == again["state_sha256"]


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_the_first_launches_of_the_readme_end_as_it_says(home, tmp_path):
    lines = re.findall(r"^fedsrv (launch .*)$", (ROOT / "README.md").read_text(), flags=re.M)[:2]
    fedsrv = str(home / "bin" / "fedsrv")
    personal, plain = (
        launched([fedsrv, *shlex.split(line)], tmp_path, out)
        for line, out in zip(lines, ("run", "fedavg"), strict=True)
    )
    assert personal["state_sha256"] != plain["state_sha256"]
    assert personal["metrics"]["a_loc"] > 0.75 > 0.7 > plain["metrics"]["a_loc"]
    assert plain["metrics"]["a_glo"] < 0.5
