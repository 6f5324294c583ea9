"""How uploads come whose weights a relay adds up: all but the weights of each, then one sum.

A relay passes on the uploads of its clients. Where the mean of the weights is all that the method
reads, it adds the weights up and sends their sum once for a group: the clients of a trip that share
the relay. The coordinator forms the groups when the trip begins, by the relays of the sessions. So
they do not depend on who comes first, and neither do the bits of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.tensors.differences import STATISTICS, Measured, TrainingBase
from fedmodels.tensors.differences import WEIGHTS as PARAMETERS
from fedmodels.tensors.packed_weights import packed
from fedmodels.tensors.weighted_mean import RunningMean, weighted_mean
from fedmodels.times import LEFT_OUT_S, SUM_S, transfer_s
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.relayed_sums import RelayedSum, RelayedSums
from fedsrv.engine.cohort import Allocate, Answer, Answers, Trip
from fedsrv.engine.reduction import without_weights
from fedsrv.transport.intake import Intake, Push
from fedsrv.transport.refusals import Superseded, WrongRun

WEIGHTS, ONLY_SCORED = "weights/", "weights/eval/"
ROUNDING = 1e-4
"""Part of a norm by which rounding to float32 may change it."""
Group = tuple[int, ...]
"""The clients whose weights come in one sum, ascending."""


class RelayAtFault(PayloadError):
    """What a relay says beside a client's upload cannot be; the client is not to blame."""


@dataclass(frozen=True)
class Promise:
    """A result that lacks its weights until the sum of its group comes."""

    answer: Answer


@dataclass(frozen=True)
class GroupSum:
    """The sum of some clients' weights, as their relay brought it."""

    clients: Group
    weights: Weights
    """In float64, by name; none where nothing counts."""
    num_bytes: int
    wire_up: int
    cosines: Mapping[str, float] = field(default_factory=dict)
    """Between each client's difference and their mean, by client id, as the relay says."""
    moved: Measured | None = None
    """How far the mean behind it lies from what the clients were given; None where nothing counts.
    The coordinator measures it."""


@dataclass
class OverdueSums:
    """What the relays of one trip owe; used while the cohort holds its lock."""

    num_bytes: int
    """The most bytes of a sum."""
    _left_out: dict[int, float] = field(default_factory=dict)
    """Clients that a sum of their relay left out, and when it came."""
    _complete: dict[Group, float] = field(default_factory=dict)
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
        owed: Collection[Group],
        answered: Collection[ClientId],
        is_there: Callable[[ClientId], bool],
        now: float,
    ) -> Iterator[tuple[int, str]]:
        """Yield the clients whose weights will not come any more, and what their relay did.

        Args:
            owed: the groups that wait for nothing but a sum: all others of it have answered.
            answered: the clients whose results are complete, or that failed.
            is_there: tells whether a client is connected, and so its relay.
            now: the time on the monotonic clock.
        """
        whole_s = LEFT_OUT_S + transfer_s(self.num_bytes)  # to the relay, and from there
        for client, since in self._left_out.items():
            if client not in answered and is_there(client) and now - since >= whole_s:
                yield client, "left it out of its sum"
        there = {group for group in owed if all(map(is_there, group))}
        self._complete = {group: self._complete.get(group, now) for group in there}
        limit = SUM_S + transfer_s(self.num_bytes)
        for group, since in self._complete.items():
            if now - since >= limit:
                yield from ((client, "brought no sum") for client in group)


