"""What an order fails for may pass: a full disk, too few open files. Then it is tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fedcli.runtime.worker import GivenOrder, Progress, Result
from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveNotWritten
from fedmodels.host.shortages import is_passing
from fedmodels.times import FIRST_WAIT_S, LONGEST_WAIT_S, ORDER_LOOK_S, PATIENCE_S

ADVICE = (
    "free some space or raise the limit; the run waits for this client, or continues "
    "without it if [server] min_clients and deadline_s allow"
)
log = logging.getLogger(__name__)
T = TypeVar("T")


def executed(given: GivenOrder) -> list[Result]:
    """Do what an order says, again for a while where it fails for want of room or of open files.

    The client is at work meanwhile, as its server sees it: it waits for the client, or goes on
    without it where its config allows that. An order that was abandoned on the way, or that nobody
    wants any more, has no result.

    Raises:
        ArchiveNotWritten: the shortage stays for longer than ``PATIENCE_S``.
    """
    return tried_again(given, partial(_done, given))


def _done(given: GivenOrder) -> list[Result]:
    found = given.worker.execute(given.order, given.payload)
    return [] if found is None else [found]


def tried_again(given: GivenOrder, do: Callable[[], list[Result]]) -> list[Result]:
    """Do what an order says by ``do``, as :func:`executed`."""
    worker = given.worker

    def is_wanted() -> bool:
        if worker.progress.interaction < 0:
            worker.progress = Progress.of(given.order)
        return not worker.progress.superseded

    found = patiently(f"client {given.order.client_id}", do, is_wanted)
    if found is None:
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
