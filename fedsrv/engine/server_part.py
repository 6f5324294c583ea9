"""What the kernel offers to parts: one value of an interaction, and the seams that are called.

A part is one capability that a config can leave out (:mod:`fedmodels.config.combinations` has the
list). The kernel calls each seam of all parts that are there, in the order of the list, and asks
none by its name. What a part remembers follows from committed records.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from fedmodels.config.experiment import Experiment
from fedmodels.facts.position import Interaction, Round
from fedmodels.tensors.aggregation_rule import AggregationRule
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.differences import Norms
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ServerContext, ServerState
from fedmodels.training.method import Method, Payload
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import AllOf, Answers, Cohort, Trip, too_few
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step
from fedsrv.engine.summary import Figures
from fedsrv.progress.events import Ending, EventLog
from fedsrv.state.record import Record
from fedsrv.state.store import Store

Settle = Callable[[], None]
"""Waits for the commit under way. Whoever calls it before each step gives up that clients train
while a commit is written."""
CheckUpload = Callable[[ClientId, Bundle], None]
"""Raises PayloadError for an upload with impossible values; called from any thread."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass
class CurrentInteraction:
    """One interaction under way; it grows from seam to seam."""

    step: Step
    plan: Plan
    ctx: ServerContext
    began: float
    """When clients were asked, on the monotonic clock."""
    count: Callable[[Bundle], float]
    """What an upload counts in the mean."""
    tried: Answers = field(default_factory=lambda: Answers({}, {}))
    """Answers of clients beside the cohort that trained for the score alone."""
    results: Answers = field(default_factory=lambda: Answers({}, {}))
    """What the cohort brought; who does not count is among the failed."""
    answered: float = 0.0
    """When that had come."""
    company: Sequence[Norms] = ()
    """Norms of earlier uploads that keep these company in a comparison."""


class Kernel(Protocol):
    """What the kernel lets parts use: :class:`fedsrv.engine.round_parts.RoundParts` says it all."""

    plan: Plan
    method: Method
    cohort: Cohort
    store: Store
    events: EventLog
    rule: AggregationRule

    @property
    def experiment(self) -> Experiment:
        """Return the config that holds now."""
        ...

    @property
    def commits(self) -> Committing:
        """Return what writes commits."""
        ...

    def context(self, step: Step, cohort: tuple[int, ...]) -> ServerContext:
        """Return the context of the server half at a step."""
        ...

    def state_after(self, interaction: Interaction) -> ServerState:
        """Return the committed state after an interaction; the initial one for -1."""
        ...

    def training(self, ctx: ServerContext, state: ServerState, is_scored: bool) -> Trip:
        """Return the orders of a cohort to train from a state."""
        ...

    def payload(self, ctx: ServerContext, state: ServerState) -> Payload:
        """Return what a cohort gets to train from."""
        ...

    def orders(
        self,
        ctx: ServerContext,
        kind: rpc.OrderKind,
        clients: Iterable[ClientId],
        views: Sequence[str],
        tasks_seen: int | None = None,
    ) -> dict[ClientId, rpc.Order]:
        """Return orders of a kind."""
        ...

    def judged(self, at: CurrentInteraction, results: Answers) -> dict[int, str]:
        """Return whose uploads are to be left out, and why."""
        ...

    def leave_out(self, ctx: ServerContext, results: Answers, why: Mapping[int, str]) -> None:
        """Let uploads not count, and say whose and why."""
        ...

    def accuracy_on(self, step: Step, clients: Sequence[int], state: ServerState) -> float | None:
        """Return the mean accuracy of clients' received models on their tasks of a step."""
        ...

    def score_unscored(self, state: ServerState) -> None:
        """Score the last committed state unless it has its scores."""
        ...


class Committing(Protocol):
    """What parts may ask of :class:`fedsrv.engine.commits.Commits`."""

    last_trained: dict[int, Interaction]

    def settle(self) -> None:
        """Wait until the last interaction is committed."""
        ...

    def remember(self, plan: Plan, interaction: Interaction) -> None:
        """Read who trained when, up to an interaction."""
        ...