class GroupedIntake(Intake):
    """The intake of a trip some of whose uploads are added up by relays."""

    def __init__(
        self, trip: Trip, groups: Mapping[int, Group], relays: Mapping[ClientId, Any]
    ) -> None:
        """Begin with nothing.

        Args:
            trip: whose orders have their numbers.
            groups: of each client in a group, the group.
            relays: of each client behind a relay, which one.
        """
        super().__init__(trip)
        self.groups, self.relays = groups, relays
        self.promised: dict[ClientId, Answer] = {}
        """Results that lack their weights until their group's sum comes."""
        self.sums: dict[Group, Weights] = {}
        """The sums so far; without tensors where nothing counts."""
        self._measured: dict[Group, Measured] = {}
        """How far the mean behind each sum lies from what its clients were given."""
        self._left: set[int] = set()
        """Clients that have joined elsewhere since, and left their groups."""
        self._overdue = OverdueSums(2 * trip.form.spec.max_bytes)

    # --- one Push ---------------------------------------------------------------------------------

    def most_bytes(self, header: rpc.PushHeader) -> int:
        """Return the most bytes of a sum, in float64, or of an upload."""
        return (2 if header.members else 1) * self.trip.form.spec.max_bytes

    def check(self, header: rpc.PushHeader) -> None:
        """Let sums come as well."""

    def read(self, clients: Sequence[ClientId], push: Push, allocate: Allocate) -> Any:
        """Receive an upload, all but the weights of one, or a sum; in the thread of the Push.

        Raises:
            WrongRun: the relay does not say to which issue of the orders it belongs.
        """
        promises = push.header.summed and clients[0] in self.groups
        if (promises or push.header.members) and not push.header.issue:
            raise WrongRun(
                "the relay is of another release: install one release of fedtide at the "
                "coordinator and at its relays"
            )
        if push.header.members:
            return self._read_sum(clients, push, allocate)
        if promises:
            return self._read_promise(clients[0], push, allocate)
        return super().read(clients, push, allocate)

    def _read_promise(self, client: ClientId, push: Push, allocate: Allocate) -> Promise:
        """Receive all but the weights of an upload, and what its relay measured of them."""
        trip, form, header = self.trip, self.trip.form, push.header
        form.check_report(client, trip.orders[client], header.report)
        upload = push.received(rest_spec(form.spec), allocate, self.begun_of)
        form.check_upload(client, upload)
        held = self.promised.get(client)
        if held is not None and self._count(held.upload) != self._count(upload):
            raise PayloadError("it counts differently than the same upload did before")
        measured = trip.measured(client, upload)
        if measured is not None:
            measured = measured_by_relay(measured, header, trip.given)
        size = upload.num_bytes()
        return Promise(Answer(upload, header.report, size, 0, push.wire, measured=measured))

    def _read_sum(self, clients: Sequence[ClientId], push: Push, allocate: Allocate) -> GroupSum:
        """Receive the sum of a relay, and check it by what the relay said of its uploads."""
        trip, group = self.trip, self._members(clients)
        total = sum(self._count(self.promised[client].upload) for client in group)
        sent = push.received(sum_spec(trip.form.spec, total), allocate, self.begun_of)
        mean = check_sum(trip.form.spec, sent.weights, total)
        moved = trip.given.measured(Bundle(mean)) if mean else None
        promised = [self.promised[client].measured for client in group]
        check_moved(trip.given, moved, [one for one in promised if one is not None])
        told = cosines_of(push.header)
        return GroupSum(group, sent.weights, sent.num_bytes(), push.wire, told, moved)

    def _members(self, clients: Sequence[ClientId]) -> Group:
        """Return the clients of a sum, ascending.

        Raises:
            PayloadError: they are not of one group, one appears twice, or one's upload is missing.
            Superseded: one has left the group.
        """
        group = tuple(sorted(c for c in clients if isinstance(c, int)))
        if not self._left.isdisjoint(group):
            raise Superseded("a client of the sum has joined elsewhere")
        known = self.groups.get(group[0], ()) if group else ()
        if len({*group}) < len(clients) or not {*group} <= {*known}:
            raise PayloadError("the clients of the sum are not of one group")
        for client in group:
            if client not in self.promised:
                raise PayloadError(f"all but the weights of client {client} did not come")
        return group

    def _count(self, upload: Bundle) -> float:
        assert self.trip.form.count is not None, "nothing is summed that has no count"
        return self.trip.form.count(upload)

    def refusal(self, client: ClientId, header: rpc.PushHeader, error: PayloadError) -> str:
        """Name the relay where the fault is the relay's."""
        if header.members:
            return f"the sum of its relay {self.relays.get(client, '')} was refused: {error}"
        if isinstance(error, RelayAtFault):
            return f"its relay {self.relays[client]} {error}"
        return super().refusal(client, header, error)

    def keep(self, client: ClientId, arrived: Any, now: float) -> Mapping[ClientId, Answer] | None:
        """Keep a promise until its sum comes; a sum makes the results of its clients whole."""
        if isinstance(arrived, Promise):
            self.promised[client] = arrived.answer
            return {}
        return self._keep_sum(arrived, now) if isinstance(arrived, GroupSum) else {client: arrived}

    def _keep_sum(self, found: GroupSum, now: float) -> Mapping[ClientId, Answer] | None:
        """Add a relay's sum; return its clients' results, now whole."""
        late = not self.answered.isdisjoint(found.clients)
        if late or not self.promised.keys() >= {*found.clients}:
            return None
        whole: dict[ClientId, Answer] = {}
        for client in found.clients:
            whole[client] = answer = self.promised.pop(client)
            if answer.measured is not None:
                cosine = found.cosines.get(str(client))
                answer.measured = replace(answer.measured, cosine=cosine)
        left = self._group_left(found.clients[0])
        self._overdue.leave_out([c for c in left if c in self.promised], now)
        first = whole[found.clients[0]]
        first.logical_up, first.wire_up = (
            first.logical_up + found.num_bytes,
            first.wire_up + found.wire_up,
        )
        self.sums[found.clients] = found.weights
        if found.moved is not None:
            self._measured[found.clients] = found.moved
        return whole

    def end(self, answers: Answers) -> None:
        """Put the mean of sums and whole uploads into the answers, and what each relay added up."""
        if not self.sums:
            return super().end(answers)
        dtypes = dtypes_of_weights(self.trip.form.spec)
        answers.mean = mean_with_sums(answers.by_client, self.sums, self._count, dtypes)
        answers.added = RelayedSums(
            [
                RelayedSum(str(self.relays[group[0]]), group, self._measured.get(group))
                for group in self.sums
            ]
        )
        return None

    # --- who is there -----------------------------------------------------------------------------

    def _group_left(self, client: ClientId) -> list[int]:
        """Return the clients of a client's group whose weights a sum can still bring."""
        group = self.groups.get(client, ()) if isinstance(client, int) else ()
        return [member for member in group if member not in self.answered]

    def tell(self, client: ClientId, header: rpc.PullHeader) -> bool:
        """Tell a relay the clients of a group whose weights a sum can still bring."""
        header.group.extend(self._group_left(client))
        return bool(header.group)

    def moved(self, client: ClientId, through: Any) -> Collection[ClientId]:
        """Take a client that joins elsewhere out of its group: it brings its upload whole."""
        self._overdue.joined_again(client)
        if isinstance(client, str) or client not in self.groups or through == self.relays[client]:
            return ()
        others = tuple(one for one in self.groups[client] if one != client)
        left = {c: g for c, g in self.groups.items() if c != client}
        self.groups = {c: tuple(m for m in g if m != client) for c, g in left.items()}
        self._left.add(client)
        return others

    def overdue(
        self, is_there: Callable[[ClientId], bool], now: float
    ) -> list[tuple[ClientId, str]]:
        """Return the clients whose weights their relay left out or keeps back for too long."""
        left = {tuple(self._group_left(client)) for client in self.promised}
        owed = {group for group in left if all(client in self.promised for client in group)}
        found = self._overdue.failures(owed, self.answered, is_there, now)
        return [(client, f"its relay {self.relays[client]} {what}") for client, what in found]


