"""The built wheel in an environment of its own: commands and a run, from another directory."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import shlex
import socket
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


def built(sources: Path, place: Path) -> Path:
    """Build a wheel of sources into a directory."""
    ended([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)], sources)
    (found,) = place.glob("*.whl")
    return found


def installed(wheel: Path) -> Path:
    """Return an environment in which a wheel is installed, beside it."""
    found = wheel.parent / "venv"
    ended([sys.executable, "-m", "venv", "--without-pip", str(found)], wheel.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(found / "bin" / "python")]
    words = ["install", "--quiet", "--no-compile", "--no-index", "--no-deps", str(wheel)]
    ended([*pip, *words], wheel.parent)
    (site,) = found.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def home(wheel: Path) -> Path:
    return installed(wheel)


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


def begun(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command where nothing of this checkout can be imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.Popen(
        words, cwd=folder, env=env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def block(heading: str, language: str) -> str:
    """Return the first block of code in a language below a heading of the README."""
    section = (ROOT / "README.md").read_text().partition(f"\n## {heading}\n")[2]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.S | re.M)[:1]
    return str(found)


def write_recording(path: Path, strength: float, activities: tuple[str, ...]) -> None:
    """Write a recording of a sensor that swings at a pace of its own in each activity."""
    paces = {"sit": 0.0, "walk": 0.5, "climb": 0.9}
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["activity", "ax", "ay", "az"])
        for activity in activities:
            for moment in range(128 * 60):
                swing = strength * math.sin(paces[activity] * moment)
                noise = [random.gauss(0, 0.1) for _ in range(3)]
                rows.writerow([activity, swing + noise[0], noise[1], 1 + noise[2]])


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_own_data_of_the_readme(home, tmp_path):
    """Run the README's coordinator and sites on recordings of two people; let a site predict."""
    random.seed(0)
    (tmp_path / "activity.toml").write_text(block("Your own data", "toml"))
    write_recording(tmp_path / "site0.csv", 1.0, ("climb", "sit", "walk"))
    write_recording(tmp_path / "site1.csv", 0.6, ("sit", "walk"))
    write_recording(tmp_path / "new-recording.csv", 1.0, ("climb",))
    section = (ROOT / "README.md").read_text().partition("\n## Your own data\n")[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    lines = re.findall(r"^(fed\w+ .*127\.0\.0\.1:5055.*)$", section, flags=re.M)
    typed = [shlex.split(line.replace("5055", port)) for line in lines]
    running = [begun([str(home / "bin" / line[0]), *line[1:]], tmp_path) for line in typed]
    try:
        said = [command.communicate(timeout=300)[0] for command in running]
    finally:
        for command in running:
            command.kill()
    assert [command.returncode for command in running] == [0, 0, 0], said
    metrics = json.loads((tmp_path / "activity" / "summary.json").read_text())["metrics"]
    assert metrics["a_loc"] > 0.9
    (predict,) = re.findall(r"^fedcli (predict .*)$", section, flags=re.M)
    ended([str(home / "bin" / "fedcli"), *shlex.split(predict)], tmp_path)
    with (tmp_path / "predictions.csv").open() as file:
        named = [row["class"] for row in csv.DictReader(file)]
    assert named.count("climb") > 0.8 * len(named) > 0


def test_the_readme_starts_each_site_between_machines():
    """As many certificates and sites as the config has clients, on one machine and between."""
    clients = int(re.findall(r"^clients = (\d+)$", block("Your own data", "toml"), flags=re.M)[0])
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    joins = re.findall(r"^fedcli join --client-id (\d+) --server (\S+?):", text, flags=re.M)
    servers = ("127.0.0.1", "coordinator.example")
    assert joins == [(str(i), server) for server in servers for i in range(clients)]
    assert re.findall(r"certs issue (\d+)", text) == [str(i) for i in range(clients)]


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_open_run_of_the_readme(home, tmp_path):
    """Run the README's open run on the files of the tutorial: a site learns another's class."""
    python, folder = str(home / "bin" / "python"), tmp_path
    tutorial = (ROOT / "docs" / "tutorial-stream.md").read_text()
    for name, content in re.findall(
        r'^```\w+ title="(.*?)"\n(.*?)^```$', tutorial, flags=re.S | re.M
    ):
        (folder / name).write_text(content)
    ended([python, "months.py"], folder)
    said = ended([python, "-c", block("Data that keep coming", "python")], folder)
    (printed,) = re.findall(r"^\[[012\s]+\]$", said, flags=re.M)
    assert printed.count("2") > 10


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_sweep_of_the_readme(home, tmp_path):
    """Run the README's sweep with fewer rounds and seeds, which order its rows already."""
    fedsrv, folder = str(home / "bin" / "fedsrv"), tmp_path
    (folder / "compare.toml").write_text(block("Comparing methods", "toml"))
    words = ["sweep", "compare.toml", "--out", "compare", "--seed", "0", "--seed", "1"]
    ended([fedsrv, *words, "--set", "schedule.rounds=6"], folder)
    with (folder / "compare" / "table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if "(a_loc_received)" in row["column"]]
    found = {row["row"]: float(row["mean"]) for row in rows}
    assert [*found] == ["Alone", "FedAvg", "FedMLP"]
    assert found["FedMLP"] > found["FedAvg"] + 10
    assert (folder / "compare" / "table.tex").exists()
    assert "FedMLP" in (folder / "compare" / "differences.csv").read_text()
