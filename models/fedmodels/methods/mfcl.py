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
one round to a task (``renew``). "New classes" are those the client holds now, though they may have
been seen before (``current``). L_FT runs over the classes anybody has held up to now, L_KD over
those of the old model. The first task is FedAvg over the whole head.

Deviations: the optimiser and its rates are the run's; the generator is sent with every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, mse_loss, pad

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount
from fedmodels.methods import register
from fedmodels.methods.bases.remembering import (
    Remembering,
    RememberingReferences,
    check_loss,
    sent_generator,
)
from fedmodels.nets.generative.upsampling import Upsampling
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded
from fedmodels.techniques.continual import masked_cross_entropy
from fedmodels.techniques.datafree import LayerMoments, descend, is_reported, watched
from fedmodels.tensors.bundle import Bundle, GeneratorState
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.roles import tensors_of
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext
from fedmodels.training.loop import run_phases
from fedmodels.training.method import Batch, Output
from fedmodels.training.run import RunFacts

ANY = "any"
"""The generator's key: it draws any class."""
SYNTHETIC = -1
"""Index of an example that was generated."""
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


@register("mfcl")
@dataclass(frozen=True, kw_only=True)
class MFCL(Remembering):
    """Replay and distillation with a generator that the server trains without data."""

    citation: ClassVar[str] = "Babakniya et al., NeurIPS 2023"

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

    def remember(
        self, ctx: ServerContext, before: Bundle, old: SplitNet, known: Tensor
    ) -> tuple[Bundle, Metrics]:
        generator, held = self._generator(ctx.run), before.generators.get(ANY)
        if held is not None:
            generator.load_state_dict(dict(held.tensors))
        generator.to(known.device).train()
        adam = torch.optim.Adam(generator.parameters(), lr=self.generator_lr)
        draw, loss = ctx.generator(), 0.0
        with watched(old) as watch:
            for step in range(1, self.generator_steps + 1):
                z = torch.randn(self.generator_batch, self.latent, generator=draw)
                x = generator(z.to(known.device))
                logits = old(x)[:, known]
                loss = descend(self._generator_loss(x, logits, watch.layers()), adam)
                check_loss(ctx, "the generator", loss, "method.generator_lr")
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

    def memory_spec(self, run: RunFacts) -> Mapping[str, TensorSpec]:
        with seeded(0):
            forms = {ANY: GeneratorState(0, tensors_of(self._generator(run)))}
        return BundleSpec.of(Bundle(generators=forms)).required

    # --- client half ---------------------------------------------------------------------------

    def recalled(self, ctx: ClientContext, payload: Bundle) -> Callable[[], Tensor] | None:
        if not self.synthetic_batch:
            return None
        with seeded(0):
            generator = self._generator(ctx.run)
        generator.load_state_dict(sent_generator(payload, ANY))
        generator.to(ctx.device).eval()
        noise = ctx.generator()

        @torch.no_grad()
        def draw() -> Tensor:
            z = torch.randn(self.synthetic_batch, self.latent, generator=noise)
            images: Tensor = generator(z.to(ctx.device))
            return images

        return draw

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: RememberingReferences) -> float:
        joined = None if refs.draw is None else lambda batch: self._joined(batch, refs)
        return run_phases(self, ctx, x, y, refs, joined=joined)

    def _joined(self, batch: Batch, refs: RememberingReferences) -> Batch:
        """Return x_com: a batch and generated examples, whose labels the old model says."""
        assert refs.draw is not None
        assert refs.old is not None
        x = refs.draw()
        with torch.no_grad():
            y = refs.known.nonzero().flatten()[refs.old(x)[:, refs.known].argmax(1)]
        index = torch.full_like(y, SYNTHETIC)
        return Batch(*(torch.cat(p) for p in ((batch.x, x), (batch.y, y), (batch.index, index))))

    def loss(
        self, ctx: ClientContext, batch: Batch, out: Output, refs: RememberingReferences
    ) -> Tensor:
        if refs.old is None:
            return super().loss(ctx, batch, out, refs)
        real = batch.index != SYNTHETIC
        new = masked_cross_entropy(out.logits[real], batch.y[real], refs.current)  # L_CE
        head = ctx.net.head(out.features.detach())
        both = masked_cross_entropy(head, batch.y, refs.seen)  # L_FT
        with torch.no_grad():
            before = refs.old(batch.x)
        through = refs.old.head(out.features) - before
        kept = through[:, refs.known].square().mean()  # L_KD
        total: Tensor = new + self.w_ft * both + self.w_kd * kept
        return total
