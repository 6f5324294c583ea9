"""One thing at a time between two threads."""

import threading

from fedcli.slot import Slot


def test_things_come_in_order():
    slot, found = Slot[int](), list[int]()
    sender = threading.Thread(target=lambda: [slot.put(n) for n in range(100)])
    sender.start()
    found = [slot.get() for _ in range(100)]
    sender.join()
    assert found == list(range(100))


def test_the_second_waits_until_the_first_is_taken():
    slot, went_in = Slot[str](), threading.Event()
    slot.put("first")

    def put() -> None:
        slot.put("second")
        went_in.set()

    sender = threading.Thread(target=put)
    sender.start()
    assert not went_in.wait(0.1)
    assert slot.get() == "first"
    assert went_in.wait(5)
    assert slot.get() == "second"
    sender.join()