def mean_with_sums(
    results: Mapping[ClientId, Answer],
    sums: Mapping[Group, Weights],
    count: Callable[[Bundle], float],
    dtypes: Mapping[str, torch.dtype],
) -> Weights | None:
    """Return the mean of relays' sums and of the uploads that came whole; drop their weights.

    The whole uploads make one more group. Groups are added in the order of their lowest clients.

    Args:
        results: all answers; answers of clients in a sum hold no weights.
        sums: the weighted sums of the groups, in float64; empty where nothing counts.
        count: gives the coefficient of an upload in the mean.
        dtypes: the dtype of each tensor of the mean.

    Returns:
        The mean, by name; None if nothing counts.
    """
    summed = {client for group in sums for client in group}
    parts = {group[0]: found for group, found in sums.items() if found}
    whole = sorted(c for c in results if isinstance(c, int) and c not in summed)
    if whole:
        uploads, running = [results[c].upload for c in whole], RunningMean()
        running.add([u.weights for u in uploads], [count(u) for u in uploads])
        found = running.sums()
        parts |= {} if found is None else {whole[0]: found}
    total = sum(count(results[c].upload) for c in sorted((*summed, *whole)))
    for client in whole:
        results[client].upload = without_weights(results[client].upload)
    return mean_of_sums([parts[c] for c in sorted(parts)], total, dtypes) if parts else None


# --- groups ---------------------------------------------------------------------------------------


def groups_of(trip: Trip, relays: Mapping[ClientId, Hashable]) -> dict[int, Group]:
    """Return the groups of a trip's clients: of each one in a group, the ascending ids of it.

    A client that is alone with its relay sends its upload whole.

    Args:
        trip: it has groups if it orders training, waits for all results, and its uploads' weights
            travel as they are, have one floating-point dtype, and count in the mean alone.
        relays: of each client behind a relay, which one.
    """
    if not relays or not _may_be_summed(trip):
        return {}
    by_relay: dict[Hashable, list[int]] = {}
    for client in sorted(c for c in trip.orders if isinstance(c, int) and c in relays):
        by_relay.setdefault(relays[client], []).append(client)
    groups = [tuple(found) for found in by_relay.values() if len(found) > 1]
    return {client: group for group in groups for client in group}


