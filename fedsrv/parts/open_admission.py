"""Who may take part in an open run: its clients bring tasks and classes, and classes go by name.

The clients of an open run share the shape of their inputs. Each may have other classes, and may get
more. The run has all of them. So nobody votes on classes; what names may be one class under two
spellings is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedmodels.config.experiment import Experiment
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.facts.class_names import alike
from fedmodels.facts.data_description import MAX_WHY
from fedmodels.facts.run_classes import RunClasses
from fedmodels.methods import make
from fedmodels.parts.class_growth import check_grows
from fedmodels.tensors.bundle import ClientId, Problem
from fedmodels.training.run import RunFacts
from fedsrv.engine.admission import MAX_TASKS, Admission, Names, facts_in, listed, listed_in
from fedsrv.engine.client_profile import CountTable, Profile
from fedsrv.engine.schedule import new_classes

MAX_LETTERS = 60
REFUSED = "the run does not take it"
"""How the reason begins why the coordinator passes over a task."""


class OpenAdmission(Admission):
    """Checks that everyone who takes part has the inputs of an open run, and what it had before."""

    def __init__(
        self,
        known: Mapping[int, str],
        *args: Any,
        classes: RunClasses | None = None,
        **options: Any,
    ) -> None:
        """Start as :class:`Admission` does.

        ``classes`` are those of the run; None where it has not begun.
        """
        began = known if classes else {}  # before that, what clients had may have grown since
        super().__init__(began, *args, **options)
        assert self._experiment is not None, "a config says that the run is open"
        data = self._experiment.data
        self._outputs = data.columns.outputs if data and data.columns else ()
        """What is learned in place of classes, which nobody brings more of; none of classes."""
        self._has_begun = classes is not None
        """Whether the clients may bring more than they had, and no less."""
        self._run = classes or RunClasses(())
        """The classes of the run by now."""
        self.class_names = self._run.first
        self._classes = Counter[str]([*self._run.first, *listed_in(self._experiment)])
        """The names of all classes that the run and its clients have, and how many have each."""
        for text in self._known.values():
            self._classes.update(Profile.parse(0, text).brought)

    def taken(self, client: ClientId, text: str) -> str:
        """Return a description with a mark at each task that the run passes over.

        Those are the tasks that a site has set aside; and, of a client that the run knows, each new
        task whose classes the run cannot take in. So one of them holds up none that come after it.
        No mark is ever taken back.

        Raises:
            PayloadError: it is malformed.
        """
        profile = Profile.parse(client, text)
        with self._lock:
            known = self._known.get(client) if isinstance(client, int) else None
            if known is None:
                return text
            before = Profile.parse(client, known)
            if profile.num_tasks < before.num_tasks:
                return text  # as of a site with older data; the check says what is missing
            marks = {**profile.set_aside, **before.set_aside}
            for task in range(before.num_tasks, profile.num_tasks):
                if task not in marks:
                    marks |= self._refused(client, profile, task, marks)
        return marked(text, marks) if marks != profile.set_aside else text

    def _refused(
        self, client: ClientId, profile: Profile, task: int, marks: Mapping[int, str]
    ) -> dict[int, str]:
        """Return a new task with the reason why the run cannot take it in; nothing where it can."""
        later = dict.fromkeys(range(task + 1, profile.num_tasks), "")
        try:
            self._check_names(client, replace(profile, set_aside={**later, **marks}).brought)
        except PayloadError as error:
            why = str(error).removeprefix(f"client {client} ")
            return {task: printable(f"{REFUSED}: it {why}", MAX_WHY)}
        return {}

    def follow(self, classes: RunClasses) -> None:
        """Take what the classes of the run are called by now."""
        self._run = classes

    def refused(self, client: ClientId) -> Mapping[int, str]:
        """Return the tasks of an admitted client that the run does not take, and why."""
        with self._lock:
            said = self._said.get(client)
            marks = Profile.parse(client, said.text).set_aside if said else {}
        return {task: why for task, why in marks.items() if why.startswith(REFUSED)}

    def _check_fits(self, client: ClientId, profile: Profile, text: str) -> None:
        """Check the shape of inputs, the names of classes, and that nothing is gone."""
        if self._problem is not None and self._differs(profile.problem):
            raise PayloadError(
                f"client {client} has inputs {[*profile.problem.input_shape]}; the run has inputs "
                f"{[*self._problem.input_shape]}"
            )
        outputs = self._outputs
        if outputs and profile.classes != outputs:
            raise PayloadError(
                f"client {client} learns {listed(profile.classes)}, and the run {listed(outputs)}: "
                "cut its data by the [data.columns] of the run"
            )
        known = self._known.get(client) if isinstance(client, int) else None
        if known is not None:
            self._check_extends(client, Profile.parse(client, known), known, profile, text)
        self._check_names(client, profile.brought)

    def _differs(self, problem: Problem) -> bool:
        """Tell whether inputs are of another shape than the run's."""
        return self._problem is not None and problem.input_shape != self._problem.input_shape

    def _calls_differently(self, names: Names) -> bool:
        """Tell that any names will do: classes go by them."""
        return False

    def _check_names(self, client: ClientId, names: Names) -> None:
        """Check the classes that a client has and nobody had before.

        Raises:
            PayloadError: one may be a class that the run has under another name, or the run can
                take in no more.
        """
        run = self._run
        held = run.called(name for name, count in self._classes.items() if count > 0)
        known = [*dict.fromkeys([*run.called(run.names), *held])]
        names = run.called(names)
        new = new_classes(known, [names])
        if not new:
            return
        if why := spelt(new, [*known, *run.earlier], names):
            raise PayloadError(f"client {client} {why}")
        if self._has_begun and (why := self._refusal()):
            raise PayloadError(
                f"client {client} has a new class {printable(new[0], MAX_LETTERS)!r}: {why}"
            )
        assert self._experiment is not None
        most = self._experiment.schedule.max_classes
        before = len(known) + len(run.merged)  # what is part of another class keeps its row
        if before + len(new) > most:
            raise PayloadError(
                f"client {client} brings {len(new)} new classes to {before}, and "
                f"[schedule] max_classes = {most}"
            )

    def _refusal(self) -> str:
        """Return why the run's method cannot take in new classes; empty if it can."""
        assert self._experiment is not None
        assert self._problem is not None, "the run has begun"
        table = self._experiment.method
        method = make(table.name, **table.hyper_parameters())
        rows = len({*self._run.called(self._classes)}) + len(self._run.merged)
        problem = Problem(self._problem.input_shape, rows)
        try:
            for run in RunFacts(self._experiment, problem).of_each_net:
                check_grows(method, run)
        except ConfigError as error:
            return str(error)
        return ""

    def _check_extends(
        self, client: ClientId, before: Profile, known: str, profile: Profile, text: str
    ) -> None:
        """Check that a client has what it had, and more tasks at most.

        Raises:
            PayloadError: says what is missing.
        """
        if profile.num_tasks < before.num_tasks:
            raise PayloadError(
                f"client {client} has {profile.num_tasks} tasks, and had {before.num_tasks}: "
                "put back its client.json, which counts earlier tasks whose data are gone, or let "
                f"{_recover(client)} write it as the run knows it"
            )
        if profile.classes[: len(before.classes)] != before.classes:
            raise PayloadError(
                f"client {client} calls its classes {listed(profile.classes)}, and called "
                f"them {listed(before.classes)}: new ones come behind those that it had"
            )
        if (task := _first_other(profile, before)) is not None:
            raise PayloadError(
                f"client {client} has other data as its task {task} than the run learned under "
                f"that number, as a site has that went on from an earlier backup: "
                f"{_recover(client)} puts what is new behind the {before.num_tasks} tasks that "
                "the run knows, and sets those aside whose data are lost"
            )
        if _fixed_part(known) != _fixed_part(text):
            raise PayloadError(
                f"client {client} had other data in its first {before.num_tasks} tasks; an "
                "open run takes new tasks behind those that it knows"
            )

    def _check_tasks(self, client: ClientId, profile: Profile) -> None:
        if isinstance(client, int) and profile.num_tasks > MAX_TASKS:
            raise PayloadError(f"client {client} announces more than {MAX_TASKS} tasks")

    def admit(self, client: ClientId, text: str) -> list[ClientId]:
        """Count a checked description; return admitted clients that turn out not to fit."""
        with self._lock:
            before = self._said.get(client)
            for said, count in ((before and before.text, -1), (text, 1)):
                for name in Profile.parse(client, said).brought if said else ():
                    self._classes[name] += count
            if self._has_begun and isinstance(client, int):
                self._known[client] = text
        return super().admit(client, text)

    def settle(self) -> list[ClientId]:
        """Bind the clients to what they describe: from now on it may become more."""
        away = super().settle()
        self._has_begun = bool(self._known)
        return away

    def _settle_names(self, voters: Sequence[int]) -> None:
        """Decide nothing: the run has all names."""

    def _ballot(self, problem: Problem) -> Problem:
        """Return what a client votes for: the shape of its inputs, with any number of classes."""
        return Problem(problem.input_shape, 1)

    def _described(self, problem: Problem) -> str:
        """Return in words what clients vote for."""
        return f"inputs {[*problem.input_shape]}"


