"""A run of the last release continues under this version, and back: wheels, and kills between."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.project.test_wheel import built, ended, installed, launched

ROOT = Path(__file__).parent.parent.parent
SETS = {
    "method.name": "fedavg", "schedule.rounds": 12, "schedule.clients": 2, "data.max_per_class": 20,
}  # fmt: skip


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def earlier() -> str:
    """Return the last tag; before the first one, the commit of ``integration/earlier``."""
    frozen = ("log", "-1", "--format=%H", "--", "tests/integration/earlier/fedpb.v1.binpb")
    return git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^") or git(*frozen)


def killed(words: list[str], folder: Path, after: int) -> None:
    """Begin a launch, and kill all of its processes once so many rounds are committed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    rounds = folder / "run" / "rounds.jsonl"
    with (folder / "said.txt").open("ab") as said:
        running = subprocess.Popen(
            words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    while running.poll() is None and not (
        rounds.exists() and rounds.read_bytes().count(b"\n") >= after
    ):
        time.sleep(0.01)
    assert running.returncode in (None, 0), (folder / "said.txt").read_text()
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_a_run_of_the_last_release_goes_on_here_and_back(tmp_path):
    """Killed under each, it ends in the state of a run that this version computed alone."""
    if not (ROOT / ".git").exists():
        pytest.skip("a release is built from a clone")
    (tmp_path / "then").mkdir()
    archive = tmp_path / "then.tar"
    ref = earlier()
    assert ref, "the clone has no history: fetch it"
    subprocess.run(["git", "archive", f"--output={archive}", ref], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, tmp_path / "then")
    then = installed(built(tmp_path / "then", tmp_path / "old"))
    now = installed(built(ROOT, tmp_path / "new"))
    sets = [word for key, value in SETS.items() for word in ("--set", f"{key}={value}")]
    launch = ["launch", "quickstart", *sets, "--no-forecast", "--out"]
    old, new = (str(home / "bin" / "fedsrv") for home in (then, now))
    whole = launched([new, *launch, "whole"], tmp_path, "whole")
    killed([old, *launch, "run"], tmp_path, after=2)
    assert "database" in ended([new, "doctor", "run"], tmp_path)
    killed([new, *launch, "run", "--resume"], tmp_path, after=6)
    there = launched([old, *launch, "run", "--resume"], tmp_path, "run")
    assert there["state_sha256"] == whole["state_sha256"]
    assert "hold" in ended([new, "verify", "run"], tmp_path)
