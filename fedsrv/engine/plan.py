"""The plan of a run: all that follows from its config and from what its clients said of their data.

A plan is a value. Where a client joins late, the run gets another plan as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor

from fedmodels.errors import RunFailed
from fedmodels.facts.position import Interaction, Round
from fedmodels.nets.cost import multiply_adds
from fedmodels.numerics.metrics import frequency_groups
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.asked import keeps_state, local_view
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import check_parts
from fedmodels.training.wire import Wire, check_fits
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.table_pb2 import Table
from fedsrv.engine import schedule
from fedsrv.engine.client_profile import Profile, accuracy_of_guesses, common_limits
from fedsrv.engine.cohort import Allocate, AllOf, Cohort, Trip, UploadForm
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.schedule import Step, takes_part
from fedsrv.state.store import Store

log = logging.getLogger(__name__)
MAX_SITES = 12
"""Clients of which a run says how many test examples of each class they have."""


@dataclass(frozen=True)
class Plan:
    """What a run does at each step, and with whom."""

    method: Method
    run: RunFacts
    profiles: Mapping[int, Profile]
    """Descriptions of the known clients by id, ascending."""
    tasks: Mapping[int, int]
    """Number of tasks of each client, known or not."""
    steps: Sequence[Step]
    aside: Mapping[int, Interaction]
    """The first interaction without each client that was set aside."""
    terms: ReportValidator
    """What an answer has to keep to."""

    @classmethod
    def of(cls, method: Method, store: Store, descriptions: Mapping[int, str]) -> Plan:
        """Return the plan for the first clients, stored; ConfigError if their data do not fit."""
        experiment, profiles = store.experiment, stored_profiles(store, descriptions)
        run = RunFacts(experiment, next(iter(profiles.values())).problem)
        check_fits(method, run)
        check_parts(method, run)
        tasks, aside = fixed_tasks(store, profiles), store.aside()
        steps = _steps(store, profiles, tasks)
        terms = ReportValidator(method, run, profiles, steps)
        return cls(method, run, profiles, tasks, steps, aside, terms)

    def with_aside(self, store: Store) -> Plan:
        """Return the plan without the clients that were set aside while the run went on."""
        steps = _steps(store, self.profiles, self.tasks)
        terms = replace(self.terms, steps=steps)
        return replace(self, steps=steps, aside=store.aside(), terms=terms)

    def met(self, store: Store, cohort: Cohort, step: Step) -> Plan:
        """Return the plan with clients that have joined since, once enough of a step are there."""
        if not step.cohort or len(self.profiles) == self.run.experiment.schedule.clients:
            return self
        needed = min(self.run.experiment.min_clients, len(step.cohort))
        return self.with_clients(store, cohort.meet(step.cohort, needed))

    def with_clients(self, store: Store, descriptions: Mapping[int, str]) -> Plan:
        """Return the plan with clients that have joined since; known clients stay as they are."""
        if descriptions.keys() <= self.profiles.keys():
            return self
        profiles = stored_profiles(store, descriptions)
        return replace(self, profiles=profiles, terms=replace(self.terms, profiles=profiles))

    # --- what follows -----------------------------------------------------------------------------

    @cached_property
    def groups(self) -> Mapping[str, list[int]]:
        """Classes by name, such as ``minority``."""
        return frequency_groups(_examples(self.profiles)) if self.scores_classes else {}

    @cached_property
    def limits(self) -> tuple[Tensor, Tensor]:
        """Black and white after normalisation, as most clients have them: (C,) each."""
        return common_limits(self.profiles.values())

    @property
    def wire(self) -> Wire:
        """How tensors travel, and what clients keep beside what the method says."""
        return self.terms.wire

    @cached_property
    def upload_spec(self) -> BundleSpec:
        """The specification of an upload as it travels."""
        return self.wire.upload_spec(self.method.upload_spec(self.run))

    @cached_property
    def is_stateful(self) -> bool:
        """Whether clients keep a private state."""
        return keeps_state(self.method, self.run) or self.wire.keeps

    def trip(
        self,
        orders: Mapping[ClientId, rpc.Order],
        common: Bundle,
        personal: Mapping[ClientId, Bundle],
        until: AllOf,
        **form: Any,
    ) -> Trip:
        """Return a trip whose answers keep to the terms; ``form`` says more of its uploads."""
        terms = UploadForm(check_report=self.terms.check_report, **form)
        if self.wire.changes_uploads and terms.spec.required:
            terms = replace(terms, restore=partial(self._restored, common))
        sent = self.wire.sent(common)
        travels = None if sent is common else sent
        return Trip(orders, common, personal, terms, until, travels, self.wire.zstd)

    def _restored(self, common: Bundle, sent: Bundle, allocate: Allocate) -> Bundle:
        """Return an upload as the method gets it; called from any thread."""
        return self.wire.restored(sent, common, allocate)

    @property
    def scores_classes(self) -> bool:
        """Whether scores are counted by class."""
        return self.run.experiment.announced == "exact"

    @property
    def scores_trained(self) -> bool:
        """Whether models are scored right after local training."""
        return "after_local" in {*self.method.views} & {*self.run.experiment.evaluate.views}

    def is_scored(self, step: Step) -> bool:
        """Tell whether the round of a step is scored."""
        return schedule.is_scored(self.steps, step, self.run.experiment.evaluate.every)

    def views(self, step: Step) -> list[str]:
        """Return the views that need an evaluation trip after a step of a scored round."""
        wanted: list[str] = [
            v for v in self.run.experiment.evaluate.views if v in self.method.views
        ]
        trip = [v for v in wanted if v != "after_local"]
        of_task = ("after_downlink", local_view(self.method))
        return trip if step.ends_round else [v for v in trip if v in of_task]

    def count_macs(self) -> list[int]:
        """Return the multiply-adds of one forward pass of each net."""
        shape = self.run.problem.input_shape
        return [multiply_adds(run.make_net(), shape) for run in self.run.of_each_net]

    @property
    def members(self) -> Collection[int]:
        """Return the clients of the run."""
        return range(self.run.experiment.schedule.clients)

    @property
    def new_classes(self) -> Sequence[str]:
        """Return the names of the classes that the run did not begin with."""
        return ()

    @property
    def class_changes(self) -> Sequence[rpc.ClassChange]:
        """Return what became of the classes of an open run since it began."""
        return ()

    @property
    def settings(self) -> Table | None:
        """Return what holds beside the config that clients were told when they joined."""
        return None

    def task_began(self, client: ClientId, step: Step) -> Round:
        """Return the round in which a client's task of a step began, of an open run; else 0."""
        return Round(0)

    def tasks_seen(self, step: Step) -> int:
        """Return how many tasks clients are scored on: with ``rounds_outer``, all after a round."""
        all_seen = self.run.experiment.schedule.order == "rounds_outer" and step.ends_round
        return max(self.tasks.values()) if all_seen else step.task + 1

    def ends_task(self, step: Step) -> bool:
        """Tell whether the interaction after a step is on another task; false for the last one.

        An interaction in which nothing changes does not count.
        """
        later = (self.steps[n] for n in range(step.interaction + 1, len(self.steps)))
        following = next((other for other in later if not self.is_idle(other)), step)
        return following.task != step.task

    def is_idle(self, step: Step) -> bool:
        """Tell whether nothing changes at a step: nobody was drawn, and no noise hides that."""
        privacy = self.run.experiment.privacy
        return not step.cohort and not (privacy is not None and privacy.noise_at_server)

    # --- who --------------------------------------------------------------------------------------

    def cohort_of(self, step: Step) -> tuple[int, ...]:
        """Return the known clients of a step that have its task; none if nobody was drawn.

        Raises:
            RunFailed: no known client of the step has it.
        """
        known = self.profiles
        found = tuple(c for c in step.cohort if c in known and known[c].num_tasks > step.task_of(c))
        if step.cohort and not found:
            where = f"interaction {step.interaction + 1}"
            raise RunFailed(f"{where}: no known client has task {step.task}")
        return found

    def scorers(self, step: Step, cohort: Sequence[int]) -> list[int]:
        """Return the clients that score the models after a step.

        Between asynchronous rounds only idle clients do; all do at the end of the run, or of a
        stage of an open one.
        """
        experiment, at_end = self.run.experiment, step.ends_run or step.ends_stage
        ends = at_end if experiment.schedule.is_asynchronous else step.ends_round
        found = schedule.scorers(experiment, self.profiles, cohort) if ends else cohort
        return [c for c in found if takes_part(c, Interaction(step.interaction + 1), self.aside)]

    def tryers(self, step: Step, cohort: Sequence[int]) -> tuple[int, ...]:
        """Return the clients beside a cohort that train for the score alone, ascending.

        They are those that score and have the task, in the last interaction of a round.
        """
        experiment, tasks = self.run.experiment, self.tasks
        is_due = self.is_scored(step) and step.ends_round and self.scores_trained
        if not is_due or experiment.evaluate.trained != "all":
            return ()
        found = schedule.scorers(experiment, self.profiles, cohort)
        others = (
            c for c in found
            if c not in cohort and tasks[c] > step.task_of(c)
            and step.task_of(c) not in self.unscored(c)
        )  # fmt: skip
        return tuple(c for c in others if takes_part(c, step.interaction, self.aside))

    def unscored(self, client: ClientId) -> Sequence[int]:
        """Return the tasks of a client that are not scored any more: forgotten ones."""
        return sorted(self.profiles[client].set_aside) if isinstance(client, int) else ()

    def needed_uploads(self, clients: Sequence[ClientId], wanted: int | None = None) -> int:
        """Return how many uploads of these clients a round needs."""
        return self.needed(clients, wanted)

    @property
    def spares_clients(self) -> bool:
        """Whether the run continues without clients that may train no more."""
        return False

    def needed(self, clients: Sequence[ClientId], wanted: int | None = None) -> int:
        """Return how many of these clients a trip needs: all or as many as are wanted, or fewer."""
        most = min(wanted or len(clients), len(clients))
        return min(self.run.experiment.server.min_clients or most, most)


