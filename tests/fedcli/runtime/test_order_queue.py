"""Orders between two threads: none waits for ever once there is an end."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import pytest

from fedcli.runtime import order_queue
from fedcli.runtime.answers import RunOver
from fedcli.runtime.order_queue import OrderQueue
from fedmodels.errors import LinkError
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc

PAYLOAD = Bundle()


def orders(*clients: int, kind: rpc.OrderKind = rpc.ORDER_KIND_TRAIN) -> list[Any]:
    return [(rpc.Order(client_id=str(client), kind=kind), PAYLOAD) for client in clients]


def begun(call: Any, *given: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=given, daemon=True)
    thread.start()
    return thread


def clients_taken(queue: OrderQueue, number: int) -> list[str]:
    found = (queue.take() for _ in range(number))
    return [order.client_id for order, _ in filter(None, found)]


def test_one_message_waits_until_that_before_is_taken():
    """So a server that sends on and on fills no memory."""
    queue = OrderQueue()
    queue.put(orders(0, 1))
    second = begun(queue.put, orders(2))
    assert clients_taken(queue, 1) == ["0"]
    second.join(0.05)
    assert second.is_alive(), "order 1 waits"
    assert clients_taken(queue, 2) == ["1", "2"]
    second.join(10)
    assert not second.is_alive()


def test_a_failure_comes_before_what_waits_and_holds_nobody_up():
    queue = OrderQueue()
    queue.put(orders(0))
    blocked = begun(queue.put, orders(1))
    for line in ("first", "second", "third"):
        queue.end(LinkError(line))
    for _ in range(2):
        with pytest.raises(LinkError, match="first"):
            queue.take()
    blocked.join(10)
    assert not blocked.is_alive()


def test_when_the_run_is_over_clients_still_store_their_models():
    queue = OrderQueue()
    queue.put([*orders(0), *orders(1, kind=rpc.ORDER_KIND_FINISH), *orders(2)])
    queue.end()
    assert clients_taken(queue, 1) == ["1"]
    with pytest.raises(RunOver):
        queue.take()


def test_a_rest_of_ten_minutes_is_one_line(caplog, monkeypatch):
    """Each client said each minute that the server was gone, perhaps."""
    caplog.set_level(logging.INFO, "fedcli")
    monkeypatch.setattr(order_queue, "WAKE_S", 0.001)
    minutes = itertools.count()

    def clock() -> float:
        if (now := next(minutes)) == 10:
            queue.end(LinkError("gone"))
        return 60.0 * now

    queue = OrderQueue(clock)
    with pytest.raises(LinkError, match="gone"):
        queue.take()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "no order for 60 s: the run waits for others, or for new data"
