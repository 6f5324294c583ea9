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

import pytest
import torch

from tests.sizes import PACKAGES, ROOT, sources

RUN = """
import fedtide
assert fedtide.__file__.startswith({home!r}), fedtide.__file__
run = fedtide.run("quickstart", backend="inprocess", out="again")
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


def check_quickstart(fedsrv: str, folder: Path) -> None:
    """Run the first launches of the README; check what it says of them, and the digests."""
    lines = re.findall(r"^fedsrv (launch .*)$", (ROOT / "README.md").read_text(), flags=re.M)[:2]
    said = [ended([fedsrv, *shlex.split(line)], folder) for line in lines]
    printed = [re.findall(r"^state digest: (\w{64})$", text, flags=re.M) for text in said]
    outs = ("run", "fedavg", "again")
    ends = [json.loads((folder / out / "summary.json").read_text()) for out in outs]
    mine, theirs, again = (end["state_sha256"] for end in ends)
    assert printed == [[mine], [theirs]]
    assert mine == again != theirs
    personal, plain = (end["metrics"] for end in ends[:2])
    assert personal["a_loc"] > 0.75 > 0.7 > plain["a_loc"]
    assert plain["a_glo"] < 0.5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_installed_wheel_runs(tmp_path):
    ended([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    check_content(wheel)
    home = tmp_path / "venv"
    ended([sys.executable, "-m", "venv", "--without-pip", str(home)], tmp_path)
    python, fedsrv = str(home / "bin" / "python"), str(home / "bin" / "fedsrv")
    pip = [sys.executable, "-m", "pip", "--python", python]
    ended(
        [*pip, "install", "--quiet", "--no-compile", "--no-index", "--no-deps", str(wheel)],
        tmp_path,
    )
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    assert ended([fedsrv, "--version"], tmp_path).startswith("fedtide ")
    assert "quickstart.toml" in ended([fedsrv, "init", "quickstart"], tmp_path)
    ended([python, "-c", RUN.format(home=str(home))], tmp_path)
    check_quickstart(fedsrv, tmp_path)
