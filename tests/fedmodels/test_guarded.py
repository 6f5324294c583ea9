"""A value that threads share: whoever touches it without its lock is told so."""

import subprocess
import sys
import threading

import pytest

from fedmodels.host import guarded
from fedmodels.host.guarded import Guarded
from tests.integration.harness import environment


class Counter:
    count: Guarded[int] = Guarded("lock")

    def __init__(self, lock):
        self.lock = lock
        self.count = 0


@pytest.mark.parametrize("lock", [threading.RLock, threading.Condition])
def test_a_value_is_touched_under_its_lock(lock):
    counter = Counter(lock())
    with counter.lock:
        counter.count += 1
        assert counter.count == 1
    with pytest.raises(AssertionError, match=r"Counter\.count without lock"):
        counter.count = 2
    with pytest.raises(AssertionError, match=r"Counter\.count without lock"):
        _ = counter.count


def test_another_thread_s_lock_is_none_of_ones_own():
    counter, found = Counter(threading.RLock()), list[BaseException]()

    def touch():
        try:
            counter.count += 1
        except AssertionError as error:
            found.append(error)

    with counter.lock:
        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()
    assert len(found) == 1


def test_outside_of_tests_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(guarded, "checked", False)
    counter = Counter(threading.RLock())
    counter.count += 1
    assert counter.count == 1


def test_processes_that_tests_start_check_as_tests_do():
    code = "from fedmodels.host import guarded; print(guarded.checked)"
    for more, said in (({}, "True"), ({guarded.VARIABLE: ""}, "False")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(**more), capture_output=True, text=True
        )
        assert done.stdout.strip() == said, done.stderr
