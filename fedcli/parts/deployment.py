"""The models that a client keeps live while it trains.

A model goes live if it classifies as many of the client's held-out examples correctly as the live
model does, less a tolerance; of targets, if its loss is no larger than the live model's, but for
the tolerance as a part of it. Both are scored on the same examples: those of the tasks that the
client has met by now. Both are scored as they are served: by the net's classifier.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcli.data.store.stream import Examples
from fedcli.parts.kept_models import described
from fedcli.runtime.client_part import Client, ClientPart, Scored, Training
from fedcli.runtime.deployed import AFTER, DIGEST, STAGE, Deployed
from fedcli.runtime.reporting import tell
from fedmodels.errors import FedtideError
from fedmodels.nets.split import SplitNet
from fedmodels.nets.trained import TrainedModel
from fedmodels.numerics.metrics import as_one
from fedmodels.numerics.randomness import seeded
from fedmodels.problems.targets import Targets, targets_in
from fedmodels.tensors.bundle import Bundle, state_digest
from fedmodels.training.asked import local_view
from fedmodels.training.contexts import ClientContext
from fedpb.v1 import coordinator_pb2 as rpc

BATCH = 256
"""Examples that are scored together."""
UNSOUND = "its outputs are not finite"
log = logging.getLogger(__name__)


class Deployment(ClientPart):
    """Offers one client's models to its folder of live models."""

    for_evaluator = False
    keeps_scores = True

    def __init__(self, client: Client) -> None:
        """Clear what a crash left."""
        super().__init__(client)
        experiment = client.experiment
        assert experiment.deploy is not None, "the config asks for it"
        self.how, self.deployed = experiment.deploy, Deployed(client.states.path)
        self.visits_tasks = experiment.schedule.order == "rounds_outer"
        """Whether a round has an interaction for each task."""
        self.last_tasks = experiment.evaluate.last_tasks
        self._offered: int | None = None
        """The interaction after which the last offered model stood."""
        self._refused: rpc.RefusedModel | None = None
        """What the report on the present order tells of a refusal."""
        privacy = experiment.privacy
        counts = (
            "scores" in client.brought
        )  # a refusal tells the score of a model that nobody counts
        self._tells_server = not counts and (privacy is None or "scores" in privacy.allow)
        self._says_held = False
        if self.deployed.folder.is_dir():
            self.deployed.clear_leftovers()

    def begins(self, half: Training) -> None:
        """Offer the model that a client holds before it trains, where that is its own model."""
        self._refused = None
        method, ctx, view = self.client.method, half.ctx, local_view(self.client.method)
        if view != "after_local":
            ctx.view = view
            method.load(ctx, half.payload, half.state if view == "after_downlink" else Bundle())
            self.offer(half.order, ctx.net, view)
            ctx.view = ""

    def saved(self, half: Training) -> None:
        """Offer the model right after training, where that is the client's own model."""
        if local_view(self.client.method) == "after_local":
            self.offer(half.order, half.ctx.net, "after_local")
            self.reports(half.order, half.report)

    def scored(self, at: Scored) -> None:
        """Offer a model that was received and scored."""
        if at.ctx.view == local_view(self.client.method) != "after_local":
            self.offer(at.order, at.ctx.net, at.ctx.view)
            self.reports(at.order, at.report)

    def final(self, order: rpc.Order, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Offer the last model of the run."""
        if ctx.view == local_view(self.client.method):
            self.offer(order, ctx.net, ctx.view)

    def reports(self, order: rpc.Order, report: rpc.Report) -> None:
        """Tell the server of a refusal, once."""
        if self._refused is not None:
            report.refused_model.CopyFrom(self._refused)
        self._refused = None

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
            log.warning("client %s: its model is not deployed: %s", self.client.client, error)

    def _offer(self, order: rpc.Order, net: SplitNet, view: str, round: int, after: int) -> None:
        held = self.deployed.status().held
        if held and not self._says_held:
            line = ": a roll-back holds its live model; fedcli rollback --release lets others live"
            tell("held", self.client.client, line, order)
        self._says_held = held
        if held:
            return
        weights, header = described(self.client, net, view, round)
        digest, before = state_digest([("", weights)]), self.deployed.digest()
        if digest == before:
            return
        found = self._judged(net, self._live(before), order)
        line = f"the model of round {round + 1}: {found.why}"
        if not found.may_live:
            if self._tells_server:
                self._refused = found.told(round)
            if self.deployed.refuse(digest, f"refused {line}"):
                tell("refused", self.client.client, f" refuses {line}", order)
            return
        task = order.tasks_seen or order.task + 1
        header = {**header, DIGEST: digest, AFTER: str(after), STAGE: str(task)}
        room = self.how.keep_mb << 20
        if self.deployed.go_live(weights, header, before, f"live is {line}", room):
            tell("deployed", self.client.client, f" serves {line}", order)

    def _live(self, digest: str) -> SplitNet | None:
        """Return the net of the live model, if it can be compared with another one."""
        if not digest or self.how.guard == "none":
            return None
        try:
            model = TrainedModel.load(self.deployed.current)
        except FedtideError as error:
            log.warning("client %s: its live model is replaced: %s", self.client.client, error)
            return None
        told, file = model.facts, self.client.data.file
        scales = (told.scale, *told.mean, *told.std), (file.scale, *file.mean, *file.std)
        is_alike = tuple(told.input_shape) == tuple(file.input_shape) and scales[0] == scales[1]
        is_alike = is_alike and model.targets == targets_in(file.transform, "the client's data")
        return model.net.to(self.client.stream.device) if is_alike else None

    def _judged(self, net: SplitNet, live: SplitNet | None, order: rpc.Order) -> Judged:
        """Tell whether a net may go live in place of the live one, and why."""
        if self.how.guard == "none":
            return Judged(True, "nothing guards it")
        seen = self.client.data.num_tasks
        if order.tasks_seen and not (self.visits_tasks and order.round):
            seen = min(order.tasks_seen, seen)
        stream = self.client.stream
        stream.meet(seen)
        first = max(0, seen - (self.last_tasks or seen))
        kept, of = (
            ("test", stream.test) if stream.kept is None else ("validation", stream.validation)
        )
        sets = [found for t in stream.counted(first, seen) if (found := of(t)) is not None]
        count, merged = sum(len(y) for _, y in sets), self.client.run.merged
        if not count:
            return Judged(True, f"there are no {kept} data to compare it on")
        if (targets := self.client.run.targets) is not None:
            nets = (net, *([live] if live is not None else []))
            losses = [loss_of(one, sets, targets) for one in nets]
            return self._judged_by_loss(losses, f"on {count} {kept} examples")
        right = rightly_named(net, sets, merged)
        if right is None:
            return Judged(False, UNSOUND)
        before = rightly_named(live, sets, merged) if live is not None else None
        share = f"{right} of {count} {kept} examples are right"
        if before is None:
            return Judged(True, f"{share}, and no earlier model is comparable" if live else share)
        may_live = right >= before - self.how.tolerance * count
        why = f"{share}, {before} by the live model"
        return Judged(may_live, why, right / count, before / count)

    def _judged_by_loss(self, losses: Sequence[float], where: str) -> Judged:
        """Tell of targets, by the loss of a net, and that of the live one if there is one."""
        loss, *live = losses
        if not math.isfinite(loss):
            return Judged(False, UNSOUND)
        why = f"its loss {where} is {loss:.4g}" + "".join(
            f", {v:.4g} by the live model" for v in live
        )
        return Judged(not live or not loss > live[0] * (1 + self.how.tolerance), why)


@dataclass(frozen=True)
class Judged:
    """Whether a model may go live, why, and the accuracies that say so."""

    may_live: bool
    why: str
    accuracy: float | None = None
    live: float | None = None
    """That of the live model."""

    def told(self, round_of: int) -> rpc.RefusedModel:
        """Return what leaves the client where the model is refused; figures to a thousandth."""
        figures = {"accuracy": self.accuracy, "live": self.live}
        known = {name: round(value, 3) for name, value in figures.items() if value is not None}
        return rpc.RefusedModel(round=round_of, **known)


@torch.no_grad()
def loss_of(net: SplitNet, sets: list[Examples], targets: Targets) -> float:
    """Return the mean loss of a net on examples, which have targets as they are learned."""
    net.eval()
    parts = [
        targets.losses(net(xs).double(), ys.double())
        for x, y in sets
        for xs, ys in zip(net.split(x, BATCH), net.split(y, BATCH), strict=True)
    ]
    return float(torch.cat(parts).mean())


@torch.no_grad()
def rightly_named(
    net: SplitNet, sets: list[Examples], merged: Sequence[tuple[int, int]] = ()
) -> int | None:
    """Return how many examples a net classifies correctly; None if outputs are not finite.

    ``merged`` has labels of classes that became part of others, each with that of the other.
    """
    net.eval()
    right = 0
    for x, y in sets:
        for xs, ys in zip(net.split(x, BATCH), net.split(y, BATCH), strict=True):
            logits: Tensor = net(xs)
            if not bool(torch.isfinite(logits).all()):
                return None
            right += int((as_one(logits, merged).argmax(1) == ys).sum())
    return right
