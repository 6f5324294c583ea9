"""MFCL — Babakniya et al., A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated
Class Incremental Learning for Vision Tasks, NeurIPS 2023. https://arxiv.org/abs/2311.07784

    paper                    here                         paper          here
    F^{t-1}, W^{t-1}         own.weights old/…            L_CE (server)  confidence
    G                        own.generators["any"]        L_IE           balance
    x_com, real + synthetic  _joined                      L_BN           statistics_distance
    L_CE, L_FT, L_KD         loss                         L_noise        smoothness

After a task the server trains a generator against the frozen mean model alone; clients mix its
images into every batch of the tasks that follow.

Readings, where the paper has synchronous tasks of new classes and a growing head. "The model of the
previous task" is the mean after the last interaction of it, and so the last round's in a stream of
one round to a task. "New classes" are those the client holds now, though they may have been seen
before. L_FT runs over the classes anybody has held up to now, L_KD over those of the old model. The
first task is FedAvg over the whole head.

Deviations: the optimiser and its rates are the run's; the generator is sent with every order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, mse_loss, pad

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded
from fedmodels.techniques import server_memory
from fedmodels.techniques.continual import columns_of, cross_entropy_among
from fedmodels.techniques.datafree import LayerMoments, is_reported, watch_moments
from fedmodels.techniques.server_memory import Draw, MemoryReferences, ServerMemory
from fedmodels.tensors.bundle import Bundle, GeneratorState, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.roles import tensors_of
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.optimizer import Adam, descend
from fedmodels.training.pictures import Picture
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines.upsampling import Upsampling

ANY = "any"
"""The generator's key: it draws any class."""
SYNTHETIC = -1
"""Index of an example that was generated."""


