"""The models that a client keeps: those that go live while it trains, and the last one of its run.

A model goes live if it classifies as many of the client's held-out examples correctly as the live
model does, less a tolerance. Both are scored on the same examples: those of the tasks that the
client has met by now. Both are scored as they are served: by the net's classifier.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import Examples, TaskStream
from fedcli.runtime.client_log import tell
from fedcli.runtime.deployed import AFTER, DIGEST, Deployed
from fedcli.runtime.state import PERSONAL, StateDirectory
from fedmodels.config.deploy import Deploy
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, FedtideError
from fedmodels.nets.split import SplitNet, whole
from fedmodels.nets.trained import ModelFacts, TrainedModel, header_of
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle, ClientId, state_digest
from fedmodels.training.method import Method
from fedmodels.training.private_state import local_view
from fedpb.v1 import coordinator_pb2 as rpc

BATCH = 256
"""Examples that are scored together."""
log = logging.getLogger(__name__)


@dataclass
class LastStored:
    """Everybody's model, where a client of this process has stored it last."""

    stored: tuple[Mapping[str, str], str] | None = None
    """What it is, and its digest."""
    file: Path = field(default_factory=Path)


@dataclass(frozen=True)
class FinalModel:
    """One client's last model, stored in its state directory.

    Where ``a_loc`` is scored after local training, it is the model that was scored last. Elsewhere
    it is the model after the last downlink.
    """

    client: ClientId
    data: ClientData
    states: StateDirectory
    experiment: Experiment
    method: Method
    last: LastStored

    def keep_scored(self, order: rpc.Order, net: SplitNet) -> None:
        """Keep a model that was scored after local training, if it may be the client's last one.

        Where all clients train in every round, only those of the last round may be.
        """
        if local_view(self.method) != "after_local" or not isinstance(self.client, int):
            return
        how = self.experiment.schedule
        per_task = how.order != "rounds_outer"
        last = how.rounds * (self.data.num_tasks if per_task else 1) - 1
        any_round = how.selects or how.is_asynchronous or how.open
        if any_round or order.round == last:
            model = self.described(net, "after_local", order.round)
            self.states.keep_scored(order.interaction, order.base, *model)

    def store(self, order: rpc.Order, net: SplitNet, view: str, *, shared: bool) -> None:
        """Store the model that was scored last; where none was kept, the net as this view has it.

        The order is the last one of the run. A net that is the same at all clients is one file.
        """
        if scored := self._scored(order.base):
            return self.states.save_personal(*scored)
        weights, facts = self.described(net, view, order.round)
        found = (facts, state_digest([("", weights)])) if shared else None
        same = found is not None and found == self.last.stored
        self.states.save_personal(weights, facts, self.last.file if same else None)
        self.last.stored, self.last.file = found, self.states.path / PERSONAL

    def _scored(self, interaction: int) -> tuple[Bundle, Mapping[str, str], Path] | None:
        """Return the model that was scored after an interaction, where it was kept."""
        try:
            return self.states.scored(interaction)
        except ArchiveError as error:
            log.warning("%s; the model after the downlink is stored instead", error)
            return None

    def described(self, net: SplitNet, view: str, round: int) -> tuple[Bundle, Mapping[str, str]]:
        """Return a net's weights, and the header of their file."""
        file, asked = self.data.file, self.experiment.net
        facts = ModelFacts(
            asked.name, asked.options(), file.input_shape, self.data.num_classes, file.scale,
            file.mean, file.std, self.data.class_names, self.method.name, view, round,
            self.method.rules[0], asked.code_sha256 or "", file.transform,
        )  # fmt: skip
        return Bundle(weights=whole(net)), header_of(facts)


