"""A server that remembers past classes without data: an old model, and a memory made from it.

At the end of a task the server freezes the mean model, the *old model*, and makes a memory of its
classes from it alone: a generator, or images. Both go down with the next tasks' orders; clients
stay without a private state. Until there is a memory, everything is FedAvg.

    own.weights   old/…            the old model
                  memory/known     (K,) uint8, the classes it was trained on
                  memory/…         what the memory consists of beside generators
    own.generators                 the memory's generator
    own.histogram                  clients that trained on each class, up to now

A client gets the old model only where it differs from the model that the order brings. Payloads for
scores bring neither the old model nor the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.host.devices import device_of
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded
from fedmodels.techniques.continual import (
    ClassMasks,
    add_clients,
    beside_training,
    columns_of,
    mask_of,
    masks_spec,
)
from fedmodels.techniques.datafree import freeze
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.roles import part_of, under, without
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.pictures import Gallery, Picture
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings

OLD, MEMORY, KNOWN = "old", "memory", "memory/known"
RENEWED = "renewed"
"""The interaction at whose end the memory was made."""
SHOWN = 8
"""Remembered images in a picture."""
Draw = Callable[[], Tensor]
"""Returns the next batch of remembered inputs."""
Remember = Callable[[SplitNet, Tensor], tuple[Bundle, Metrics]]
"""Returns a memory of the classes (K,) bool of a frozen model, both on one device, and metrics."""


@dataclass(frozen=True)
class MemoryReferences:
    """References of a client's loss; without a memory only the first classes count."""

    current: Tensor
    """(c,) the classes that this client holds now, columns of the loss of real examples."""
    seen: Tensor
    """(s,) the columns that a grown head would have."""
    known: Tensor
    """(k,) the classes of the old model."""
    old: SplitNet | None = None
    draw: Draw | None = None


@dataclass(frozen=True, kw_only=True)
class ServerMemory(SharedSettings):
    """Where a memory is made."""

    server_device: Literal["cpu", "auto"] = "cpu"
    """Where the memory is made: on the coordinator's cores, or on its GPU where it has one."""

    def renewed(
        self, ctx: ServerContext, state: ServerState, remember: Remember
    ) -> tuple[ServerState, Metrics]:
        """Return the state with another old model and memory if the task ends, and metrics."""
        histogram = state.own.histogram
        assert histogram is not None, "with_classes comes first"
        if not ctx.ends_task or not histogram.total.any():
            return state, {}
        device = device_of(self.server_device)
        known = (histogram.total > 0).to(device)
        with seeded(ctx.seed("dropout")):  # initial weights of fresh nets
            memory, metrics = remember(freeze(ctx.run, state.common.weights, device), known)
        weights = {
            **under(OLD, state.common.weights),
            KNOWN: known.to("cpu", torch.uint8),
            **memory.weights,
        }
        scalars = {RENEWED: float(ctx.interaction)}
        own = Bundle(weights, {}, memory.generators, histogram, scalars)
        return replace(state, own=own), metrics


# --- the server half ------------------------------------------------------------------------------


def memory_for(ctx: ServerContext, state: ServerState) -> Mapping[ClientId, Bundle]:
    """Return what orders to train bring to each client: the memory, and the old model if needed."""
    own = state.own
    is_common = own.scalars.get(RENEWED) == ctx.interaction - 1
    weights = without(own.weights, OLD) if is_common else own.weights
    return beside_training(ctx, weights, own.generators, own)


def memory_spec(run: RunFacts, memory: Mapping[str, TensorSpec]) -> BundleSpec:
    """Return the spec of a client's part of a payload."""
    classes = run.problem.num_classes
    old = BundleSpec.of(Bundle(weights=under(OLD, run.forms))).required
    known = {f"weights/{KNOWN}": TensorSpec(torch.uint8, (classes,))}
    return masks_spec(classes) | BundleSpec(optional={**old, **known, **memory})


def with_classes(
    ctx: ServerContext, before: ServerState, after: ServerState, answered: Iterable[int]
) -> ServerState:
    """Return a state that remembers the classes of the clients that answered."""
    histogram = add_clients(ctx, before.own.histogram, answered)
    return replace(after, own=replace(before.own, histogram=histogram))


def check_loss(ctx: ServerContext, work: str, loss: float, rates: str) -> None:
    """Check the loss of what a server trains against the old model.

    The line tells to lower the method's own learning ``rates`` in that work.

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


# --- the client half ------------------------------------------------------------------------------


def net_of(common: Bundle) -> Weights:
    """Return the weights of a payload that belong into the net."""
    return without(common.weights, OLD, MEMORY)


def references(
    ctx: ClientContext, payload: Bundle, recalled: Callable[[ClientContext, Bundle], Draw | None]
) -> MemoryReferences:
    """Return the references of a client's loss."""
    assert payload.histogram is not None
    masks = ClassMasks.of(payload.histogram, ctx.device)
    own = mask_of(ctx.stream.train(ctx.task)[1], ctx.run.problem.num_classes)
    if KNOWN not in payload.weights:
        nothing = columns_of(torch.zeros_like(own))
        return MemoryReferences(columns_of(own), columns_of(masks.seen | own), nothing)
    known = payload.weights[KNOWN].to(ctx.device).bool()
    weights = part_of(payload.weights, OLD) or net_of(payload)
    old = freeze(ctx.run, weights, ctx.device)
    seen, draw = columns_of(masks.seen | own | known), recalled(ctx, payload)
    return MemoryReferences(columns_of(own), seen, columns_of(known), old, draw)


def sent_generator(payload: Bundle, key: str) -> dict[str, Tensor]:
    """Return the tensors of the generator that came with a memory; PayloadError if none came."""
    if key not in payload.generators:
        raise PayloadError(f"the memory came without its generator {key!r}")
    return dict(payload.generators[key].tensors)


def picture_of(
    ctx: ClientContext, payload: Bundle, recalled: Callable[[ClientContext, Bundle], Draw | None]
) -> dict[str, Picture]:
    """Return a picture of what a client was sent to remember, if anything."""
    draw = recalled(ctx, payload) if KNOWN in payload.weights else None
    if draw is None:
        return {}
    low, high = (edge.to(ctx.device).view(-1, 1, 1) for edge in ctx.stream.limits())
    images = ((draw()[:SHOWN] - low) / (high - low)).clamp(0, 1).cpu()
    return {"remembered": Gallery({"any": images})}
