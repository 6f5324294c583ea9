"""``fedsrv relay --stay``: a relay of one run after the other that is served at one address.

For each run a relay begins anew, with the files of certificates as they are then, at the address of
the one before. Nothing else is left of that. Of the runs that a queue serves side by side it is the
oldest one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NoReturn

from fedmodels.errors import FedtideError
from fedmodels.host.staying import NewRuns, Outcome, pauses
from fedmodels.times import SITE_LOOK_S
from fedpb import PROTOCOL
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.relaying import RunGone
from fedplugins.relays.uplink import REFUSALS, Uplink
from fedsrv.identity.tls import ChannelCredentials

log = logging.getLogger("fedsrv")
Ready = Callable[[str], None]
"""Told the address of a relay, once clients can join."""


def places_behind(up: str, credentials: ChannelCredentials | None, client: int) -> Sequence[int]:
    """Return behind which ports the front of a queue serves runs, the oldest first; none elsewhere.

    There are none either where nobody answers, or the queue serves no run.
    """
    ask = rpc.PrepareRequest(client_id=str(client), protocol=PROTOCOL, has_cut=True)
    with closing(Uplink(up, credentials)) as uplink:
        try:
            return [*uplink.prepare(ask).places]
        except REFUSALS:
            return ()


def relay_runs(
    relay: Callable[[str, Ready], None],
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Relay one run after the other, for good; at a bounded rate, as a coordinator names them.

    Args:
        relay: relays one run, given the address of the relay before; that is empty at first.
        wait: waits so many seconds.
        now: the time, in seconds.

    Raises:
        FedtideError: the first relay could not begin.
    """
    places, after_faults, allowed = [""], pauses(), NewRuns(now)
    while True:
        try:
            relay(places[-1], places.append)
            outcome = Outcome.OVER
        except RunGone as gone:
            log.warning("%s", gone)
            outcome = Outcome.OVER
        except (FedtideError, OSError) as error:
            if not places[-1]:
                raise
            log.error("%s", error)
            outcome = Outcome.LATER
        if outcome is Outcome.OVER:
            after_faults = pauses()
            while not allowed.take():
                wait(SITE_LOOK_S)
            continue
        pause_s = next(after_faults)
        log.warning("this relay %s; again in %g s", outcome.value, pause_s)
        wait(pause_s)
