"""What the clients of a process share: the run's facts, nets to work with, and what may travel.

A run that is open may get classes while it goes on. There is a set-up for each list of classes, and
the last ones are kept: a run that goes back to an earlier interaction has fewer classes again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from fedmodels.config.experiment import Experiment
from fedmodels.errors import PayloadError
from fedmodels.facts.class_names import named
from fedmodels.facts.data_description import MAX_CLASSES
from fedmodels.facts.run_classes import ClassChange, RunClasses
from fedmodels.nets.split import SplitNet
from fedmodels.tensors.bundle import Problem
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.asked import keeps_state
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import Wire
from fedpb.v1 import coordinator_pb2 as rpc

KEPT = 2
"""Set-ups that are held: that of the last order, and the one before or after it."""


class SetUp:
    """What the clients of a process share while a run has one list of classes."""

    def __init__(
        self, method: Method, run: RunFacts, classes: RunClasses, device: torch.device
    ) -> None:
        """Build a net to work with."""
        self.method, self.run, self.classes = method, run, classes
        self.net: SplitNet = run.make_net().to(device).pack()
        self.wire = Wire.of(method, run)
        self.owed, self.beside = (self.wire.sections(learnt=how) for how in (True, False))
        """Prefixes of what parts keep: it is learnt as the state is, or stands beside it."""
        self.keeps = keeps_state(method, run) or bool(self.owed)
        """Whether a client's private state lasts from one interaction to the next."""
        self.stores = self.keeps or bool(self.beside)
        """Whether anything of a client is on the disk: its private state, or what parts keep."""

    @cached_property
    def payload_spec(self) -> Mapping[str, BundleSpec]:
        """The specification of each part of an order's payload."""
        common, personal = self.method.payload_spec(self.run)
        return {"common": self.wire.payload_spec(common), "personal": personal}

    @cached_property
    def upload_spec(self) -> BundleSpec:
        """The specification of an upload as the method makes it."""
        return self.method.upload_spec(self.run)


class SetUps:
    """The set-ups of a process."""

    def __init__(
        self,
        method: Method,
        experiment: Experiment,
        problem: Problem,
        classes: Sequence[str],
        device: torch.device,
    ) -> None:
        """Build the set-up for the classes that the run began with.

        The problem is that of any client; ``classes`` alone says how many classes there are.

        Raises:
            PayloadError: two classes have one name, or there are too many.
        """
        self.busy = threading.RLock()
        """Held while a client works: nets that another thread built then would draw from the
        random numbers of its training."""
        self.shared: dict[str, Any] = {}
        """What parts of the clients of a process share, by name."""
        self.classes, self._device = tuple(classes), device
        _check(first := RunClasses(self.classes))
        self._first = RunFacts(experiment, Problem(problem.input_shape, len(self.classes)))
        self._kept = {first: SetUp(method, self._first, first, device)}
        self._method = method
        self._by_net = {0: self}
        """The set-ups of each net that clients of this process have, by its number."""

    def of_net(self, number: int) -> SetUps:
        """Return the set-ups of the clients that have a net of ``[net] by_client``."""
        if number not in self._by_net:
            run = self._by_net[0]._first.of_each_net[number]
            with self.busy:
                found = SetUps(
                    self._method, run.experiment, run.problem, self.classes, self._device
                )
            found.busy, found.shared, found._by_net = self.busy, self.shared, self._by_net
            self._by_net[number] = found
        return self._by_net[number]

    def of(self, order: rpc.Order) -> SetUp:
        """Return the set-up for the first classes, those that an order adds, and their changes.

        Raises:
            PayloadError: they are no names of further classes, or no changes of known ones.
        """
        changes = ((one.after, ClassChange(one.old, one.now)) for one in order.class_changes)
        wanted = RunClasses(self.classes, tuple(order.new_classes), tuple(changes))
        found = self._kept.get(wanted)
        if found is not None:
            return found
        _check(wanted)
        run = self._first.for_classes(len(wanted.names)) if wanted.came else self._first
        run = replace(run, merged=tuple(wanted.merged.items())) if wanted.merged else run
        with self.busy:
            found = SetUp(self._method, run, wanted, self._device)
            _ = found.payload_spec
            kept = [*self._kept.items()][1 - KEPT :]
            self._kept = {**dict(kept), wanted: found}
        return found


def _check(classes: RunClasses) -> None:
    """Raise PayloadError if a server's names of classes come twice, are too many, or are none."""
    number = len(classes.first) + len(classes.came), len(classes.changes)
    told = (*classes.came, *(change.now for _, change in classes.changes))
    try:
        fits = max(number) <= MAX_CLASSES and bool(classes.names)
        fits = fits and all(named(name) == name for name in told)
    except ValueError:  # one comes twice or cannot be a name, or a change is of none of them
        fits = False
    if not fits:
        raise PayloadError(
            f"the server names {len(classes.first)} classes and {len(classes.came)} new ones: "
            "one twice, or too many, or one cannot be a name, or a change is of none of them"
        )
