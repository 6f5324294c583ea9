"""Clients of one process that train at the same time (``[training] together``)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fedcli.runtime.client_part import ClientPart, Training
from fedcli.runtime.worker import GivenOrder, Result
from fedmodels.training.stack import fit_together


class Together(ClientPart):
    """Does the orders of several clients in one step, where a host has some."""

    @staticmethod
    def at_once(given: Sequence[GivenOrder]) -> list[Result]:
        """Train the clients of several orders at the same time."""
        return execute_together(given)


def execute_together(given: Sequence[GivenOrder]) -> list[Result]:
    """Train the clients of several orders of one interaction at the same time.

    A client that cannot begin or end fails alone; an error in the common steps fails all. Orders
    that were abandoned have no result.
    """
    found: list[Result | None] = []
    begun: list[tuple[GivenOrder, Training]] = []
    for place, one in enumerate(given):
        try:
            half = one.worker.begin(one.order, one.payload, place)
            if isinstance(half, Result):
                found.append(half)
                continue
            half.begin_apart()
            begun.append((one, half))
        except Exception as error:
            found.append(one.worker.failed(one.order, error))
    if begun:
        found += _trained(begun)
    return [result for result in found if result is not None]


def _trained(begun: Sequence[tuple[GivenOrder, Training]]) -> list[Result | None]:
    start = time.monotonic()
    try:
        losses = fit_together([half for _, half in begun])
    except Exception as error:
        return [one.worker.failed(one.order, error) for one, _ in begun]
    each = (time.monotonic() - start) / len(begun)
    return [_ended(*pair, loss, each) for pair, loss in zip(begun, losses, strict=True)]


def _ended(one: GivenOrder, half: Training, loss: float, seconds: float) -> Result | None:
    try:
        return one.worker.end(half, half.end_apart(loss), seconds)
    except Exception as error:
        return one.worker.failed(one.order, error)
