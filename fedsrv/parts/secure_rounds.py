"""Training whose uploads are summed under masks (Bonawitz et al., CCS 2017), phase by phase.

    paper                    here
    round 0, AdvertiseKeys   ``_advertised``: once for each client and process
    round 1, ShareKeys       ``_shared``
    round 2, MaskedInput     ``_trained``: masks are added to what training came to
    round 3, ConsistencyCheck  ``_agreed``: where clients sign (``trust = "certificates"``)
    round 4, Unmasking       ``_opened``

Each phase is a trip like any other: sessions and deadlines are those of all trips. What a
phase brought is on the disk before the next one begins. So a coordinator that is killed goes on
with the same attempt, and asks clients the same questions.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import MIN_GROUP, masks_of
from fedmodels.config.sent import settings_digest
from fedmodels.errors import ArchiveError, ConfigError, PayloadError, TooFewClients
from fedmodels.facts.position import Interaction
from fedmodels.numerics.randomness import derive_seed
from fedmodels.secure_sum.fixed_point import FixedPoint, added
from fedmodels.secure_sum.masks import Vector
from fedmodels.tensors.archive import load, save
from fedmodels.tensors.bundle import Bundle, ClientId, Prototypes
from fedmodels.training.contexts import ServerContext, ServerState
from fedmodels.training.secure_upload import SecureUpload, check_secure_sum
from fedpb.codec import merged
from fedpb.peer_certificates import check_counted, check_keys
from fedpb.secure_terms import payload_digest
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.cohort import AllOf, Answer, Answers, Trip, UploadForm
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import takes_part
from fedsrv.engine.server_part import CurrentInteraction, Exchange, Kernel, ServerPart
from fedsrv.parts.secure_failures import NoSumLeft, SpoiledSums, spoiled_line
from fedsrv.parts.secure_group import SecureGroup, check_advertised, check_fields
from fedsrv.parts.secure_totals import OpenedSums
from fedsrv.state.record import Record, of_parts

log = logging.getLogger(__name__)


@dataclass
class SecureRound:
    """How far the secure sums of an interaction are."""

    work: str
    """Digest of what is trained: after a roll-back it may be something else."""
    groups: list[SecureGroup] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    """What came with the masked uploads that count."""
    failed: dict[int, str] = field(default_factory=dict)
    wire: list[int] = field(default_factory=lambda: [0, 0])
    """Bytes down and up so far."""

    def add(self, found: Answers) -> None:
        """Note who failed in a phase, and what it cost."""
        self.failed |= {int(client): why for client, why in found.failed.items()}
        self.wire = [self.wire[0] + found.wire_down, self.wire[1] + found.wire_up]

    def leave_out(
        self, group: SecureGroup, left: int, needed: int, members: Collection[int] = ()
    ) -> None:
        """Drop a group that has too few clients left; its members are those with keys, or given."""
        why = f"its group has {left} clients left for a secure sum; it takes {needed}"
        self.drop(group, members or group.keys, why)

    def drop(self, group: SecureGroup, members: Iterable[int], why: str) -> None:
        """Drop a group, and say of its members why."""
        for client in members:
            self.failed.setdefault(client, why)
        self.groups = [one for one in self.groups if one is not group]


class NoGroup(Exception):
    """No fixed group is whole in an interaction, which then counts for nobody."""

    def __init__(self, found: SecureRound) -> None:
        super().__init__("no fixed group is whole")
        self.failed, self.wire = dict[ClientId, str](found.failed.items()), found.wire


class SecureSums(ServerPart):
    """Sums uploads under masks (``[privacy] secure_sum``)."""

    @classmethod
    def check(cls, experiment: Experiment, *, certified: bool) -> None:
        """Refuse clients without what they know one another by, unless the config says so."""
        rules = masks_of(experiment.privacy)
        if rules is not None and rules.signs and not certified:
            raise ConfigError(
                "[privacy] secure_sum: clients know one another by certificates, and without "
                "mutual TLS (fedsrv serve --tls-client-ca) they have none; [privacy.secure_sum] "
                'trust = "coordinator" does without, and the coordinator could then read every '
                "upload"
            )

    @classmethod
    def in_one_process(cls, experiment: Experiment) -> Experiment:
        """Return an experiment without signatures: nobody there has keys to sign with."""
        privacy, rules = experiment.privacy, masks_of(experiment.privacy)
        if privacy is None or rules is None or not rules.signs:
            return experiment
        log.warning(
            "note: in one process nobody has certificates: this run is one with "
            '[privacy.secure_sum] trust = "coordinator"'
        )
        trusting = rules.model_copy(update={"trust": "coordinator"})
        table = privacy.model_copy(update={"secure_sum": trusting})
        return experiment.model_copy(update={"privacy": table})

    def gathered(self, plan: Plan) -> None:
        """Refuse a method whose uploads cannot be summed under masks; say what the sums hide."""
        check_secure_sum(plan.method, plan.run)
        tasks = {step.task for step in plan.steps}
        self.events.tell("note", line=hidden_line(self.experiment, len(tasks)))

    def exchange(self, rounds: Kernel, interaction: Interaction) -> Exchange:
        """Return the exchange phase by phase."""
        return SecureRounds(rounds)

    def ends_with(self, error: Exception) -> str:
        """Return why the run ends: no sum can come to anything any more."""
        return str(error) if isinstance(error, NoSumLeft) else ""


class SecureRounds(Exchange):
    """Lets cohorts train, and learns only the sums of their uploads."""

    def __init__(self, parts: Kernel) -> None:
        """Begin; what was under way when the last process ended is on the disk."""
        super().__init__(parts)
        self.store = parts.store
        rules = masks_of(parts.experiment.privacy)
        assert rules is not None, "the config asks for it"
        self.rules, self.opened = rules, OpenedSums(parts)
        table = parts.experiment.privacy
        noisy = table is not None and table.noise_at_clients
        self._fewest = parts.experiment.fewest_summed if noisy else 0
        """The fewest uploads whose noise epsilon counts on; no sum of fewer is opened."""
        self.peers = parts.cohort.peers if rules.signs else None
        """What checks certificates, where clients sign."""
        self._keys: dict[int, rpc.SecureAnswer] = {}
        """What each client said of its channel key in this process."""
        self._signers: dict[int, bytes] = {}
        """The key of each client's certificate, in DER."""
        records = [record for record, _ in self.store.ledger.records()]
        said = (of_parts(record).get("secure_sum", {}).get("unopened", ()) for record in records)
        self._unopened = {client for clients in said for client in clients}
        """Clients whose secrets did not open."""
        self._spoiled = SpoiledSums(records, {*parts.plan.aside})
        self._said: dict[str, Any] = {}
        """What the record says of the sum under way."""
        self._fixed: list[list[int]] | None = None
        """The clients of each group, where these stay the same all through the run."""
        if parts.experiment.fixes_groups:
            self._fixed = rules.group_of_each(parts.experiment.schedule.clients)

    @property
    def secure(self) -> SecureUpload:
        """How uploads of the present classes are summed under masks."""
        return self.parts.plan.wire.part(SecureUpload)

    def train(self, at: CurrentInteraction, state: ServerState) -> Answers:
        """Let a cohort train; return its reports, and sums of uploads that nobody saw one by one.

        Raises:
            TooFewClients: too few are left for any sum.
        """
        parts, ctx, self._said = self.parts, at.ctx, {}
        if not ctx.cohort:
            return self.nobody(at, state)
        self._check_any_left(at)
        if len(ctx.cohort) < MIN_GROUP:  # drawn by sampling = "poisson"
            why = f"a cohort of {len(ctx.cohort)} is too small for a secure sum"
            return Answers({}, dict.fromkeys(ctx.cohort, why), sums=[])
        trip = parts.training(ctx, state, at.plan.is_scored(at.step))
        self.ended()
        payload = payload_digest(self._payload(trip))
        work = _digest(trip, payload)
        found = self._load(ctx.interaction, work)
        try:
            if found is None:
                found = self._shared(ctx, work, payload)
                self._save(ctx.interaction, found)
            if not found.answers:
                self._trained(ctx, trip, found)
                self._save(ctx.interaction, found)
        except NoGroup as none:
            down, up = none.wire
            return Answers({}, none.failed, down, up, sums=[])
        if self.peers is not None:
            self._agreed(ctx, found)
        return self._opened(ctx, trip, found)

    def _payload(self, trip: Trip) -> Bundle:
        """Return what all clients of a trip train from.

        Raises:
            ConfigError: they do not train from the same.
        """
        first, *others = (trip.personal.get(client) for client in trip.orders)
        if any(one is not first for one in others):
            raise ConfigError(
                f"[privacy] secure_sum: {self.parts.method.name} gives clients payloads of their "
                "own, which can make one upload stand out of a sum: they must all be given the same"
            )
        return merged({"common": trip.common, **({"personal": first} if first else {})})

    # --- phases -----------------------------------------------------------------------------------

    def _members(self, ctx: ServerContext, found: SecureRound) -> list[list[int]]:
        """Return a cohort's groups, without clients whose sums came to nothing before.

        Fixed groups are whole, or take no part: what failed says why.
        """
        if self._fixed is not None:
            there = {*ctx.cohort} - self._spoiled.clients
            for group in self._fixed:
                why = ""
                if away := [client for client in group if client not in there]:
                    why = f"its fixed group lacks clients {', '.join(map(str, away))}"
                elif anew := self._begun_anew(group):
                    why = f"client {anew[0]} starts over, but its fixed group must start as one"
                if why:
                    found.failed |= dict.fromkeys(there.intersection(group), why)
                    there -= {*group}
            return [group for group in self._fixed if there.issuperset(group)]
        out = self._unopened | self._spoiled.clients
        clients = [client for client in ctx.cohort if client not in out]
        seed = derive_seed(ctx.run.experiment.seed, "groups", ctx.interaction, "cohort")
        order = np.random.default_rng(seed).permutation(clients).tolist()
        return [sorted(order[place :: self.rules.groups]) for place in range(self.rules.groups)]

    def _bases(self, clients: Iterable[int]) -> list[int]:
        """Return the interactions whose private states some clients hold, descending."""
        trained = self.parts.commits.last_trained
        return sorted((trained.get(client, -1) for client in clients), reverse=True) or [-1]

    def _begun_anew(self, group: Sequence[int]) -> list[int]:
        """Return who of a fixed group does not begin from the private state of all others."""
        if not self.parts.plan.is_stateful:
            return []
        newest = self._bases(group)[0]
        return [client for client in group if self._bases([client])[0] != newest]

    def _advertised(self, ctx: ServerContext, clients: Sequence[int], found: SecureRound) -> None:
        """Ask for the channel keys that this process does not know."""
        asked = {c: rpc.SecureSum() for c in clients if c not in self._keys}
        if asked:
            needed = self._needed(clients) - (len(clients) - len(asked))
            kind = rpc.ORDER_KIND_ADVERTISE
            answers = self._ask(ctx, kind, asked, needed, self._check_advertised)
            found.add(answers)
            said = {int(c): a.report.secure_sum for c, a in answers.by_client.items()}
            self._keys |= said
            twice = _twice({c: one.channel_key for c, one in self._keys.items()})
            for client in {*twice} & said.keys():
                found.failed[client] = "another client has said that its key is its own"
            for client in found.failed:
                self._keys.pop(client, None)

    def _check_advertised(self, client: int, said: rpc.SecureAnswer) -> None:
        """Check the channel key of a client; raise PayloadError for what others would refuse."""
        check_advertised(said)
        if self.peers is not None:
            self._signers[client] = self.peers.signer_of(self.store.run_id, client, said)

    def _signer(self, group: SecureGroup, client: int) -> bytes:
        """Return the key of a client's certificate, also of one that another process has seen."""
        assert self.peers is not None, "clients sign"
        if client not in self._signers:
            said = group.keys[client]
            self._signers[client] = self.peers.signer_of(self.store.run_id, client, said)
        return self._signers[client]

    def _shared(self, ctx: ServerContext, work: str, payload: bytes) -> SecureRound:
        """Let the clients of each group share secrets with one another."""
        found = SecureRound(work)
        members = self._members(ctx, found)
        self._advertised(ctx, sorted(c for group in members for c in group), found)
        numbers, task = self._numbers(ctx), self.parts.plan.steps[ctx.interaction].task
        plan = self.parts.plan
        order = rpc.Order(
            interaction=ctx.interaction, round=ctx.round, task=task, new_classes=plan.new_classes,
            class_changes=plan.class_changes,
        )  # fmt: skip
        experiment = self.parts.experiment  # an open run may have changed some of it
        settings, own_tasks = settings_digest(experiment), experiment.schedule.own_tasks
        of_one_state = self._fixed is not None and plan.is_stateful
        for clients in members:
            order.base = self._bases(clients)[0]
            keys = {c: self._keys[c] for c in clients if c in self._keys}
            threshold = self.rules.needed(len(keys))
            facts = order, settings, threshold, keys, numbers, payload
            group = SecureGroup.begun(*facts, own_tasks=own_tasks, of_one_state=of_one_state)
            found.groups.append(group)
            if len(keys) < (least := self._least(clients, MIN_GROUP)):
                found.leave_out(group, len(keys), least, clients)
            elif (learning := self._learning(ctx, keys)) < MIN_GROUP:
                why = (
                    f"{learning} clients of its group have examples; a secure sum takes {MIN_GROUP}"
                )
                found.drop(group, keys, why)
        self._check_left(ctx, found)
        by_client, asked = dict[int, SecureGroup](), dict[int, rpc.SecureSum]()
        for group in found.groups:
            by_client |= dict.fromkeys(group.keys, group)
            asked |= dict.fromkeys(group.keys, group.to_share())
        answers = self._ask(
            ctx, rpc.ORDER_KIND_SHARE, asked, self._needed([*by_client]),
            lambda client, said: self._check_shared(by_client[client], client, said),
        )  # fmt: skip
        found.add(answers)
        for client in answers.failed:
            self._keys.pop(int(client), None)  # it may have another one by now
        for group in [*found.groups]:
            said = {c: answers.by_client[c].report.secure_sum
                    for c in group.keys if c in answers.by_client}  # fmt: skip
            for client in _twice({c: one.mask_key for c, one in said.items()}):
                found.failed[client] = "another client has said that its key is its own"
                del said[client]
            group.shared = said
            if len(said) < (least := self._least(group.keys, group.threshold)):
                found.leave_out(group, len(said), least)
        self._check_left(ctx, found)
        return found

    def _check_shared(self, group: SecureGroup, client: int, said: rpc.SecureAnswer) -> None:
        """Check what a client shares; raise PayloadError for what others would refuse."""
        group.check_shared(said)
        if self.peers is not None:
            key = group.keys[client].channel_key
            check_keys(
                self._signer(group, client), self.store.run_id, group.attempt.terms, client, key,
                said,
            )  # fmt: skip

    def _trained(self, ctx: ServerContext, trip: Trip, found: SecureRound) -> None:
        """Let the clients that shared train, and add up their masked uploads."""
        parts, secure = self.parts, self.secure
        orders: dict[ClientId, rpc.Order] = {}
        for group in found.groups:
            for client in group.shared:
                orders[client] = order = rpc.Order()
                order.CopyFrom(trip.orders[client])
                order.secure_sum.CopyFrom(group.to_train(client))
        needed = self._needed([*orders])
        check = partial(self._check_upload, ctx)
        personal = {c: part for c, part in trip.personal.items() if c in orders}
        form = replace(trip.form, spec=secure.spec, count=None, check_upload=check, measures=False)
        in_order = dict(sorted(orders.items(), key=lambda one: int(one[0])))
        trip = replace(trip, orders=in_order, personal=personal, form=form, until=AllOf(needed))
        answers = parts.cohort.send_and_receive(trip)
        found.add(answers)
        for group in [*found.groups]:
            came = [client for client in group.shared if client in answers.by_client]
            least = self._least(group.keys, max(group.threshold, self._fewest))
            if len(came) < least:
                found.leave_out(group, len(came), least)
                continue
            uploads = [secure.integers(answers.by_client[client].upload) for client in came]
            group.counted, group.total = tuple(came), added(uploads)
        self._check_left(ctx, found)
        for client in sorted(client for group in found.groups for client in group.counted):
            answer = answers.by_client[client]
            found.answers[client] = replace(answer, upload=secure.declared(answer.upload))

    def _agreed(self, ctx: ServerContext, found: SecureRound) -> None:
        """Let clients sign whose uploads came, so that none opens masks of other ones."""
        by_client = {client: group for group in found.groups for client in group.counted}

        def check(client: int, said: rpc.SecureAnswer) -> None:
            group = by_client[client]
            check_fields(said, {"signature"})
            signer, terms = self._signer(group, client), group.attempt.terms
            run_id, signature = self.store.run_id, said.signature
            check_counted(signer, run_id, terms, client, group.counted, signature)

        asked = {client: by_client[client].to_agree() for client in sorted(by_client)}
        needed = sum(group.threshold for group in found.groups)
        answers = self._ask(ctx, rpc.ORDER_KIND_AGREE, asked, needed, check)
        found.wire = [found.wire[0] + answers.wire_down, found.wire[1] + answers.wire_up]
        for client, group in by_client.items():
            if client in answers.by_client:
                group.agreed[client] = answers.by_client[client].report.secure_sum.signature

    def _opened(self, ctx: ServerContext, trip: Trip, found: SecureRound) -> Answers:
        """Let the clients open what is left of the masks; return what their uploads come to."""
        by_client = {client: group for group in found.groups for client in group.counted}
        asked = {client: group.to_unmask(client) for client, group in sorted(by_client.items())}
        answers = self._ask(
            ctx, rpc.ORDER_KIND_UNMASK, asked, sum(group.threshold for group in found.groups),
            lambda client, said: by_client[client].check_opened(said),
        )  # fmt: skip
        said = {int(c): answer.report.secure_sum for c, answer in answers.by_client.items()}
        opened, unopened = list[tuple[SecureGroup, Vector]](), list[int]()
        asked_for = [[*group.keys] for group in found.groups]
        answered = dict[ClientId, Answer](found.answers.items())
        failed = dict[ClientId, str](found.failed.items())
        wire = found.wire[0] + answers.wire_down, found.wire[1] + answers.wire_up
        results = Answers(answered, failed, *wire)
        for group in found.groups:
            total, closed = group.open(said)
            unopened += closed
            if total is not None:
                opened.append((group, total))
                continue
            names = ", ".join(map(str, closed))
            why = f"the secure sum does not open: the secrets of clients {names} do not fit"
            self.opened.set_aside(ctx, results, group, why)
        moved = self.opened.of(ctx, trip, self._numbers(ctx), opened, results)
        self._unopened.update(unopened)
        void = [group for group, one in zip(asked_for, found.groups, strict=True)
                if results.by_client.keys().isdisjoint(one.counted)]  # fmt: skip
        self._said = {
            "groups": asked_for,
            "thresholds": [group.threshold for group in found.groups],
            "unopened": unopened,
            "void": void,
            "moved": moved,
        }
        if out := self._spoiled.count(asked_for, void):
            self.parts.events.tell("note", line=spoiled_line(out))
        return results

    # --- asking -----------------------------------------------------------------------------------

    def _ask(
        self,
        ctx: ServerContext,
        kind: rpc.OrderKind,
        asked: Mapping[int, rpc.SecureSum],
        needed: int,
        check: Callable[[int, rpc.SecureAnswer], None],
    ) -> Answers:
        """Give orders without a payload, and return checked answers.

        Raises:
            TooFewClients: fewer than needed answered.
        """
        orders = self.parts.orders(ctx, kind, asked, ())
        for client, order in orders.items():
            assert isinstance(client, int), "the evaluator takes no part"
            order.secure_sum.CopyFrom(asked[client])

        def check_report(client: ClientId, _: rpc.Order, report: rpc.Report) -> None:
            for field_, _ in report.ListFields():
                if field_.name not in ("secure_sum", "durable"):
                    raise PayloadError(f"the report has {field_.name!r}, which was not requested")
            check(int(client), report.secure_sum)

        form, until = UploadForm(check_report=check_report), AllOf(max(needed, 0))
        return self.parts.cohort.send_and_receive(Trip(orders, Bundle(), form=form, until=until))

    def _check_upload(self, ctx: ServerContext, client: ClientId, upload: Bundle) -> None:
        """Check what an upload says that it counts: the masks hide the rest."""
        plan, secure = self.parts.plan, self.secure
        announced = plan.terms.announced(int(client), plan.steps[ctx.interaction])
        secure.check(upload, announced, announced.most_examples(plan.method.trains_on))

    def _check_left(self, ctx: ServerContext, found: SecureRound) -> None:
        """Check that a group is left.

        Raises:
            TooFewClients: none is.
            NoGroup: none is in this interaction, and fixed groups may be whole in the next one.
        """
        if not found.groups:
            if self._fixed is not None:
                raise NoGroup(found)
            out = sorted(self._unopened.intersection(ctx.cohort))
            failed = {**dict.fromkeys(out, "its secrets did not open before"), **found.failed}
            client, why = next(iter(failed.items()))
            more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
            raise TooFewClients(
                f"round {ctx.round + 1}: too few clients are left for a secure sum. "
                f"Client {client}: {why}{more}",
                failed,
                f"; a secure sum takes {self._needed(ctx.cohort)} of {len(ctx.cohort)} clients: "
                f"--resume tries again, and --resume --without {client} continues without client "
                f"{client}",
            )

    def _check_any_left(self, at: CurrentInteraction) -> None:
        """Check that a sum can come to something, in this interaction or a later one.

        Raises:
            NoSumLeft: none can.
        """
        out, aside = self._spoiled.clients, at.plan.aside
        gone = {client for client in aside if not takes_part(client, at.step.interaction, aside)}
        if self._fixed is not None:
            left = [group for group in self._fixed if (out | gone).isdisjoint(group)]
            enough = any(not self._begun_anew(group) for group in left)
        else:
            known = {*range(self.parts.experiment.schedule.clients)}
            enough = not out or len(known - out - gone) >= MIN_GROUP
        if not enough:
            what = "the secure sums of all groups keep failing"
            if self._fixed is not None and (anew := [*map(self._begun_anew, left)]):
                what = (
                    f"client {anew[0][0]} starts over, but all of a fixed group start from "
                    "private states of one interaction"
                )
            elif self._fixed is not None and gone:
                names = clients_text([*map(str, sorted(gone))])
                what = f"each fixed group keeps failing, or lacks clients that left ({names})"
            raise NoSumLeft(
                f"{what}; [privacy.secure_sum] groups lets one group fail, and not all: start "
                "another run with it, from this one's model if that is sound ([net] begin_from)"
            )

    def _least(self, members: Collection[int], otherwise: int) -> int:
        """Return how many clients of a group a sum takes: all of a fixed one."""
        return otherwise if self._fixed is None else len(members)

    def _needed(self, clients: Sequence[ClientId]) -> int:
        """Return how many of these clients a phase needs: the quorum and the threshold."""
        least = min(len(clients), self.rules.needed(len(clients)))
        return max(least, self.parts.plan.needed(clients))

    def _learning(self, ctx: ServerContext, clients: Iterable[int]) -> int:
        """Return how many of some clients have examples: the others add nothing to a sum."""
        plan, step = self.parts.plan, self.parts.plan.steps[ctx.interaction]
        told = (plan.terms.announced(client, step) for client in clients)
        return sum(one.most_examples(plan.method.trains_on) > 0 for one in told)

    def _numbers(self, ctx: ServerContext) -> FixedPoint:
        """Return how numbers become integers, so that sums of groups can be added up as well."""
        plan, secure = self.parts.plan, self.secure
        step = plan.steps[ctx.interaction]
        examples = max(
            plan.terms.announced(c, step).most_examples(plan.method.trains_on) for c in ctx.cohort
        )
        return secure.numbers(len(ctx.cohort), examples)

    # --- at rest ----------------------------------------------------------------------------------

    def _file(self, interaction: Interaction) -> Path:
        """Return the file, beside the server's states, of an interaction under way."""
        return self.store.states / f"sum-{interaction:08d}.safetensors"

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down who was asked for a sum together, and what did not open: ``secure_sum``.

        It has the ``groups`` of clients, their ``thresholds``, the clients whose secrets did not
        open (``unopened``), and the groups that came to nothing (``void``), of which no upload
        counts.
        """
        if self._said:
            of_parts(record)["secure_sum"] = self._said

    def ended(self) -> None:
        """Delete what is kept of committed interactions."""
        for path in self.store.states.glob("sum-*.safetensors"):
            if int(path.stem.partition("-")[2]) <= self.store.committed:
                path.unlink(missing_ok=True)

    def _save(self, interaction: Interaction, found: SecureRound) -> None:
        """Store how far an interaction is."""
        facts: dict[str, Any] = {
            "work": found.work, "failed": [*found.failed.items()], "wire": found.wire,
            "groups": [group.to_json() for group in found.groups],
            "answers": [
                [c, a.report.SerializeToString().hex(), a.upload.scalars, _counts_in(a.upload),
                 a.logical_up, a.logical_down, a.wire_up] for c, a in found.answers.items()
            ],
        }  # fmt: skip
        totals = {
            str(place): torch.from_numpy(group.total.view(f"<i{group.total.itemsize}"))
            for place, group in enumerate(found.groups)
            if group.total is not None
        }
        header = {"facts": facts, "groups": len(found.groups)}
        fsync = self.store.strict
        save(self._file(interaction), Bundle(weights=totals), header, fsync=fsync)

    def _load(self, interaction: Interaction, work: str) -> SecureRound | None:
        """Return how far an interaction is; None if nothing whole is stored, or only other work."""
        path = self._file(interaction)
        try:
            found, header = load(path) if path.exists() else (Bundle(), None)
        except ArchiveError:
            return None
        if header is None or header["facts"]["work"] != work:
            return None
        facts, totals = header["facts"], found.weights
        dtype = np.dtype(f"<u{self.rules.bits // 8}")
        groups = [
            SecureGroup.from_json(
                one, totals[str(place)].numpy().view(dtype) if str(place) in totals else None
            )
            for place, one in enumerate(facts["groups"])
        ]
        answers = {
            c: Answer(
                Bundle(prototypes=_with_counts(counts), scalars=scalars),
                rpc.Report.FromString(bytes.fromhex(report)),
                *sizes,
            )
            for c, report, scalars, counts, *sizes in facts["answers"]
        }
        return SecureRound(work, groups, answers, dict(facts["failed"]), facts["wire"])


def hidden_line(experiment: Experiment, tasks: int = 1) -> str:
    """Return the line that says what the secure sums of a run of so many tasks hide."""
    privacy, masks = experiment.privacy, masks_of(experiment.privacy)
    assert privacy is not None, "secure_sum is a key of it"
    assert masks is not None, "the config asks for it"
    if experiment.fixes_groups:
        sizes = [len(group) for group in masks.group_of_each(experiment.schedule.clients)]
        size = f"{sizes[-1]} to {sizes[0]}" if len({*sizes}) > 1 else str(sizes[0])
        over = (
            "" if tasks == 1 else
            "; over tasks with other numbers of examples, what is alike in a client's uploads "
            "shows in the sums"
        )  # fmt: skip
        return (
            f"secure sums: {len(sizes)} fixed groups of {size} clients, and nobody sees more of a "
            f"task than the sum of a group{over}. A group of which a client is missing does not "
            "count in that round"
        )
    if privacy.noise_at_clients:
        return "secure sums: groups change from round to round, and the noise of clients hides them"
    return (
        "secure sums: clients change from round to round, so a sum hides a single round's upload "
        "and nothing more: sums of many rounds together tell the mean upload of each client"
    )


def _counts_in(declared: Bundle) -> dict[str, list[tuple[int, int]]]:
    """Return label and count of each prototype by level, as values of JSON."""
    return {
        level: [*zip(rows.labels.tolist(), rows.counts.tolist(), strict=True)]
        for level, rows in declared.prototypes.items()
    }


def _with_counts(found: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, Prototypes]:
    """Return the prototypes that :func:`_counts_in` described, without coordinates."""
    nothing = torch.zeros(0)
    return {
        level: Prototypes.of({label: (nothing, count) for label, count in rows}, 0)
        for level, rows in found.items()
    }


def _twice(keys: Mapping[int, bytes]) -> list[int]:
    """Return the clients with a key that another one has as well."""
    counts = Counter(keys.values())
    return [client for client, key in keys.items() if counts[key] > 1]


def _digest(trip: Trip, payload: bytes) -> str:
    """Return a digest of what is trained: orders and payload."""
    sha = hashlib.sha256(payload)
    for order in trip.orders.values():
        sha.update(order.SerializeToString(deterministic=True))
    return sha.hexdigest()