def first_classes(experiment: Experiment, announced: Mapping[int, Names]) -> Names:
    """Return the names of the classes that an open run begins with, in label order.

    Those that its config lists come first. Those that clients have beside come in the order of the
    clients.
    """
    named = listed_in(experiment)
    return named + new_classes(named, [announced[client] for client in sorted(announced)])


def _recover(client: ClientId) -> str:
    return f"fedcli recover --client-id {client} at its site"


def _first_other(profile: Profile, before: Profile) -> int | None:
    """Return the first task that has other counts or content than before; None where none has.

    Of tasks without a digest, as in runs of before, the counts alone tell.
    """
    counts = ((profile.train, before.train), (profile.test, before.test))
    for task in range(before.num_tasks):
        is_same = all(_begins_with(now[task], had[task]) for now, had in counts)
        wanted = before.digests.get(task)
        if not is_same or (wanted and profile.digests.get(task) != wanted):
            return task
    return None


def _begins_with(counts: CountTable, before: CountTable) -> bool:
    """Tell whether the counts of a task (K',) begin with (K,), and have nothing of new classes."""
    return np.array_equal(counts[: len(before)], before) and not counts[len(before) :].any()


def _fixed_part(text: str) -> dict[str, Any]:
    """Return what a description says beside what may become more, or change with new tasks."""
    grows = "tasks", "num_classes", "class_names", "recipe"
    return {k: v for k, v in facts_in(text).items() if k not in grows}


