"""What passes is waited for: a full disk, and too few open files, cost a run nothing but time."""

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

import fedtide
from fedcli.runtime import patience
from fedcli.runtime.worker import Progress
from fedmodels.console import commands
from fedmodels.errors import ArchiveNotWritten
from fedmodels.host import shortages
from fedmodels.tensors import archive
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.serving.tests.test_serving import TINY


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.0)


class Full:
    """Fails to write the first private states as a full disk makes safetensors fail."""

    def __init__(self, times: int) -> None:
        self.left, self.write = times, archive.serialize_file

    def __call__(self, data: Any, path: Any, metadata: Any) -> None:
        if "state-" in str(path) and "clients" in str(path) and self.left:
            self.left -= 1
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        self.write(data, path, metadata)


def test_a_disk_that_is_full_for_a_while_changes_no_bit(tmp_path, monkeypatch, caplog):
    schedule = {"rounds": 1, "clients": 2}
    tables = {**TINY, "method": {"name": "fedrep"}, "schedule": schedule}
    whole = fedtide.run(tables, backend="inprocess", out=tmp_path / "whole")
    full = Full(3)
    monkeypatch.setattr(archive, "serialize_file", full)
    found = fedtide.run(tables, backend="inprocess", out=tmp_path / "found")
    assert full.left == 0
    assert found.summary["state_sha256"] == whole.summary["state_sha256"]
    (line, *_) = [r.getMessage() for r in caplog.records if "trying again in" in r.getMessage()]
    for part in (
        "client 0: cannot write ", "found/clients/0/state-00000000.safetensors",
        "No space left on device", "free some space", "min_clients and deadline_s",
    ):  # fmt: skip
        assert part in line


def working(progress: Progress) -> Any:
    order = rpc.Order(client_id="7", interaction=3)
    return SimpleNamespace(worker=SimpleNamespace(progress=progress), order=order)


def full_disk() -> list[Any]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "states/7")


def test_a_shortage_that_stays_ends_the_process(monkeypatch):
    """Its server waits for it then as for one that died."""
    monkeypatch.setattr(patience, "PATIENCE_S", 0.0)
    with pytest.raises(ArchiveNotWritten, match=r"client 7: .*No space left on device: 'states/7'"):
        patience.tried_again(working(Progress()), full_disk)


def test_an_order_that_nobody_wants_any_more_is_dropped(monkeypatch):
    """The deadline has passed, or the run is over."""
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 60.0)
    task = working(Progress(3, superseded=True))
    assert patience.tried_again(task, full_disk) == []
    assert task.worker.progress == Progress()


def test_its_server_sees_a_client_at_work_meanwhile():
    task, tries = working(Progress()), list[int]()

    def once_full() -> list[Any]:
        tries.append(task.worker.progress.interaction)
        return full_disk() if len(tries) == 1 else []

    assert patience.tried_again(task, once_full) == []
    assert tries == [-1, 3]


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EMFILE, "x"), True),
        (OSError(errno.EFBIG, "x"), False),
        (OSError(errno.EACCES, "x"), False),
        (SafetensorError("I/O error: File too large (os error 27)"), False),
        (KeyError("boom"), False),
    ],
)
def test_what_passes_is_room_and_open_files(error, passes):
    assert shortages.is_passing(error) == passes


# --- how a command ends that lacks something


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "no memory is left for this process: give it more (ulimit -v"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "no memory is"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "no memory is"),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit (ulimit -n)"),
        (OSError(errno.EFBIG, "File too large", "x.npy"), "x.npy: files of this process may get"),
    ],
)
def test_a_command_says_in_a_line_what_it_lacks(error, line, capsys):
    def app(*_: Any, **__: Any) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        commands.run_command(app, [])
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert line in said
    assert said.count("\n") == 1


def test_a_command_needs_some_open_files(monkeypatch, capsys):
    limits, raised = {"now": (16, 16)}, list[Any]()
    monkeypatch.setattr(shortages.resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(shortages.resource, "setrlimit", lambda which, to: raised.append(to))
    with pytest.raises(SystemExit):
        commands.run_command(lambda *_, **__: None, [])
    assert "this process may open 16 files, but needs 64 (ulimit -n)" in capsys.readouterr().err
    limits["now"] = (16, 1024)
    commands.run_command(lambda *_, **__: None, [])
    assert raised == [(64, 1024)]


def test_a_limit_of_file_sizes_is_no_full_disk(monkeypatch):
    endless = shortages.resource.RLIM_INFINITY
    monkeypatch.setattr(shortages.resource, "getrlimit", lambda which: (endless, endless))
    assert shortages.why_cut_off() == "the disk is full, or fails"
    monkeypatch.setattr(shortages.resource, "getrlimit", lambda which: (4096, endless))
    assert "files of this process may get no larger (ulimit -f)" in shortages.why_cut_off()
