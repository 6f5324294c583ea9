"""One process at a time has a client's states."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.state import LOCK, lock_states
from fedmodels.errors import ArchiveError

HOLDS = """
import sys
from pathlib import Path
from fedcli.runtime.state import lock_states
lock_states(Path(sys.argv[1]), [3, 4, "evaluator"])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory of which another process has clients 3 and 4 and the evaluator."""
    place = tmp_path_factory.mktemp("states")
    words = [sys.executable, "-c", HOLDS, str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        yield place
        other.stdin.close()


@pytest.mark.parametrize("client", [4, "evaluator"])
def test_a_client_that_runs_already_is_refused(client, states, digits):
    link: Any = SimpleNamespace(close=lambda: None)  # nothing is asked of the server
    with pytest.raises(ArchiveError, match=rf"client {client} runs already, with its state in "):
        Host([client], link, digits, states, torch.device("cpu")).run()
    assert sorted(path.name for path in states.iterdir()) == [LOCK]


def test_others_of_the_directory_may_run(states):
    assert lock_states(states, [2, 5, *range(100, 200)]) is not None


def test_a_place_that_cannot_be_locked_is_left_to_whoever_writes_there(tmp_path):
    (tmp_path / "file").touch()
    assert lock_states(tmp_path / "file", [0]) is None