# --- what clients said ----------------------------------------------------------------------------


def stored_profiles(store: Store, descriptions: Mapping[int, str]) -> dict[int, Profile]:
    """Store clients' descriptions, and return those of all known clients; known clients stay."""
    known = {**store.ledger.profiles(), **descriptions}
    store.add_profiles(known)
    found = {c: Profile.parse(c, text) for c, text in sorted(known.items())}
    for client, task in store.forgotten():
        if client in found:
            found[client] = found[client].without([task], "it is forgotten")
    describe(store, found)
    return found


def _steps(
    store: Store, profiles: Mapping[int, Profile], tasks: Mapping[int, int]
) -> Sequence[Step]:
    """Return the steps of a run that is not open, without clients that were set aside."""
    experiment, weights = store.experiment, fixed_weights(store, profiles)
    trainers = [0] if experiment.method.pools_data else range(experiment.schedule.clients)
    chance = None  # draws by the seed; by a secret where epsilon relies on it
    if (secret := store.secret) is not None:
        chance = lambda n, client: secret.chance(f"cohort/{n}/{client}")  # noqa: E731
    gone = store.forgotten()
    return schedule.steps(experiment, trainers, tasks, weights, store.aside(), chance, gone)


def describe(store: Store, profiles: Mapping[int, Profile]) -> None:
    """Write what clients announced of their data in common, for reports to read."""
    examples, by_class = _examples(profiles), store.experiment.announced == "exact"
    few = by_class and len(profiles) <= MAX_SITES
    store.describe(
        {
            "classes": next((p.class_names for p in profiles.values() if p.class_names), ()),
            "examples": examples.tolist() if by_class else [],
            "rare": frequency_groups(examples)["minority"] if by_class else [],
            "guesses": accuracy_of_guesses(profiles.values()) if by_class else {},
            "again": {c: n for c, p in profiles.items() if (n := p.num_again)},
            "clients": {c: p.name for c, p in profiles.items() if p.name},
            "tests": {c: p.test.sum(0).tolist() for c, p in profiles.items()} if few else {},
        }
    )