def marked(text: str, marks: Mapping[int, str]) -> str:
    """Return a description with these tasks set aside, each with its reason."""
    found = json.loads(text)
    for task, why in marks.items():
        found["tasks"][task] |= {"set_aside": True, "why": why}
    return json.dumps(found)


def spelt(new: Iterable[str], known: Collection[str], own: Collection[str]) -> str:
    """Return why a new class may be one that is known under another name; empty if none may be.

    Names that differ in case or spaces alone may be one class, unless a client has both. So may a
    number and a name, where each is unknown to who has the other one: who states no names calls
    classes by their numbers.

    Args:
        new: the names that a client brings.
        known: those that the run has.
        own: all names of the client.
    """
    by_likeness = {alike(name): name for name in known if name not in own}
    numbers = [name for name in known if name.isdecimal() and name not in own]
    names = [name for name in known if not name.isdecimal() and name not in own]
    for name in new:
        shown = printable(name, MAX_LETTERS)
        if (other := by_likeness.get(alike(name), name)) != name:
            like = printable(other, MAX_LETTERS)
            return (
                f"has the class {shown!r}, and the run has {like!r}: write it like that in the "
                "client's data"
            )
        if beside := names if name.isdecimal() else numbers:
            what = "a number without a name" if name.isdecimal() else "a name"
            like = printable(beside[0], MAX_LETTERS)
            return (
                f"has the class {shown!r}, {what}, and the run has {like!r}, which may be the "
                'same: give the classes names everywhere, with "class_names" in client.json'
            )
    return ""
