"""What the kernel of a client offers to parts: the client, a training, a score, and the seams.

A part is one capability that a config can leave out; :mod:`fedmodels.config.combinations` has the
list. The kernel calls each seam of all parts that are there, in the order of the list, and asks
none by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream
from fedcli.runtime.setups import SetUp, SetUps
from fedcli.runtime.state import StateDirectory
from fedmodels.config.combinations import halves_of, part_at
from fedmodels.config.experiment import Experiment
from fedmodels.methods import make
from fedmodels.nets.split import SplitNet
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights, state_digest
from fedmodels.training.contexts import ClientContext
from fedmodels.training.loop import ClientHalf
from fedmodels.training.run import RunFacts
from fedmodels.training.scoring import TestSets
from fedpb.v1 import coordinator_pb2 as rpc


class Brought(Protocol):
    """What a site brings to a run for one of the parts, for all clients of a process."""

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Look at the run that the clients have joined; raise ConfigError to stay out of it."""


class CountsScores(Protocol):
    """What a site counts scored models with."""

    def takes(self, name: str, what: str, states: Path) -> bool:
        """Count a score of a client by its name; False where there were enough."""
        ...


NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass
class Client:
    """One client of a run: its data, its private state, and what it shares with its process."""

    client: ClientId
    data: ClientData
    states: StateDirectory
    experiment: Experiment
    device: torch.device
    sibling: InitVar[Client | None] = None
    """Another client of this process. The two train in turn, and share nets to work with."""
    keep_bytes: int = 256 << 20
    """A larger upload is not kept until its commit; the client computes it again if asked."""
    classes: Sequence[str] = ()
    """Names of the classes that the run began with; those of the client unless given."""
    brought: Mapping[str, Any] = field(default_factory=dict)
    """What the site brings for parts, by name."""
    set_ups: SetUps = field(init=False)
    """Shared by the clients of a process that have one net."""
    set_up: SetUp = field(init=False)
    """That for the classes of the last order."""

    def __post_init__(self, sibling: Client | None) -> None:
        """Build the method, the net, the stream of tasks, and the parts."""
        table = self.experiment.method
        self.method = make(table.name, **table.hyper_parameters())
        known = sibling.set_ups if sibling else SetUps(
            self.method, self.experiment, self.data.problem,
            self.classes or self.data.file.classes, self.device,
        )  # fmt: skip
        self.set_ups = known.of_net(self.experiment.net.number_of(self.client))
        data, validation = self.experiment.data, None
        if data is not None and data.validation_share is not None:
            validation = part_at("fedcli.data.store.validation:Validation").of(data)
        self.stream = TaskStream(
            self.data,
            self.device,
            keep_history=self.method.trains_on == "history",
            accumulates=self.experiment.accumulates,
            validation=validation,
        )
        self.parts: list[ClientPart] = [
            kind(self) for kind in halves_of(self.experiment, "client") if kind.is_for(self)
        ]
        self.take(rpc.Order())

    @property
    def run(self) -> RunFacts:
        """The facts of the run."""
        return self.set_up.run

    @property
    def net(self) -> SplitNet:
        """The net to work with."""
        return self.set_up.net

    def take(self, order: rpc.Order) -> None:
        """Work with the classes of an order: the first ones, and what became of them."""
        wanted = self.set_ups.of(order)
        if wanted is not self.__dict__.get("set_up"):
            self.set_up = wanted
            self.states.classes = wanted.run.problem.num_classes if wanted.run.began_with else None
            for part in self.parts:
                part.grown()

    def may_score(
        self, order: rpc.Order, ctx: ClientContext, payload: Bundle, state: Bundle, sets: TestSets
    ) -> bool:
        """Count a model that is to be scored, which ``ctx.net`` holds; False if it may not be.

        A site that counts allows so many models over all runs. ``state`` is the private state.
        """
        counted: CountsScores | None = self.brought.get("scores")
        if counted is None or not any(len(y) for _, y in sets.values()):
            return True
        from fedcli.runtime.released import beside_score  # few sites count
        from fedmodels.training.release import release_of_score

        release = release_of_score(ctx, payload, state, sets, beside_score(order))
        what = f"client {self.client}, round {order.round + 1}, {ctx.view or 'a model'}"
        return counted.takes(release.name(self.states.secret()), what, self.states.path)

    @cached_property
    def hides(self) -> bool:
        """Whether a part hides something of the client: the text of an error may tell of it."""
        return any(part.hides for part in self.parts)