class Running(Protocol):
    """A run between two steps: :class:`fedsrv.engine.rounds.Rounds`."""

    state: ServerState

    @property
    def parts(self) -> Kernel:
        """Return what its rounds are made of."""
        ...


class Exchange:
    """How the uploads of an interaction are gathered: who is asked, what stands in for whom.

    An exchange never reduces, commits or scores.
    """

    tries_first = True
    """Whether clients beside the cohort train for the score before it does."""
    maps_state = True
    """Whether nobody needs the state before in memory once the uploads are there."""

    def __init__(self, parts: Kernel) -> None:
        """Go on after a commit."""
        self.parts = parts

    def train(self, at: CurrentInteraction, state: ServerState) -> Answers:
        """Let clients train from a state; return what came, those left out among the failed.

        Raises:
            TooFewClients: too few uploads count.
        """
        raise NotImplementedError

    def nobody(self, at: CurrentInteraction, state: ServerState) -> Answers:
        """Return the answers of an empty cohort, as independent chances may draw it."""
        self.parts.payload(at.ctx, state)
        return Answers({}, {})

    def aligned(self, at: CurrentInteraction, state: ServerState) -> ServerContext | None:
        """Return in which context the uploads are reduced; None where none counts.

        Late uploads are changed here as if they had been trained from the state.
        """
        return at.ctx

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put into the record how the uploads came."""

    def ended(self) -> None:
        """Forget what was kept for a replay."""


class Timetable:
    """The plans of a run whose steps are all known from the beginning."""

    def __init__(self, plan: Plan) -> None:
        """Begin with the plan of the clients that have joined."""
        self.first = plan

    def plan_at(self, plan: Plan, interaction: Interaction) -> Plan:
        """Return the plan that an interaction was done by, from the present one."""
        return plan

    def steps_after(self, rounds: Running, interaction: Interaction) -> Iterator[Step]:
        """Yield the steps after an interaction; rounds may get another plan in between."""
        yield from rounds.parts.plan.steps[interaction + 1 :]


class ServerPart:
    """One capability at the coordinator; each function is a seam, and does nothing by default."""

    rule: AggregationRule | None = None
    """How uploads become one result, in place of their mean."""
    needs_each = False
    """Whether uploads stay as they came until they are reduced, though a mean would do."""
    counts_alike = False
    """Whether all uploads count alike, whatever number of examples their clients say."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Take the run, and what its caller gives to parts, by name; no client is known yet."""
        self.store, self.events = store, events

    @property
    def experiment(self) -> Experiment:
        """Return the config that holds now."""
        return self.store.experiment

    @classmethod
    def check(cls, experiment: Experiment, *, certified: bool) -> None:
        """Refuse a config, as far as that needs neither data nor clients; raise ConfigError.

        ``certified`` tells whether every caller shows a certificate.
        """

    @classmethod
    def in_one_process(cls, experiment: Experiment) -> Experiment:
        """Return an experiment as one process can run it; say what that changes."""
        return experiment

    @classmethod
    def fits(cls, method: Method, run: RunFacts) -> None:
        """Refuse a method, before any client is there; raise ConfigError."""

    @classmethod
    def takes_up(cls, store: Store, before: Experiment) -> Mapping[str, str]:
        """Look at a run that begins or is resumed; return facts to store beside its config.

        ``before`` is what it was started with the last time. ConfigError keeps it as it was.
        """
        return {}

    # --- before the first step --------------------------------------------------------------------

    def offers(self) -> Mapping[str, Callable[..., Any]]:
        """Return what an operator may ask of this part while the run goes on, by name."""
        return {}

    def follows(self) -> Ending | None:
        """Begin to follow the run's events, and return what ends that."""

    def admission(self, known: Mapping[int, str]) -> Admission | None:
        """Return what checks who joins, given what earlier clients described; mostly as always."""

    def gathered(self, plan: Plan) -> None:
        """Look at the plan, once clients are known; raise ConfigError if it does not fit."""

    def timetable(
        self, method: Method, cohort: Cohort, descriptions: Mapping[int, str]
    ) -> Timetable | None:
        """Return the plans of the run, in place of one that is known from the beginning."""

    def exchange(self, rounds: Kernel, interaction: Interaction) -> Exchange | None:
        """Return how uploads come together, in place of a whole cohort, after a commit."""

    # --- before a step ----------------------------------------------------------------------------

    def may_go_on(self, step: Step, plan: Plan, settle: Settle) -> str:
        """Return the line that the run ends with before a step; empty if it goes on."""
        return ""

    def sets_aside(self, step: Step, aside: Mapping[int, int], settle: Settle) -> dict[int, str]:
        """Return the clients that take no part from a step on, and why."""
        return {}

    def abstains(self, step: Step, plan: Plan, settle: Settle) -> Collection[int]:
        """Return the clients of a step's cohort that get no order to train in it.

        Where too few are left, ``may_go_on`` says so before.
        """
        return ()

    # --- an interaction ---------------------------------------------------------------------------

    def context(self, ctx: ServerContext) -> ServerContext:
        """Return the context of the server half, with what this part adds."""
        return ctx

    def gives(self, ctx: ServerContext, common: Bundle) -> None:
        """Look at what a cohort is about to train from; raise TooFewClients to refuse."""

    def checks(self, ctx: ServerContext, check: CheckUpload) -> CheckUpload:
        """Return how a single upload is checked, given the check without this part."""
        return check

    def leaves_out(self, at: CurrentInteraction, results: Answers) -> dict[int, str]:
        """Look at each upload that came; return the clients whose do not count, and why."""
        return {}

    def came(self, at: CurrentInteraction, settle: Settle) -> None:
        """Look at all that came; raise TooFewClients to end the run."""

    def uploads(self, at: CurrentInteraction, uploads: Uploads) -> Uploads:
        """Return what the method gets of the uploads."""
        return uploads

    def answered(self, results: Answers) -> None:
        """Look at answers to any orders, of training, scoring or finishing."""

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put into the record of an interaction what this part knows of it."""

    def tells(self, record: Record) -> Mapping[str, Any]:
        """Return what listeners are told beside the usual facts when a record is committed."""
        return {}

    def committed(self, record: Record) -> None:
        """Tell of a record that is on the disk; called on the committer's thread."""

    # --- the end ----------------------------------------------------------------------------------

    def ends_with(self, error: Exception) -> str:
        """Return the line that the run ends with in order because of an error; mostly none."""
        return ""

    def explains(self, failed: Exception) -> Exception | None:
        """Return the error that the run ends with in place of this one; it may undo commits.

        The last part is asked first: whoever undoes commits comes before who says what to do.
        """

    def figures(self) -> Mapping[str, Figures]:
        """Return what computes metrics of a run that has ended, by a name that a note can say."""
        return {}

    def ended(self, records: Sequence[Record]) -> Mapping[str, Any]:
        """Return fields of the summary of a run that has ended."""
        return {}


