"""The allocator settings, as glibc itself reports them."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from fedmodels.host.machine import keep_large_blocks
if sys.argv[1] == "kept":
    assert keep_large_blocks()
held, barrier = [], threading.Barrier(4)
def work():
    barrier.wait()
    held.append([bytearray(1000 * n) for n in range(50)])
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
block = bytearray(64 << 20)
ctypes.CDLL(None).malloc_stats()
"""


def stats(how: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def mapped(stats: str) -> int:
    """Return the most bytes of blocks in mappings of their own."""
    return int(stats.rsplit("max mmap bytes", 1)[1].strip(" =\n"))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_one_heap_for_all_threads_and_for_large_blocks():
    plain, kept = stats("plain"), stats("kept")
    assert plain.count("Arena ") > 1
    assert kept.count("Arena ") == 1
    assert mapped(plain) > 64 << 20 > mapped(kept)