@dataclass(kw_only=True)
class Training(ClientHalf):
    """A training that counts, and what parts add to it."""

    order: rpc.Order
    kept: Weights
    """What parts kept beside the private state before, by name with its prefix."""
    sections: dict[str, Tensor] = field(default_factory=dict)
    """What they keep after it."""
    figures: dict[str, float] = field(default_factory=dict)
    """What they tell beside the method's own metrics."""
    report: rpc.Report = field(default_factory=rpc.Report)
    """What goes back beside the upload, once the training is over."""
    data: ClientData
    upload: Bundle = field(default_factory=Bundle)
    """As the method made it, once the training is over."""

    @cached_property
    def made(self) -> str:
        """Return a digest of the upload: all that parts make of it follows from it, or is noise."""
        return state_digest([("upload", self.upload)])

    def beside(self) -> str:
        """Return what the training follows from beside what its half knows."""
        from fedcli.runtime.released import beside_training  # private runs alone ask

        return beside_training(self.order, self.data, self.kept)


@dataclass(frozen=True)
class Scored:
    """A model that was scored; ``ctx.net`` holds it, and ``ctx.view`` says which one it is."""

    order: rpc.Order
    ctx: ClientContext
    report: rpc.Report
    sets: TestSets
    logits: Mapping[str, Sequence[Tensor]]
    """The scores (n, K) of each test set in pieces, where a part reads them."""


class ClientPart:
    """One capability at a client; each function is a seam, and does nothing by default."""

    hides = False
    """Whether it hides something of the client."""
    reads_logits = False
    """Whether it needs single scores, beside counts."""
    for_evaluator = True
    """Whether the evaluator has it as well."""
    keeps_scores = False
    """Whether it looks at models at hand even where they are not scored, and tells nothing."""

    def __init__(self, client: Client) -> None:
        """Take the client; raise ConfigError where it cannot take part."""
        self.client = client

    @classmethod
    def is_for(cls, client: Client) -> bool:
        """Tell whether a client has this part of its run."""
        return cls.for_evaluator or client.client != EVALUATOR

    @classmethod
    def beside(cls, enrolment: Any) -> Callable[[], None] | None:
        """Return what a thread does every few seconds for the clients of a process; mostly nothing.

        ``enrolment`` is a :class:`~fedcli.runtime.enrolment.Enrolment`.
        """

    # --- between orders ---------------------------------------------------------------------------

    def woken(self) -> None:
        """Look at the client that is about to get an order."""

    def grown(self) -> None:
        """Look at the classes that ``client.set_up`` has from now on."""

    def loaded(self, state: Bundle, classes: int) -> Bundle:
        """Return a private state that was stored with so many classes, for those of now."""
        return state

    def follows(self, order: rpc.Order) -> None:
        """Look at an order, and at what it says of earlier ones."""

    def close(self) -> None:
        """Free what is open; it is opened again when it is needed."""

    # --- a training -------------------------------------------------------------------------------

    def begins(self, half: Training) -> None:
        """Look at a training that counts, before its first step; the net may be overwritten."""

    def tries(self, order: rpc.Order) -> None:
        """Look at a training for a score alone; raise PayloadError to refuse it."""

    def charges(self, half: Training) -> None:
        """Charge a training, before anything of it leaves; raise OrderDeclined to refuse."""

    def fails(self, half: Training) -> None:
        """Charge a training that failed, before the server is told: that it did tells something."""

    def leaves(self, half: Training, upload: Bundle) -> Bundle:
        """Return an upload as it leaves the client."""
        return upload

    def covers(self, half: Training, upload: Bundle) -> Iterable[tuple[str, str]]:
        """Return the keys of an upload, as it leaves, that this part hides, each with how."""
        return ()

    def saved(self, half: Training) -> None:
        """Look at a training whose private state is stored; the net holds its model."""

    # --- a model, a report, an order of its own ---------------------------------------------------

    def scored(self, at: Scored) -> None:
        """Look at a model that was scored."""

    def final(self, order: rpc.Order, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Look at the client's last model, which ``ctx.net`` holds as ``ctx.view``."""

    def reports(self, order: rpc.Order, report: rpc.Report) -> None:
        """Change what a report says."""

    def answer(self, order: rpc.Order) -> rpc.Report | None:
        """Answer an order of a kind that is this part's own."""
        return None
