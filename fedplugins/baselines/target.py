"""TARGET — Zhang et al., TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation,
ICCV 2023. https://arxiv.org/abs/2303.06937

    paper                      here                     paper        here
    old model, theta_{k-1}     own.weights old/…        L_BN         statistics_distance
    G, z                       generator, z             L_CE         ``oh`` cross_entropy
    synthetic data             own.weights memory/…     L_KL         disagreement
    student                    student                  lambda       kd

After a task the server synthesises images that the frozen mean model takes for its classes and an
untrained student does not yet; clients distil the old model on them while they learn the next task.

Readings, where the paper has synchronous tasks of new classes and a growing head. "The model of the
previous task" is the mean after the last interaction of it, and so the last round's in a stream of
one round to a task. The slice of new classes is that of the classes the client holds now, though
they may have been seen before; the slice of old ones is that of the old model's, whether they have
come back or not. The first task is FedAvg over the whole head. The synthesis itself is
:mod:`fedplugins.baselines.synthesis`.

Deviations: docs/methods/target.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import NonNegative, Positive, PositiveCount
from fedmodels.errors import PayloadError
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet
from fedmodels.techniques import server_memory
from fedmodels.techniques.continual import cross_entropy_among
from fedmodels.techniques.datafree import as_inputs, shuffle, watch_moments
from fedmodels.techniques.server_memory import MEMORY, Draw, MemoryReferences, ServerMemory
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.augmentation import augment
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.pictures import Picture
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines.synthesis import Synthesis, Synthesised, distillation

IMAGES = f"{MEMORY}/images"


@register("target")
class TARGET(FedAvg):
    """Distillation on images that the server synthesises from the old model."""

    citation: ClassVar[str] = "Zhang et al., ICCV 2023"
    takes_targets: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    learns_at_task_end: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "memory"

    kd: NonNegative = 25.0
    """Weight of the distillation on clients."""
    kd_temperature: Positive = 2.0
    """Temperature of the distillation."""
    num_images: PositiveCount = 8000
    """Images a client distils on at most."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights of the mean model: 1 / the number of participants, or n_k / n."""
    synthesis: Synthesised = field(default_factory=Synthesised)
    """How images are made."""
    memory: ServerMemory = field(default_factory=ServerMemory)
    """Where images are made."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        run.make_net().check_batches(
            synthesis_batch=self.synthesis.synthesis_batch, num_images=self.num_images
        )
        self.synthesis.fresh_generator(run)  # inputs that are no images show here, not later
        return super().init_server(run)

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, server_memory.memory_for(ctx, state)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        images = TensorSpec(torch.uint8, (None, *run.problem.input_shape), self.num_images)
        own = server_memory.memory_spec(run, {f"weights/{IMAGES}": images})
        return super().payload_spec(run)[0], own

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads)
        return server_memory.with_classes(ctx, state, mean, uploads)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        return self.memory.renewed(ctx, state, partial(self.remember, ctx))

    def remember(self, ctx: ServerContext, old: SplitNet, known: Tensor) -> tuple[Bundle, Metrics]:
        """Return synthetic images of the old model's classes, and metrics."""
        with watch_moments(old) as watch:
            made = Synthesis(self.synthesis, ctx, old, known, watch)
            for number in range(self.synthesis.batches):
                loss = made.add(number)
                ctx.tell("synthesis", number + 1, self.synthesis.batches, loss)
        ctx.series["synthesis_loss"] = made.losses
        metrics = {"synthesis_accuracy": made.accuracy()}
        pool = torch.cat(made.pool)
        index = torch.randperm(len(pool), generator=made.draw)[: self.num_images]
        return Bundle({IMAGES: pool[index].cpu()}), metrics

    # --- client half ---------------------------------------------------------------------------

    def global_weights(self, common: Bundle) -> Weights:
        return server_memory.net_of(common)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> MemoryReferences:
        return server_memory.references(ctx, payload, self.recalled)

    def recalled(self, ctx: ClientContext, payload: Bundle) -> Draw | None:
        """Return the source of synthetic inputs for the batches of one local training."""
        if IMAGES not in payload.weights:
            raise PayloadError(f"the memory came without {IMAGES!r}")
        images = payload.weights[IMAGES].to(ctx.device)  # (n, C, H, W), uint8
        if not len(images):
            return None
        training, draw = ctx.run.experiment.training, ctx.generator()
        order = shuffle(len(images), training.batch_size, draw)
        low, high = (edge.to(ctx.device) for edge in ctx.stream.limits())

        def batch() -> Tensor:
            x = as_inputs(images[to_device(next(order), ctx.device)], (low, high))
            return augment(x, training, draw)

        return batch

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        """Return images of the memory that the server sent."""
        return server_memory.picture_of(ctx, payload, self.recalled)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: MemoryReferences) -> Tensor:
        if refs.old is None or refs.draw is None:
            return super().loss(ctx, batch, out, refs)
        new = cross_entropy_among(out.logits, batch.y, refs.current)
        x = refs.draw()
        with torch.no_grad():
            teacher = refs.old(x)[:, refs.known]
        student = ctx.net(x)[:, refs.known]
        return new + self.kd * distillation(teacher, student, self.kd_temperature)