def _may_be_summed(trip: Trip) -> bool:
    form, enough = trip.form, trip.until.enough
    weights = dtypes_of_weights(form.spec)
    floats = {dtype for dtype in weights.values() if dtype.is_floating_point}
    return (
        trip.sample.kind == rpc.ORDER_KIND_TRAIN
        and form.count is not None
        and (enough is None or enough >= len(trip.orders))
        and form.restore is None
        and len(floats) == 1
        and not any(f"{WEIGHTS}{name}".startswith(ONLY_SCORED) for name in weights)
        and not any(key.startswith(WEIGHTS) for key in form.spec.optional)
    )


def dtypes_of_weights(spec: BundleSpec) -> dict[str, torch.dtype]:
    """Return the dtypes of an upload's weights, by name."""
    stated = spec.required.items()
    return {key.removeprefix(WEIGHTS): t.dtype for key, t in stated if key.startswith(WEIGHTS)}


def rest_spec(spec: BundleSpec) -> BundleSpec:
    """Return the specification of an upload without its weights."""
    rest = {key: one for key, one in spec.required.items() if not key.startswith(WEIGHTS)}
    return BundleSpec(rest, spec.optional)


# --- what relays say ------------------------------------------------------------------------------


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


def check_moved(given: TrainingBase, moved: Measured | None, members: Collection[Measured]) -> None:
    """Check that a mean lies no farther from what was given than all uploads in it.

    Args:
        given: what the clients were given.
        moved: how far the mean lies from it; None of a mean without tensors.
        members: how far each upload in it does, as the relay says.

    Raises:
        PayloadError: it does, so it is not the mean of these uploads.
    """
    for part, what in ((PARAMETERS, "weights"), (STATISTICS, "statistics")):
        norm = 0.0 if moved is None else moved.norms.get(part, 0.0)
        most = max((one.norms.get(part, 0.0) for one in members), default=0.0)
        if part in given.sizes and not norm <= ROUNDING * (most + given.sizes[part]) + most:
            raise PayloadError(
                f"it moves the {what} by {norm:.3g}, and each upload in it by {most:.3g} at most, "
                "as the relay says itself"
            )


def measured_by_relay(one: Measured, header: rpc.PushHeader, given: TrainingBase) -> Measured:
    """Return what is kept of an upload whose weights stay with its relay, which has measured them.

    Raises:
        RelayAtFault: the relay does not say how far they moved, or what it says is no norm.
    """
    told = header.distance
    if not header.HasField("distance"):
        raise RelayAtFault("did not say how far its weights moved")
    norms = {PARAMETERS: told.weights, STATISTICS: told.statistics}
    if not all(0.0 <= norm < math.inf for norm in norms.values()):
        raise RelayAtFault("has measured its weights, and says what is no norm")
    held = {part: norm for part, norm in norms.items() if part in given.sizes}
    return Measured({**one.norms, **held}, given.sizes, told.weights)


def cosines_of(header: rpc.PushHeader) -> dict[str, float]:
    """Return what a relay says of the directions of the uploads in its sum, by client id."""
    return {
        member.client_id: member.cosine
        for member in header.members
        if member.HasField("cosine") and -1.0 <= member.cosine <= 1.0
    }


def mean_of_sums(
    sums: Sequence[Mapping[str, Tensor]], total: float, dtypes: Mapping[str, torch.dtype]
) -> Weights:
    """Return the mean behind weighted sums of disjoint groups of uploads.

    The groups are added in float64 and in the given order, divided by the total and rounded once.
    One group has the bits of ``weighted_mean`` over its uploads. Several groups have them as well
    where no sum of a group is rounded: for whole coefficients of sum N and float32 inputs of
    magnitude 0 or within [2**a, 2**b), that is where 2**(b - a + 23) * N <= 2**53. Other elements
    may differ in the last bit of float64, and so, near the middle of two values, of the dtype.

    Args:
        sums: of each group, as ``RunningMean.sums`` returns them; all have the same names.
        total: the sum of all coefficients, above 0.
        dtypes: the dtype of each tensor of the mean.

    Raises:
        PayloadError: there is no group, the total is not above 0, or names or shapes differ.
    """
    if not sums or not 0 < total < float("inf"):
        raise PayloadError("there is nothing to average: no group, or no total above 0")
    for group in sums:
        if group.keys() != dtypes.keys():
            key = min(group.keys() ^ dtypes.keys())
            raise PayloadError(f"tensor {key!r} is in some sums only")
    mean = weighted_mean(sums, [1.0] * len(sums), total)
    return packed({name: mean[name].to(dtype) for name, dtype in dtypes.items()})