@register("mfcl")
class MFCL(FedAvg):
    """Replay and distillation with a generator that the server trains without data."""

    citation: ClassVar[str] = "Babakniya et al., NeurIPS 2023"
    takes_targets: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    learns_at_task_end: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "memory"

    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights of the mean model: 1 / the number of participants, or n_k / n."""
    memory: ServerMemory = field(default_factory=ServerMemory)
    """Where the generator is trained."""
    w_ft: NonNegative = 1.0
    """Weight of the cross-entropy of the head alone, on real and generated examples."""
    w_kd: NonNegative = 0.1
    """Weight of the distance between old and new features, seen through the old head."""
    synthetic_batch: Count = 128
    """Generated examples in each batch; 0 goes without."""
    generator_steps: Count = 100
    """Steps of one training of the generator."""
    generator_batch: PositiveCount = 128
    """Images in one step."""
    generator_lr: NonNegative = 1e-3
    """Adam's learning rate; its moments begin afresh, the generator goes on."""
    t_c: Positive = 1e3
    """Temperature of L_CE; a high one makes its gradient small."""
    w_ie: NonNegative = 1.0
    """Weight of L_IE, which spreads images over the known classes."""
    w_bn: NonNegative = 50.0
    """Weight of L_BN."""
    w_noise: NonNegative = 1e-3
    """Weight of L_noise."""
    latent: PositiveCount = 1000
    """Coordinates of the generator's noise."""
    generator_width: PositiveCount = 64
    """Channels of the generator's last layers."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        self.memory_spec(run)  # inputs that are no images show here, not after the first round
        return super().init_server(run)

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, server_memory.memory_for(ctx, state)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        own = server_memory.memory_spec(run, self.memory_spec(run))
        return super().payload_spec(run)[0], own

    def memory_spec(self, run: RunFacts) -> Mapping[str, TensorSpec]:
        """Return what a memory consists of, by its keys in a payload."""
        with seeded(0):
            forms = {ANY: GeneratorState(0, tensors_of(self._generator(run)))}
        return BundleSpec.of(Bundle(generators=forms)).required

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads)
        return server_memory.with_classes(ctx, state, mean, uploads)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        return self.memory.renewed(ctx, state, partial(self.remember, ctx, state.own))

    def remember(
        self, ctx: ServerContext, before: Bundle, old: SplitNet, known: Tensor
    ) -> tuple[Bundle, Metrics]:
        """Return G after training against the old model, and metrics."""
        generator, held = self._generator(ctx.run), before.generators.get(ANY)
        if held is not None:
            generator.load_state_dict(dict(held.tensors))
        generator.to(known.device).train()
        adam = Adam(generator.parameters(), lr=self.generator_lr, fused=True)
        draw, loss, classes = ctx.generator(), 0.0, columns_of(known)
        with watch_moments(old) as watch:
            for step in range(1, self.generator_steps + 1):
                z = torch.randn(self.generator_batch, self.latent, generator=draw)
                x = generator(z.to(known.device))
                logits = old(x)[:, classes]
                loss = float(descend(self._generator_loss(x, logits, watch.layers()), adam))
                server_memory.check_loss(ctx, "the generator", loss, "method.generator_lr")
                if is_reported(step, self.generator_steps):
                    ctx.tell("generator", step, self.generator_steps, loss)
        version = held.version + 1 if held else 1
        memory = Bundle(generators={ANY: GeneratorState(version, tensors_of(generator))})
        ctx.series["generator_loss"] = [loss]
        spread = 1 - float(balance(logits.detach())) if self.generator_steps else 0.0
        return memory, {"generator_spread": spread}

    def _generator_loss(self, x: Tensor, logits: Tensor, layers: Sequence[LayerMoments]) -> Tensor:
        loss = confidence(logits, self.t_c) + self.w_ie * balance(logits)
        loss = loss + self.w_bn * statistics_distance(layers).to(x.device)
        return loss + self.w_noise * smoothness(x)

    def _generator(self, run: RunFacts) -> Upsampling:
        return Upsampling(run.problem.input_shape, self.latent, self.generator_width)

    # --- client half ---------------------------------------------------------------------------

    def global_weights(self, common: Bundle) -> Weights:
        return server_memory.net_of(common)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> MemoryReferences:
        return server_memory.references(ctx, payload, self.recalled)

    def recalled(self, ctx: ClientContext, payload: Bundle) -> Draw | None:
        """Return the source of generated inputs for the batches of one local training."""
        if not self.synthetic_batch:
            return None
        with seeded(0):
            generator = self._generator(ctx.run)
        generator.load_state_dict(server_memory.sent_generator(payload, ANY))
        generator.to(ctx.device).eval()
        noise = ctx.generator()

        @torch.no_grad()
        def draw() -> Tensor:
            z = torch.randn(self.synthetic_batch, self.latent, generator=noise)
            images: Tensor = generator(to_device(z, ctx.device))
            return images

        return draw

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        """Return images of the memory that the server sent."""
        return server_memory.picture_of(ctx, payload, self.recalled)

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: MemoryReferences) -> float:
        joined = None if refs.draw is None else lambda batch: self._joined(batch, refs)
        return EpochLoop(self, ctx, x, y, refs, joined=joined).run()

    def _joined(self, batch: Batch, refs: MemoryReferences) -> Batch:
        """Return x_com: a batch and generated examples, whose labels the old model says."""
        assert refs.draw is not None
        assert refs.old is not None
        x = refs.draw()
        with torch.no_grad():
            y = refs.known[refs.old(x)[:, refs.known].argmax(1)]
        index = torch.full_like(y, SYNTHETIC)
        pairs = [(batch.x, x), (batch.y, y), (batch.index, index)]
        if batch.drawn is not None:
            pairs.append((batch.drawn, torch.full((len(y),), SYNTHETIC)))
        return Batch(*(torch.cat(pair) for pair in pairs))

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: MemoryReferences) -> Tensor:
        if refs.old is None:
            return super().loss(ctx, batch, out, refs)
        generated = 0 if refs.draw is None else self.synthetic_batch
        real = slice(len(batch.y) - generated)  # generated examples come last
        new = cross_entropy_among(out.logits[real], batch.y[real], refs.current)  # L_CE
        head = ctx.net.head(out.features.detach())
        both = cross_entropy_among(head, batch.y, refs.seen)  # L_FT
        with torch.no_grad():
            before = refs.old(batch.x)
        through = refs.old.head(out.features) - before
        kept = through[:, refs.known].square().mean()  # L_KD
        total: Tensor = new + self.w_ft * both + self.w_kd * kept
        return total


EPSILON = 1e-5


def confidence(logits: Tensor, t_c: float) -> Tensor:
    """Return L_CE: the cross-entropy of logits (B, K) over T_c with their own likeliest class."""
    return cross_entropy(logits / t_c, logits.argmax(1))


def balance(logits: Tensor) -> Tensor:
    """Return L_IE: 1 minus the mean prediction's entropy over log K; 0 if classes are even."""
    if logits.shape[1] == 1:
        return logits.sum() * 0.0
    mean = logits.softmax(1).mean(0)
    return 1 + (mean * mean.clamp_min(1e-12).log()).sum() / math.log(logits.shape[1])


def statistics_distance(layers: Sequence[LayerMoments]) -> Tensor:
    """Return L_BN: KL(N(mu, sigma²) || N(batch)), mean over channels and then over layers."""
    if not layers:
        return torch.zeros(())
    found = []
    for each in layers:
        batch, kept = each.var + EPSILON, each.running_var + EPSILON
        apart = kept + (each.running_mean - each.mean).square()
        found.append((0.5 * (batch / kept).log() - 0.5 * (1 - apart / batch)).mean())
    return torch.stack(found).mean()


def smoothness(images: Tensor) -> Tensor:
    """Return L_noise: the mean square between images (B, C, H, W) and their 5x5 Gaussian blur."""
    bell = torch.exp(-0.5 * torch.arange(-2.0, 3.0, device=images.device).square())
    bell = bell / bell.sum()
    channels = images.shape[1]
    kernel = (bell[:, None] * bell).expand(channels, 1, 5, 5)
    return mse_loss(images, conv2d(pad(images, (2, 2, 2, 2), "replicate"), kernel, groups=channels))