def fixed_tasks(store: Store, profiles: Mapping[int, Profile]) -> dict[int, int]:
    """Return the number of tasks of each client, as fixed when the run began.

    An unknown client counts as one with the most tasks. Where clients bring data of their own
    and ``min_clients`` is given, tasks that fewer clients have are left out: nobody is a cohort
    alone by saying that its stream is longer.
    """
    met, experiment = {c: p.num_tasks for c, p in profiles.items()}, store.experiment
    least = experiment.server.min_clients if experiment.scenario is None else None
    if least:  # else the config itself deals tasks out
        most = sorted(met.values(), reverse=True)[min(least, len(met)) - 1]
        longer = [str(c) for c, tasks in met.items() if tasks > most]
        if longer:
            log.warning(
                "clients %s announce more than %d tasks; fewer than min_clients = %d clients "
                "have the tasks after those, so the run leaves these tasks out",
                ", ".join(longer), most, least,
            )  # fmt: skip
        met = {c: min(tasks, most) for c, tasks in met.items()}
    absent = dict.fromkeys(range(experiment.schedule.clients), max(met.values()))
    return store.fixed("tasks", {**absent, **met})


def fixed_weights(store: Store, profiles: Mapping[int, Profile]) -> dict[int, int] | None:
    """Return each client's number of training examples, or None where all count alike.

    The numbers are fixed when the run begins. An unknown client counts as one with the mean number.
    """
    schedule = store.experiment.schedule
    if schedule.sampling != "weighted":
        return None
    met = {c: int(p.train.sum()) for c, p in profiles.items()}
    absent = dict.fromkeys(range(schedule.clients), sum(met.values()) // len(met))
    return store.fixed("examples", {**absent, **met})


def _examples(profiles: Mapping[int, Profile]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the training examples of all clients by class, (K,)."""
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.sum(
        [p.train.sum(axis=0) for p in profiles.values()], axis=0
    )
    return found