class WholeCohort(Exchange):
    """Waits for a whole cohort, or for the first of more clients than are needed."""

    def train(self, at: CurrentInteraction, state: ServerState) -> Answers:
        """Let the cohort train; leave out uploads that do not count."""
        parts = self.parts
        if not at.ctx.cohort:
            return self.nobody(at, state)
        trip = parts.training(at.ctx, state, at.plan.is_scored(at.step))
        results = parts.cohort.send_and_receive(trip)
        while out := parts.judged(at, results):
            left = [client for client in results.by_client if client not in out]
            all_needed = parts.experiment.server.min_clients is None
            check_left(out, left, 1 if all_needed else trip.until.needed, at.ctx.round)
            parts.leave_out(at.ctx, results, out)
            if results.mean is None:
                break
            orders = {client: trip.orders[client] for client in left}
            without = replace(trip, orders=orders, until=AllOf(at.plan.needed_uploads(left)))
            # clients bring what they sent again; what was added up may be something else now
            results = parts.cohort.send_and_receive(without).after(results)
            if results.added is None:
                break
            results.added = results.added.again()
        return results


def check_left(
    out: Mapping[int, str], left: Sequence[object], needed: int | None, round: Round
) -> None:
    """Check that as many uploads are left as a round of its cohort needs, one at least.

    Raises:
        TooFewClients: fewer are; says how to go on.
    """
    if out and len(left) < max(1, needed or 0):
        raise too_few(out, round, "upload", max(1, needed or 0))