@dataclass
class Deployment:
    """Offers one client's models to its folder of live models."""

    final: FinalModel
    """Describes models, and says of which client and run they are."""
    stream: TaskStream
    deployed: Deployed
    how: Deploy
    _offered: int | None = field(default=None, init=False)
    """The interaction after which the last offered model stood."""
    _says_held: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Clear what a crash left."""
        self.client, experiment = self.final.client, self.final.experiment
        self.visits_tasks = experiment.schedule.order == "rounds_outer"
        """Whether a round has an interaction for each task."""
        self.last_tasks = experiment.evaluate.last_tasks
        if self.deployed.folder.is_dir():
            self.deployed.clear_leftovers()

    @classmethod
    def of(cls, final: FinalModel, stream: TaskStream) -> Deployment | None:
        """Return the deployment that a run's config asks for; the evaluator has none."""
        how = final.experiment.deploy
        if how is None or not isinstance(final.client, int):
            return None
        return cls(final, stream, Deployed(final.states.path), how)

    def offer(self, order: rpc.Order, net: SplitNet, view: str) -> None:
        """Put the personal model in a net live, unless the guard refuses it.

        No fault of this ends a run. An untrained model is not offered, and one model is offered
        once.
        """
        after, round = order.interaction, order.round
        if order.kind == rpc.ORDER_KIND_TRAIN and view != "after_local":  # as it was received
            after -= 1
            round -= 0 if self.visits_tasks and order.task else 1
        if after < 0 or after == self._offered:
            return
        self._offered = after
        try:
            with seeded(0):  # a custom net may draw
                self._offer(order, net, view, round, after)
        except (FedtideError, OSError) as error:
            log.warning("client %s: its model does not go live: %s", self.client, error)

    def _offer(self, order: rpc.Order, net: SplitNet, view: str, round: int, after: int) -> None:
        held = self.deployed.status().held
        if held and not self._says_held:
            line = ": a roll-back holds its live model; fedcli rollback --release lets others live"
            tell("held", self.client, line, order)
        self._says_held = held
        if held:
            return
        weights, header = self.final.described(net, view, round)
        digest, before = state_digest([("", weights)]), self.deployed.digest()
        if digest == before:
            return
        is_better, why = self._judged(net, self._live(before), order)
        line = f"the model of round {round + 1}: {why}"
        if not is_better:
            if self.deployed.refuse(digest, f"refused {line}"):
                tell("refused", self.client, f" refuses {line}", order)
            return
        header = {**header, DIGEST: digest, AFTER: str(after)}
        if self.deployed.go_live(weights, header, before, f"live is {line}"):
            tell("deployed", self.client, f" serves {line}", order)

    def _live(self, digest: str) -> SplitNet | None:
        """Return the net of the live model, if it can be compared with another one."""
        if not digest or self.how.guard == "none":
            return None
        try:
            model = TrainedModel.load(self.deployed.current)
        except FedtideError as error:
            log.warning("client %s: its live model is replaced: %s", self.client, error)
            return None
        told, file = model.facts, self.final.data.file
        scales = (told.scale, *told.mean, *told.std), (file.scale, *file.mean, *file.std)
        is_alike = tuple(told.input_shape) == tuple(file.input_shape) and scales[0] == scales[1]
        return model.net.to(self.stream.device) if is_alike else None

    def _judged(self, net: SplitNet, live: SplitNet | None, order: rpc.Order) -> tuple[bool, str]:
        """Tell whether a net may go live in place of the live one, and why."""
        if self.how.guard == "none":
            return True, "nothing guards it"
        seen = self.final.data.num_tasks
        if order.tasks_seen and not (self.visits_tasks and order.round):
            seen = min(order.tasks_seen, seen)
        self.stream.meet(seen)
        first = max(0, seen - (self.last_tasks or seen))
        of_task = (self.stream.validation(t) or self.stream.test(t) for t in range(first, seen))
        sets, kept = [*of_task], "test" if self.stream.kept is None else "validation"
        count = sum(len(y) for _, y in sets)
        if not count:
            return True, f"there are no {kept} data to compare it on"
        right = rightly_named(net, sets)
        if right is None:
            return False, "its outputs are not finite"
        before = rightly_named(live, sets) if live is not None else None
        share = f"{right} of {count} {kept} examples are right"
        if before is None:
            return True, f"{share}, and no earlier model is comparable" if live else share
        return right >= before - self.how.tolerance * count, f"{share}, {before} by the live model"


@torch.no_grad()
def rightly_named(net: SplitNet, sets: list[Examples]) -> int | None:
    """Return how many examples a net classifies correctly; None if outputs are not finite."""
    net.eval()
    right = 0
    for x, y in sets:
        for xs, ys in zip(net.split(x, BATCH), net.split(y, BATCH), strict=True):
            logits: Tensor = net(xs)
            if not bool(torch.isfinite(logits).all()):
                return None
            right += int((logits.argmax(1) == ys).sum())
    return right
