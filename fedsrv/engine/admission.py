"""Who may take part in a run: the run's problem, and the clients whose descriptions fit it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from fedmodels.config.bounds import DETAILS, CountDetail
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import check_origin, placeless
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, PayloadError, RunFailed
from fedmodels.facts.class_names import composed
from fedmodels.facts.run_classes import RunClasses
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.bundle import EVALUATOR, ClientId, Problem
from fedsrv.engine.client_profile import Profile

Names = tuple[str, ...]
_HELP = (
    "; where a client may lack some of the classes, list every class in [data] classes of the "
    "coordinator's config"
)
MAX_TASKS = 10_000
"""Of a client, where no scenario says how many it has."""


class _Said(NamedTuple):
    """What a client states: its description, and what that says of the run's problem."""

    text: str
    problem: Problem
    names: Names
    """Of the classes; none where it states none."""


class OtherPartition(PayloadError):
    """A client's data come from another partition than the config describes."""


class Admission:
    """Checks that everyone who takes part has the run's problem.

    The config states the problem, or an earlier part of the run has settled it. Otherwise more than
    half of the clients have to describe the same one. Until then all clients count alike.
    """

    class_names: tuple[str, ...] = ()
    """Of the classes that the run began with, where clients may bring more."""

    _said: Guarded[dict[ClientId, _Said]] = Guarded("_lock")
    """What each admitted client states."""
    _votes: Guarded[Counter[Problem]] = Guarded("_lock")
    _voices: Guarded[Counter[Names]] = Guarded("_lock")
    """How many admitted clients state each problem, and each tuple of class names."""

    def __init__(
        self,
        known: Mapping[int, str],
        clients: int = 1,
        problem: Problem | None = None,
        most_tasks: Callable[[int, int], int] | None = None,
        experiment: Experiment | None = None,
    ) -> None:
        """Start from earlier descriptions and the config.

        Args:
            known: descriptions of an earlier part of the run; may be empty.
            clients: the number of clients of the run; more than half of them decide.
            problem: the problem, if the config states it.
            most_tasks: gives a client's number of tasks by the config, for a number of classes.
            experiment: the config that dealt-out data are compared with.
        """
        self._lock = threading.RLock()
        self._known = dict(known)
        self._clients, self._problem, self._most_tasks = clients, problem, most_tasks
        self._experiment = experiment
        self._said, self._votes, self._voices = {}, Counter(), Counter()
        self._names: Names = listed_in(experiment)
        self._lists_names = bool(self._names)
        """Whether the config itself says how the classes are called."""
        self._origin: Mapping[str, Any] | None = None
        """The partition of the client that was checked last; it is the config's."""
        for client, text in self._known.items():
            profile = Profile.parse(client, text)
            self._problem = self._problem or profile.problem
            self._names = self._names or profile.class_names

    @classmethod
    def of(cls, experiment: Experiment, known: Mapping[int, str], **more: Any) -> Self:
        """Return an admission that knows what an experiment says of its problem."""
        data, clients = experiment.data, experiment.schedule.clients
        problem = None
        if data is not None and data.input_shape is not None and data.num_classes is not None:
            problem = Problem(data.input_shape, data.num_classes)

        def most_tasks(client: int, num_classes: int) -> int:
            if experiment.scenario is None or (data is not None and data.cuts_tasks):
                return MAX_TASKS
            return experiment.scenario.tasks_per_client(clients, num_classes)[client]

        return cls(known, clients, problem, most_tasks, experiment, **more)

    def taken(self, client: ClientId, text: str) -> str:
        """Return what the run takes of a description: all, where it has an end; or PayloadError."""
        if gone := [*Profile.parse(client, text).set_aside]:
            raise PayloadError(
                f"client {client} has set its task {gone[0]} aside, which only runs with "
                "[schedule] open = true allow: prepare its data again without that task"
            )
        return text

    def follow(self, classes: RunClasses) -> None:
        """Take what the classes of an open run are called by now."""

    def refused(self, client: ClientId) -> Mapping[int, str]:
        """Return the tasks of an admitted client that the run does not take, and why."""
        return {}

    def check_fits(self, client: ClientId, text: str) -> None:
        """Check a description of data that nobody sent, as in one process; raise PayloadError."""
        with self._lock:
            self._check_fits(client, Profile.parse(client, text), text)

    def check(self, client: ClientId, text: str) -> None:
        """Check a client's description.

        Raises:
            PayloadError: the description states another problem than the run's, differs from the
                client's earlier one, states more tasks than the config gives, or is of another
                partition.
        """
        profile = Profile.parse(client, text)
        with self._lock:
            self._check_fits(client, profile, text)
        self._check_origin(client, profile)
        self._check_counted(client, profile)
        self._check_moments(client, profile)
        self._check_tasks(client, profile)

    def known(self, client: ClientId) -> str | None:
        """Return how a client last described its data to this run; None where it never did."""
        with self._lock:
            if (said := self._said.get(client)) is not None:
                return said.text
            return self._known.get(client) if isinstance(client, int) else None

    def _check_fits(self, client: ClientId, profile: Profile, text: str) -> None:
        """Check a description against the run's problem, and against the client's earlier one."""
        known = self._known.get(client) if isinstance(client, int) else None
        if known is not None and facts_in(known) != facts_in(text):
            raise PayloadError(
                f"client {client} described other data when it first joined this run, and a run "
                "keeps its initial data: start a new run (its [net] weights may be this run's "
                "exported model)"
            )
        strange = [name for name in profile.class_names if name not in self._names]
        if self._lists_names and strange:
            raise PayloadError(
                f"client {client} has the class {printable(strange[0], 60)!r}, which the run "
                f"does not know: it has {listed(self._names)}; add it to [data] classes of "
                "the coordinator's config, or leave it out of the client's data"
            )
        if self._problem is not None and self._differs(profile.problem):
            others = profile.class_names not in ((), self._names)
            raise PayloadError(
                f"client {client} has {_described(profile.problem)}; the run has "
                f"{_described(self._problem)}{_HELP if others and self._names else ''}"
            )
        if self._calls_differently(profile.class_names):
            raise PayloadError(
                f"client {client} calls its classes {listed(profile.class_names)}, which the "
                f'run names differently: write into its client.json "class_names": '
                f"{listed(self._names)}, and number its labels so"
            )

    def _differs(self, problem: Problem) -> bool:
        """Tell whether a problem is not the run's."""
        return self._problem is not None and problem != self._problem

    def _calls_differently(self, names: Names) -> bool:
        """Tell whether a client's names of the classes are none that the run can have."""
        return bool(self._names) and names not in ((), self._names)

    def _check_origin(self, client: ClientId, profile: Profile) -> None:
        """Check that data come from the config's partition, pooled if the method needs it."""
        if self._experiment is None:
            return
        if profile.origin is not None:
            if profile.origin != self._origin:
                try:
                    check_origin(self._experiment, profile.origin, f"the data of client {client}")
                except ConfigError as error:
                    raise OtherPartition(str(error)) from None
                self._origin = profile.origin
            return
        is_other = client not in (0, EVALUATOR) and bool(profile.train.any())
        if self._experiment.method.pools_data and is_other:
            raise OtherPartition(
                f"client {client} has its own training examples, but centralized trains only on "
                "client 0's: pool them there, or set [method] data = 'own'"
            )

    def _check_counted(self, client: ClientId, profile: Profile) -> None:
        """Check that a client counts its examples as exactly as the run needs."""
        needed = "exact" if self._experiment is None else self._experiment.announced
        told: CountDetail = profile.counted if profile.counted else "exact"
        if DETAILS.index(told) > DETAILS.index(needed):
            raise PayloadError(
                f"client {client} announces {told} counts of its examples, but this run needs "
                f"{needed} ones: leave out --announce, or set [privacy] announce in its config"
            )

    def _check_moments(self, client: ClientId, profile: Profile) -> None:
        """Check that inputs of a run with noise are normalised by what its config says."""
        experiment = self._experiment
        if experiment is None or experiment.privacy is None or experiment.privacy.level is None:
            return
        data = experiment.data
        if profile.origin is not None or (data is not None and data.mean is None):
            return  # by the numbers of a data set that the config names
        wanted = ((0.0,), (1.0,)) if data is None else (data.mean, data.std)
        mean, std = (np.array(one, dtype=np.float32) for one in wanted)
        low, high = (limit.numpy() for limit in profile.limits)
        if np.allclose(low, -mean / std) and np.allclose(high, (1 - mean) / std):
            return
        raise PayloadError(
            f"client {client} has a mean and deviation of its own for its inputs, and [privacy] "
            "level wants the same for all clients: give them by [data] mean and std in the "
            "coordinator's config, and write the same into client.json"
        )

    def _check_tasks(self, client: ClientId, profile: Profile) -> None:
        if self._most_tasks is None or not isinstance(client, int):
            return
        try:
            most = self._most_tasks(client, profile.problem.num_classes)
        except ConfigError as error:
            raise PayloadError(f"client {client} does not match the config: {error}") from None
        if profile.num_tasks > most:
            raise PayloadError(
                f"client {client} announces {profile.num_tasks} tasks; [scenario] gives it {most}"
            )

    def admit(self, client: ClientId, text: str) -> list[ClientId]:
        """Count a checked description; return admitted clients that turn out not to fit.

        A client that joins again replaces its earlier description.
        """
        with self._lock:
            profile = Profile.parse(client, text)
            self._forget(client)
            self._said[client] = _Said(text, self._ballot(profile.problem), profile.class_names)
            self._count(client, 1)
            settled = self._problem, self._names
            names, voices = _most(self._voices)
            if not self._names and voices > self._clients // 2:
                self._names = names
            problem, votes = _most(self._votes)
            if self._problem is None and votes > self._clients // 2:
                self._problem = problem
            is_news = settled != (self._problem, self._names)
            return self._turned_away(list(self._said) if is_news else [client])

    def settle(self) -> list[ClientId]:
        """Decide the problem among the joined clients, and bind them; return those that must leave.

        Raises:
            RunFailed: no problem has more than half of the votes.
        """
        with self._lock:
            problem, votes = _most(self._votes)
            voters = [c for c in self._said if isinstance(c, int)]
            if self._problem is None and voters and 2 * votes <= len(voters):
                found = {c: self._described(self._said[c].problem) for c in sorted(voters)}
                shown = "; ".join(f"client {c} has {what}" for c, what in list(found.items())[:3])
                raise RunFailed(
                    f"no more than half of the clients describe the same problem: {shown}; say "
                    "which it is with [data] input_shape and num_classes"
                )
            self._problem = self._problem or problem
            self._settle_names(voters)
            away = self._turned_away(list(self._said))
            self._known |= {c: self._said[c].text for c in voters if c in self._said}
            return away

    def _settle_names(self, voters: Sequence[int]) -> None:
        """Decide how the classes are called; raise RunFailed where most voters say nothing."""
        names, voices = _most(self._voices)
        named = {c: self._said[c].names for c in sorted(voters) if self._said[c].names}
        if not self._names and named and 2 * voices <= len(named):
            raise RunFailed(
                "no more than half of the clients name the classes alike and in one order: "
                + "; ".join(f"client {c} {listed(own)}" for c, own in list(named.items())[:3])
                + "; class_names in client.json must be the same list everywhere"
            )
        self._names = self._names or names or ()

    def _ballot(self, problem: Problem) -> Problem:
        """Return what a client with this problem votes for."""
        return problem

    def _described(self, problem: Problem) -> str:
        """Return in words what clients vote for."""
        return _described(problem)

    def _turned_away(self, clients: Sequence[ClientId]) -> list[ClientId]:
        """Forget the clients whose problem or class names are not the run's; return them."""
        away = [
            c
            for c in clients
            if self._differs(self._said[c].problem)
            or self._calls_differently(self._said[c].names or self._names)
        ]
        for client in away:
            self._forget(client)
        return away

    def _forget(self, client: ClientId) -> None:
        """Forget what a client said, if it said anything."""
        if client in self._said:
            self._count(client, -1)
            del self._said[client]

    def _count(self, client: ClientId, vote: int) -> None:
        """Add 1 to the votes for what a client says, or take 1 away; the evaluator has no vote."""
        if not isinstance(client, int):
            return
        said = self._said[client]
        self._votes[said.problem] += vote
        self._votes += Counter()  # drops what nobody says any more
        if said.names:
            self._voices[said.names] += vote
            self._voices += Counter()


def _most(votes: Counter[Any]) -> tuple[Any, int]:
    """Return what most clients state, and how many do."""
    return votes.most_common(1)[0] if votes else (None, 0)


def facts_in(text: str) -> dict[str, Any]:
    """Return a description without the path of a custom data set, which earlier versions told."""
    found: dict[str, Any] = json.loads(text)
    if isinstance(dealt := found.get("partition"), dict):
        found["partition"] = placeless(dealt)
    return found


def listed_in(experiment: Experiment | None) -> Names:
    """Return the names of the classes that a config lists; none where it lists none."""
    data = None if experiment is None else experiment.data
    if data is None:
        return ()
    names = data.classes or (data.columns.classes if data.columns else None) or ()
    return tuple(composed(name) for name in names)


def _described(problem: Problem) -> str:
    return f"inputs {list(problem.input_shape)} and {problem.num_classes} classes"


def listed(names: Names) -> str:
    """Return the names of classes as a client.json has them, the first of many."""
    some = [name[:30] for name in names[:12]]
    return json.dumps(some, ensure_ascii=False)[:-1] + (", …]" if len(names) > 12 else "]")
