import os
from pathlib import Path

import pytest
import torch

from fedmodels.errors import PayloadTooLarge
from fedsrv.transport.spool import Spool


def in_memory(buffer):
    return buffer.obj.base.flags.owndata


def address_of(buffer):
    return buffer.obj.ctypes.data


def test_memory_up_to_the_budget_then_files(tmp_path):
    spool = Spool(tmp_path / "spool", 100)
    first, second, third = (spool.allocate(n) for n in (50, 50, 1))
    assert [in_memory(b) for b in (first, second, third)] == [True, True, False]
    assert [len(b) for b in (first, second, third)] == [50, 50, 1]


def test_an_upload_beyond_half_of_the_budget_goes_to_a_file(tmp_path):
    """With two of them one would take all memory, and the other one wait in a file all the same."""
    spool = Spool(tmp_path / "spool", 100)
    assert [in_memory(spool.allocate(n)) for n in (51, 50)] == [False, True]


def test_buffers_hold_what_is_written(tmp_path):
    spool = Spool(tmp_path, 10)
    buffers = [spool.allocate(n) for n in (10, 5000, 7, 5000)]
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number + 1]) * len(buffer)
    for number, buffer in enumerate(buffers):
        assert bytes(buffer) == bytes([number + 1]) * len(buffer)


def test_files_have_no_name(tmp_path):
    spool = Spool(tmp_path / "spool", 0)
    buffer = spool.allocate(1 << 20)
    buffer[-1] = 7
    assert os.listdir(tmp_path / "spool") == []


def test_nothing_is_touched_within_the_budget(tmp_path):
    spool = Spool(tmp_path / "spool", 100)
    assert all(in_memory(spool.allocate(50)) for _ in range(2))
    assert not (tmp_path / "spool").exists()


def test_memory_nobody_refers_to_is_used_again(tmp_path):
    """Memory does not grow with the number of uploads, only with those held at once."""
    spool = Spool(tmp_path, 100)
    places = set()
    for _ in range(5):
        held = [spool.allocate(50) for _ in range(2)]
        places |= {address_of(b) for b in held}
        assert all(map(in_memory, held))
        mapped = spool.allocate(50)
        assert not in_memory(mapped)
        places.add(address_of(mapped))
        del held, mapped
    assert len(places) == 3


def test_a_tensor_keeps_the_memory_it_lies_in(tmp_path):
    """A method may keep an upload's tensor: nothing is written over it."""
    spool = Spool(tmp_path, 200)
    buffer = spool.allocate(100)
    buffer[:] = b"\x05" * 100
    kept = torch.frombuffer(buffer, dtype=torch.uint8, count=10, offset=20)
    del buffer
    other = spool.allocate(100)
    other[:] = b"\x09" * 100
    assert kept.tolist() == [5] * 10
    del kept, other
    assert in_memory(spool.allocate(100))


def test_sizes_may_change(tmp_path):
    """Blocks nobody uses make room for those of another size."""
    spool = Spool(tmp_path, 100)
    held = [spool.allocate(45) for _ in range(2)]
    del held
    kept = [spool.allocate(50) for _ in range(3)]
    assert [in_memory(b) for b in kept] == [True, True, False]


def test_files_of_a_size_nobody_asks_for_go(tmp_path):
    spool = Spool(tmp_path, 0)
    mapped = [spool.allocate(1 << 20) for _ in range(3)]
    assert open_files_below(tmp_path) == 3
    del mapped
    assert open_files_below(tmp_path) == 3  # kept for the next of their size
    kept = spool.allocate(1 << 20)
    other = spool.allocate(1 << 19)
    assert open_files_below(tmp_path) == 2
    del kept, other


def open_files_below(directory):
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(directory) in line for line in mapped)


def test_empty_uploads(tmp_path):
    assert len(Spool(tmp_path, 100).allocate(0)) == 0
    assert len(Spool(tmp_path, -1).allocate(0)) == 0


def test_a_full_disk_refuses_the_upload(tmp_path, monkeypatch):
    """Else the process would die where it writes into the mapping."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(PayloadTooLarge, match=r"no room for it in .*: No space left on device"):
        Spool(tmp_path, 0).allocate(100)
