"""What the methods share whose server remembers past classes without data: FedAvg, and a memory.

At the end of a task the server freezes the mean model, the *old model*, and makes a memory of its
classes from it alone: a generator, or images. Both go down with the next tasks' orders; clients
stay without a private state. Until there is a memory, everything is FedAvg.

    own.weights   old/…            the old model
                  memory/known     (K,) uint8, the classes it was trained on
                  memory/…         what the memory consists of beside generators
    own.generators                 the memory's generator
    own.histogram                  clients that trained on each class, up to now

A client gets the old model only where it differs from the model that the order brings. Evaluation
orders bring neither the old model nor the memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.methods.bases.accompanied import Accompanied
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import derive_seed, seeded
from fedmodels.techniques.continual import ClassMasks, announced, mask_of, masks_spec, remembered
from fedmodels.techniques.datafree import frozen
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.roles import part_of, under, without
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.pictures import Gallery, Picture
from fedmodels.training.run import RunFacts

OLD, MEMORY, KNOWN = "old", "memory", "memory/known"
RENEWED = "renewed"
"""The interaction at whose end the memory was made."""
SHOWN = 8
"""Remembered images in a picture."""


def sent_generator(payload: Bundle, key: str) -> dict[str, Tensor]:
    """Return the tensors of the generator that came with a memory.

    Raises:
        PayloadError: none came.
    """
    if key not in payload.generators:
        raise PayloadError(f"the memory came without its generator {key!r}")
    return dict(payload.generators[key].tensors)


def check_loss(ctx: ServerContext, work: str, loss: float, rates: str) -> None:
    """Check the loss of what a server trains against the old model.

    Args:
        ctx: where in the run.
        work: what is trained or made.
        loss: of it.
        rates: the method's own learning rates in that work.

    Raises:
        PayloadError: it is not finite. The engine then looks for a client whose upload is behind
            it; where all are, their lines are the same one.
    """
    if not math.isfinite(loss):
        raise PayloadError(
            f"{work} diverged after round {ctx.round + 1}: its loss is not finite, as where logits "
            "of the mean model overflow; what usually helps is a lower [training] lr (it is "
            f"{ctx.run.experiment.training.lr:g}), a net that normalises, such as [net] norm = "
            f'"layer", or lower {rates}'
        )


@dataclass(frozen=True)
class RememberingReferences:
    """References of a client's loss; without a memory only the first mask counts."""

    current: Tensor
    """(K,) bool: the columns of the loss of real examples."""
    seen: Tensor
    """(K,) bool: the columns that a grown head would have."""
    known: Tensor
    """(K,) bool: the classes of the old model."""
    old: SplitNet | None = None
    draw: Callable[[], Tensor] | None = None
    """Returns the next batch of remembered inputs."""


@dataclass(frozen=True, kw_only=True)
class Remembering(Accompanied):
    """FedAvg whose server makes a memory of past classes; its switches are those of both."""

    trains_together: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = (OLD, MEMORY)

    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights of the mean model: 1 / the number of participants, or n_k / n."""
    current: Literal["client", "anybody"] = "client"
    """The classes of the task at hand: those this client holds now, or those that anybody does."""
    renew: Literal["task", "round"] = "task"
    """Freeze the old model and make its memory when a task ends, or after every interaction."""
    server_device: Literal["cpu", "auto"] = "cpu"
    """Where the memory is made: on the coordinator's cores, or on its GPU where it has one."""

    @abstractmethod
    def remember(
        self, ctx: ServerContext, before: Bundle, old: SplitNet, known: Tensor
    ) -> tuple[Bundle, Metrics]:
        """Return a memory of the classes ``known`` (K,) of a frozen model, and metrics.

        Args:
            ctx: where in the run.
            before: the server's own state, with the memory it had.
            old: the frozen model, on the device to work on.
            known: (K,) bool, on that device.
        """

    @abstractmethod
    def memory_spec(self, run: RunFacts) -> Mapping[str, TensorSpec]:
        """Return what a memory may consist of, by its keys in a payload."""

    @abstractmethod
    def recalled(self, ctx: ClientContext, payload: Bundle) -> Callable[[], Tensor] | None:
        """Return the source of remembered inputs for the batches of one local training."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        self.memory_spec(run)  # inputs that are no images show here, not after the first round
        return super().init_server(run)

    def beside(self, ctx: ServerContext, state: ServerState) -> Bundle:
        own = state.own
        is_common = own.scalars.get(RENEWED) == ctx.interaction - 1
        return Bundle(
            without(own.weights, OLD) if is_common else own.weights,
            generators=own.generators,
            histogram=announced(ctx, own.histogram),
        )

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        classes = run.problem.num_classes
        old = BundleSpec.of(Bundle(weights=under(OLD, run.forms))).required
        known = {f"weights/{KNOWN}": TensorSpec(torch.uint8, (classes,))}
        optional = BundleSpec(optional={**old, **known, **self.memory_spec(run)})
        return super().payload_spec(run)[0], masks_spec(classes) | optional

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        histogram = remembered(ctx, state.own.histogram, uploads)
        mean = super().aggregate(ctx, state, uploads)
        return replace(mean, own=replace(state.own, histogram=histogram))

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        histogram = state.own.histogram
        assert histogram is not None, "aggregate comes first"
        is_due = ctx.ends_task or self.renew == "round"
        if not is_due or not histogram.total.any():
            return state, {}
        on_gpu = self.server_device == "auto" and torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        known = (histogram.total > 0).to(device)
        seed = derive_seed(ctx.run.experiment.seed, "server", ctx.interaction, "dropout")
        with seeded(seed):  # initial weights of fresh nets
            old = frozen(ctx.run, state.common.weights, device)
            memory, metrics = self.remember(ctx, state.own, old, known)
        weights = {
            **under(OLD, state.common.weights),
            KNOWN: known.to("cpu", torch.uint8),
            **memory.weights,
        }
        scalars = {RENEWED: float(ctx.interaction)}
        own = Bundle(weights, {}, memory.generators, histogram, scalars)
        return replace(state, own=own), metrics

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        return False

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> RememberingReferences:
        assert payload.histogram is not None
        masks = ClassMasks.of(payload.histogram, ctx.device)
        own = mask_of(ctx.stream.train(ctx.task)[1], ctx.run.problem.num_classes)
        current = own if self.current == "client" else own | masks.now
        if KNOWN not in payload.weights:
            return RememberingReferences(current, masks.seen | own, torch.zeros_like(own))
        known = payload.weights[KNOWN].to(ctx.device).bool()
        weights = part_of(payload.weights, OLD) or without(payload.weights, *self.roles)
        old = frozen(ctx.run, weights, ctx.device)
        return RememberingReferences(
            current, masks.seen | own | known, known, old, self.recalled(ctx, payload)
        )

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        draw = self.recalled(ctx, payload) if KNOWN in payload.weights else None
        if draw is None:
            return {}
        low, high = (edge.to(ctx.device).view(-1, 1, 1) for edge in ctx.stream.limits())
        images = ((draw()[:SHOWN] - low) / (high - low)).clamp(0, 1).cpu()
        return {"remembered": Gallery({"any": images})}
