"""What an order fails for may pass: a full disk, too few open files. Then it is tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fedcli.runtime.worker import GivenOrder, Progress, Result
from fedmodels.errors import ArchiveNotWritten
from fedmodels.printable import printable
from fedmodels.shortages import is_passing
from fedmodels.times import FIRST_WAIT_S, LONGEST_WAIT_S, ORDER_LOOK_S, PATIENCE_S
from fedpb.v1 import coordinator_pb2 as rpc

ADVICE = (
    "make room, or raise the limit; the run waits for this client, or goes on without it where "
    "[server] min_clients and deadline_s say so"
)
log = logging.getLogger(__name__)
T = TypeVar("T")


def executed(given: Sequence[GivenOrder]) -> list[Result]:
    """Do what orders of one run say, those to train at the same time where it asks for that.

    What fails for want of room or of open files is tried again for a while. An order that was
    abandoned on the way has no result.

    Raises:
        ArchiveNotWritten: the shortage stays.
    """
    if given[0].order.kind == rpc.ORDER_KIND_TRAIN:
        for part in given[0].worker.parts:
            if part.at_once is not None:
                return tried_again(given, partial(part.at_once, given))
    return [result for one in given for result in tried_again([one], partial(_alone, one))]


def _alone(one: GivenOrder) -> list[Result]:
    found = one.worker.execute(one.order, one.payload)
    return [] if found is None else [found]


def tried_again(given: Sequence[GivenOrder], do: Callable[[], list[Result]]) -> list[Result]:
    """Do what orders say, as :func:`patiently`; nothing once nobody wants it any more.

    The clients are at work meanwhile, as their server sees it: it waits for them, or goes on
    without them where its config allows that.

    Raises:
        ArchiveNotWritten: the shortage stays for longer than ``PATIENCE_S``.
    """
    working = [one.worker for one in given]

    def is_wanted() -> bool:
        for worker, one in zip(working, given, strict=True):
            if worker.progress.interaction < 0:
                worker.progress = Progress.of(one.order)
        return not all(worker.progress.superseded for worker in working)

    found = patiently(f"client {given[0].order.client_id}", do, is_wanted)
    if found is None:
        for worker in working:
            worker.progress = Progress()
    return found or []


def patiently(who: str, do: Callable[[], T], is_wanted: Callable[[], bool]) -> T | None:
    """Do something again and again while this process lacks room or open files.

    Returns:
        What it returns; None once it is wanted no more.

    Raises:
        ArchiveNotWritten: the shortage stays for longer than ``PATIENCE_S``: the process ends, and
            is waited for as one that died.
    """
    begun, wait_s = time.monotonic(), FIRST_WAIT_S
    while True:
        try:
            return do()
        except Exception as error:
            if not is_passing(error):
                raise
            why = printable(str(error))
            if time.monotonic() - begun > PATIENCE_S:
                line = f"{who}: {why}, for {PATIENCE_S:.0f} s; {ADVICE}"
                raise ArchiveNotWritten(line) from None
        log.warning("%s: %s; trying again in %.0f s: %s", who, why, wait_s, ADVICE)
        until = time.monotonic() + wait_s
        while is_wanted() and time.monotonic() < until:
            time.sleep(ORDER_LOOK_S)
        if not is_wanted():
            return None
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
