"""What a relay's clients bring: everything but their weights each, and one sum of the weights.

A relay passes on the uploads of its clients. Where the mean of the weights is all that the method
reads, it adds the weights up and sends their sum once for a group: the clients of a trip that share
the relay. The root forms the groups when the trip begins, by the relays of the sessions. So they do
not depend on who comes first, and neither do the bits of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.tensors.differences import STATISTICS, Given, Measured
from fedmodels.tensors.differences import WEIGHTS as PARAMETERS
from fedmodels.tensors.weighted_mean import mean_of_sums
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Trip

LEFT_OUT_S = 15.0
"""Time in which a client that a sum left out must come whole: it brings its upload again where the
relay never heard that the first one came."""
SUM_S, SUM_BYTES_PER_S = 90.0, 16 << 10
"""Time for a sum: that of a Push of its size, and half a minute to begin it."""
WEIGHTS, ONLY_SCORED = "weights/", "weights/eval/"
ROUNDING = 1e-4
"""Part of a norm by which rounding to float32 may change it."""


def groups_of(trip: Trip, relays: Mapping[ClientId, str]) -> dict[int, tuple[int, ...]]:
    """Return the groups of a trip's clients: of each one in a group, the ascending ids of it.

    A client that is alone with its relay sends its upload whole.

    Args:
        trip: it has groups if it orders training, waits for all results, and its uploads' weights
            travel as they are, have one floating-point dtype, and count in the mean alone.
        relays: of each client behind a relay, which one.
    """
    if not relays or not _may_be_summed(trip):
        return {}
    by_relay: dict[str, list[int]] = {}
    for client in sorted(c for c in trip.orders if isinstance(c, int) and c in relays):
        by_relay.setdefault(relays[client], []).append(client)
    groups = [tuple(found) for found in by_relay.values() if len(found) > 1]
    return {client: group for group in groups for client in group}


def _may_be_summed(trip: Trip) -> bool:
    weights = dtypes_of_weights(trip.spec)
    floats = {dtype for dtype in weights.values() if dtype.is_floating_point}
    return (
        trip.sample.kind == rpc.ORDER_KIND_TRAIN
        and trip.count is not None
        and (trip.enough is None or trip.enough >= len(trip.orders))
        and not trip.compression.returned
        and len(floats) == 1
        and not any(f"{WEIGHTS}{name}".startswith(ONLY_SCORED) for name in weights)
        and not any(key.startswith(WEIGHTS) for key in trip.spec.optional)
    )


def dtypes_of_weights(spec: BundleSpec) -> dict[str, torch.dtype]:
    """Return the dtypes of an upload's weights, by name."""
    stated = spec.required.items()
    return {key.removeprefix(WEIGHTS): t.dtype for key, t in stated if key.startswith(WEIGHTS)}


def rest_spec(spec: BundleSpec) -> BundleSpec:
    """Return the specification of an upload without its weights."""
    rest = {key: one for key, one in spec.required.items() if not key.startswith(WEIGHTS)}
    return BundleSpec(rest, spec.optional)


def sum_spec(spec: BundleSpec, total: float) -> BundleSpec:
    """Return the specification of a sum of uploads' weights: floats are float64.

    Args:
        spec: of an upload.
        total: the sum of the uploads' coefficients; with 0 there is nothing to send.
    """
    found = {}
    for key, one in spec.required.items() if total else ():
        if key.startswith(WEIGHTS):
            wide = torch.float64 if one.dtype.is_floating_point else one.dtype
            found[key] = replace(one, dtype=wide)
    return BundleSpec(found)


def check_sum(spec: BundleSpec, sums: Weights, total: float) -> Weights:
    """Return the mean behind a sum, once it is within the bounds of an upload's weights.

    Raises:
        PayloadError: names the first number that is too large.
    """
    if not sums:
        return {}
    mean = mean_of_sums([sums], total, dtypes_of_weights(spec))
    check_numbers(Bundle(mean))
    return mean


def check_moved(given: Given, mean: Weights, members: Collection[Measured]) -> None:
    """Check that a mean lies no farther from what was given than all uploads in it.

    Raises:
        PayloadError: it does, so it is not the mean of these uploads.
    """
    norms = [one.norms.get(PARAMETERS) for one in members]
    known = [norm for norm in norms if norm is not None]
    if not mean or len(known) < len(norms):  # a relay of an earlier version measures nothing
        return
    moved = given.measured(Bundle(mean)).norms.get(PARAMETERS, 0.0)
    if not moved <= ROUNDING * (max(known) + given.sizes.get(PARAMETERS, 0.0)) + max(known):
        raise PayloadError(
            f"it moves the weights by {moved:.3g}, and each upload in it by {max(known):.3g} at "
            "most, as the relay says itself"
        )


def measured_by_relay(one: Measured, header: rpc.PushHeader, given: Given) -> Measured:
    """Return what is kept of an upload whose weights stay with its relay, which has measured them.

    Raises:
        PayloadError: what the relay says is no norm.
    """
    told = header.distance
    if not header.HasField("distance"):
        return replace(one, norm=None, sketch=None)
    norms = {PARAMETERS: told.weights, STATISTICS: told.statistics}
    if not all(0.0 <= norm < math.inf for norm in norms.values()):
        raise PayloadError("its relay has measured its weights, and says what is no norm")
    held = {part: norm for part, norm in norms.items() if part in given.sizes}
    return Measured({**one.norms, **held}, given.sizes, told.weights)


def cosines_of(header: rpc.PushHeader) -> dict[str, float]:
    """Return what a relay says of the directions of the uploads in its sum, by client id."""
    return {
        member.client_id: member.cosine
        for member in header.members
        if member.HasField("cosine") and -1.0 <= member.cosine <= 1.0
    }


@dataclass
class OverdueSums:
    """What the relays of one trip owe; used while the cohort holds its lock."""

    num_bytes: int
    """The most bytes of a sum."""
    _left_out: dict[int, float] = field(default_factory=dict)
    """Clients that a sum of their relay left out, and when it came."""
    _complete: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Since when each group waits for nothing but its sum."""

    def leave_out(self, clients: Collection[int], now: float) -> None:
        """Note that a sum came without these clients, who had brought all but their weights."""
        self._left_out |= dict.fromkeys(clients, now)

    def joined_again(self, client: ClientId) -> None:
        """Give a client and its relay time again: either of them may have been restarted."""
        if isinstance(client, int):
            self._left_out.pop(client, None)
            self._complete = {g: since for g, since in self._complete.items() if client not in g}

    def failures(
        self,
        owed: Collection[tuple[int, ...]],
        unanswered: Callable[[int], bool],
        is_there: Callable[[ClientId], bool],
        now: float,
    ) -> Iterator[tuple[int, str]]:
        """Yield the clients whose weights will not come any more, and what their relay did.

        Args:
            owed: the groups that wait for nothing but a sum: all others of it have answered.
            unanswered: tells whether a client's result is still incomplete.
            is_there: tells whether a client is connected, and so its relay.
            now: the time on the monotonic clock.
        """
        for client, since in self._left_out.items():
            if unanswered(client) and is_there(client) and now - since >= LEFT_OUT_S:
                yield client, "left it out of its sum"
        there = {group for group in owed if all(map(is_there, group))}
        self._complete = {group: self._complete.get(group, now) for group in there}
        limit = SUM_S + self.num_bytes / SUM_BYTES_PER_S
        for group, since in self._complete.items():
            if now - since >= limit:
                yield from ((client, "brought no sum") for client in group)
