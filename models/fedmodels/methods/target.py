"""TARGET — Zhang et al., TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation,
ICCV 2023. https://arxiv.org/abs/2303.06937

    paper                      here                     paper        here
    old model, theta_{k-1}     own.weights old/…        L_BN         statistics_distance
    G, z                       generator, z             L_CE         ``oh`` cross_entropy
    synthetic data             own.weights memory/…     L_KL         disagreement
    student                    student                  lambda       kd

After a task the server synthesises images that the frozen mean model takes for its classes and an
untrained student does not yet; clients distil the old model on them while they learn the next task.
Images are made batch by batch: noise and a copy of the generator are optimised for the batch, and
the generator follows the copy's last gradient (first-order MAML).

Readings, where the paper has synchronous tasks of new classes and a growing head. "The model of the
previous task" is the mean after the last interaction of it, and so the last round's in a stream of
one round to a task (``renew``). The slice of new classes is that of the classes the client holds
now, though they may have been seen before (``current``); the slice of old ones is that of the old
model's, whether they have come back or not. The first task is FedAvg over the whole head.

Deviations: docs/methods/target.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount, Share
from fedmodels.errors import PayloadError
from fedmodels.methods import register
from fedmodels.methods.bases.remembering import (
    MEMORY,
    Remembering,
    RememberingReferences,
    check_loss,
    sent_generator,
)
from fedmodels.nets.generative.upsampling import Upsampling
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded
from fedmodels.techniques.continual import masked_cross_entropy
from fedmodels.techniques.datafree import (
    LayerMoments,
    Watch,
    as_inputs,
    descend,
    follow,
    quantised,
    shuffled,
    watched,
)
from fedmodels.tensors.bundle import Bundle, GeneratorState
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.roles import tensors_of
from fedmodels.training.augmentation import augmented
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.method import Batch, Output
from fedmodels.training.run import RunFacts

ANY, IMAGES = "any", f"{MEMORY}/images"
BETAS = (0.5, 0.999)
DECAY = 1e-4
"""Weight decay of the student, as released."""
DRAWN = 256
"""Images drawn at a time from a generator that was sent."""


def statistics_distance(
    layers: Sequence[LayerMoments], earlier: Sequence[LayerMoments], momentum: float
) -> Tensor:
    """Return L_BN: the summed distances of means and of variances from the remembered ones.

    Args:
        layers: of this batch.
        earlier: moving averages over earlier batches, which count ``momentum``; or none.
        momentum: of the moving averages.
    """
    total = torch.zeros(())
    for number, each in enumerate(layers):
        mean, var = each.mean, each.var
        if earlier:
            mean = momentum * earlier[number].mean + (1 - momentum) * mean
            var = momentum * earlier[number].var + (1 - momentum) * var
        apart = (mean - each.running_mean).norm() + (var - each.running_var).norm()
        total = total.to(apart.device) + apart
    return total


def followed(
    layers: Sequence[LayerMoments], earlier: Sequence[LayerMoments], momentum: float
) -> list[LayerMoments]:
    """Return the moving averages of means and variances after one more batch."""
    now = [LayerMoments(e.mean.detach(), e.var.detach(), *e.running) for e in layers]
    return [
        LayerMoments(
            momentum * was.mean + (1 - momentum) * each.mean,
            momentum * was.var + (1 - momentum) * each.var,
            *each.running,
        )
        for was, each in zip(earlier or now, now, strict=True)
    ]


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """Return -KL(teacher || student) over rows (B, K) where both say the same class, batch mean."""
    same = (teacher.argmax(1) == student.argmax(1)).float()
    found, wanted = log_softmax(student, 1), log_softmax(teacher, 1)
    each = kl_div(found, wanted, reduction="none", log_target=True).sum(1)
    return -(same * each).mean()


def distillation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of softened logits (B, K); no factor T²."""
    return cross_entropy(student / temperature, (teacher / temperature).softmax(1))


@register("target")
@dataclass(frozen=True, kw_only=True)
class TARGET(Remembering):
    """Distillation on images that the server synthesises from the old model."""

    citation: ClassVar[str] = "Zhang et al., ICCV 2023"

    preset: Literal["paper", "released"] = "paper"
    """``released``: a warm-up of 20 batches, of which there are 10, so that the student and L_KL
    never take part, as in the released settings for CIFAR-100."""
    kd: NonNegative = 25.0
    """Weight of the distillation on clients."""
    kd_temperature: Positive = 2.0
    """Temperature of the distillation."""
    sends: Literal["images", "generator"] = "images"
    """What clients get: the synthetic images, or the generator, to draw as many themselves."""
    num_images: PositiveCount = 8000
    """Images a client distils on at most."""
    batches: PositiveCount = 10
    """Batches that are synthesised after a task."""
    synthesis_batch: PositiveCount = 256
    """Images of each batch."""
    g_steps: PositiveCount = 10
    """Steps on the noise and the generator's copy for each."""
    lr_g: NonNegative = 2e-3
    """Learning rate of the copy, with Adam; that of the generator is ``g_steps`` times it."""
    lr_z: NonNegative = 0.01
    """Learning rate of the noise."""
    bn: NonNegative = 10.0
    """Weight of L_BN."""
    bn_momentum: Share = 0.9
    """Momentum of the moving averages that L_BN compares."""
    oh: NonNegative = 0.5
    """Weight of the cross-entropy with the wanted classes."""
    adv: NonNegative = 1.0
    """Weight of L_KL, which looks for images on which the student differs."""
    kd_steps: Count = 400
    """Steps of the student after each batch, on all images up to then."""
    student_temperature: Positive = 20.0
    """Of its distillation."""
    student_lr: NonNegative = 0.2
    """Learning rate of the student, with momentum 0.9 and weight decay 1e-4."""
    latent: PositiveCount = 256
    """Coordinates of the noise."""
    generator_width: PositiveCount = 64
    """Channels of the generator's last layers."""

    @property
    def warm_up(self) -> int:
        """Return how many batches are made before the student takes part."""
        return 0 if self.preset == "paper" else 20

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        run.make_net().check_batches(
            synthesis_batch=self.synthesis_batch, num_images=self.num_images
        )
        return super().init_server(run)

    def remember(
        self, ctx: ServerContext, before: Bundle, old: SplitNet, known: Tensor
    ) -> tuple[Bundle, Metrics]:
        with watched(old) as watch:
            synthesis = Synthesis(self, ctx, old, known, watch)
            for number in range(self.batches):
                loss = synthesis.add(number)
                ctx.tell("synthesis", number + 1, self.batches, loss)
        ctx.series["synthesis_loss"] = synthesis.losses
        metrics = {"synthesis_accuracy": synthesis.accuracy()}
        if self.sends == "generator":
            tensors = tensors_of(synthesis.generator)
            return Bundle(generators={ANY: GeneratorState(ctx.interaction, tensors)}), metrics
        pool = torch.cat(synthesis.pool)
        index = torch.randperm(len(pool), generator=synthesis.draw)[: self.num_images]
        return Bundle({IMAGES: pool[index].cpu()}), metrics

    def fresh_generator(self, run: RunFacts) -> Upsampling:
        """Return an untrained generator of images in [0, 1]."""
        return Upsampling(run.problem.input_shape, self.latent, self.generator_width, "images")

    def memory_spec(self, run: RunFacts) -> Mapping[str, TensorSpec]:
        with seeded(0):
            forms = tensors_of(self.fresh_generator(run))
        if self.sends == "generator":
            return BundleSpec.of(Bundle(generators={ANY: GeneratorState(0, forms)})).required
        shape = (None, *run.problem.input_shape)
        return {f"weights/{IMAGES}": TensorSpec(torch.uint8, shape, self.num_images)}

    # --- client half ---------------------------------------------------------------------------

    def recalled(self, ctx: ClientContext, payload: Bundle) -> Callable[[], Tensor] | None:
        images = self._images(ctx, payload)
        if not len(images):
            return None
        training, draw = ctx.run.experiment.training, ctx.generator()
        order = shuffled(len(images), training.batch_size, draw)
        limits = ctx.stream.limits()

        def batch() -> Tensor:
            x = as_inputs(images[next(order)].to(ctx.device), limits)
            return augmented(x, training, draw)

        return batch

    def _images(self, ctx: ClientContext, payload: Bundle) -> Tensor:
        """Return the synthetic images (n, C, H, W), uint8."""
        if self.sends == "images":
            if IMAGES not in payload.weights:
                raise PayloadError(f"the memory came without {IMAGES!r}")
            return payload.weights[IMAGES]
        with seeded(0):
            generator = self.fresh_generator(ctx.run)
        generator.load_state_dict(sent_generator(payload, ANY))
        generator.to(ctx.device).eval()
        noise, count = ctx.generator(), min(self.num_images, self.batches * self.synthesis_batch)
        with torch.no_grad():
            sizes = [min(DRAWN, count - start) for start in range(0, count, DRAWN)]
            drawn = (torch.randn(n, self.latent, generator=noise) for n in sizes)
            return torch.cat([quantised(generator(z.to(ctx.device))) for z in drawn])

    def loss(
        self, ctx: ClientContext, batch: Batch, out: Output, refs: RememberingReferences
    ) -> Tensor:
        if refs.old is None or refs.draw is None:
            return super().loss(ctx, batch, out, refs)
        new = masked_cross_entropy(out.logits, batch.y, refs.current)
        x = refs.draw()
        with torch.no_grad():
            teacher = refs.old(x)[:, refs.known]
        student = ctx.net(x)[:, refs.known]
        return new + self.kd * distillation(teacher, student, self.kd_temperature)


# --- synthesis ------------------------------------------------------------------------------------


class Synthesis:
    """The images of one task's end while they are made, and the nets that make them."""

    def __init__(
        self, method: TARGET, ctx: ServerContext, old: SplitNet, known: Tensor, watch: Watch
    ) -> None:
        self.method, self.ctx, self.old, self.known, self.watch = method, ctx, old, known, watch
        self.device, self.draw = known.device, ctx.generator()
        self.classes = known.nonzero().flatten()
        self.generator = method.fresh_generator(ctx.run).to(self.device)
        meta_lr = method.lr_g * method.g_steps
        self.adam = torch.optim.Adam(self.generator.parameters(), lr=meta_lr, betas=BETAS)
        role = f"server/student/{ctx.interaction}"
        self.student = ctx.run.make_net("method", role).to(self.device)
        self.sgd = torch.optim.SGD(
            self.student.parameters(), lr=method.student_lr, momentum=0.9, weight_decay=DECAY
        )
        self.pool: list[Tensor] = []
        self.wanted: list[Tensor] = []
        self.earlier: list[LayerMoments] = []
        self.losses: list[float] = []

    def add(self, number: int) -> float:
        """Synthesise one batch, then teach the student; return the batch's lowest loss.

        Raises:
            PayloadError: no step had a finite loss.
        """
        adversarial = number >= self.method.warm_up
        images, loss = self._batch(adversarial)
        check_loss(self.ctx, "the synthesis", loss, "method.lr_g, lr_z and student_lr")
        self.pool.append(images)
        self.losses.append(loss)
        if adversarial:
            self._teach()
        return loss

    def _batch(self, adversarial: bool) -> tuple[Tensor, float]:
        """Return the images of lowest loss on the way of the noise and of a generator's copy."""
        method, size = self.method, self.method.synthesis_batch
        z = torch.randn(size, method.latent, generator=self.draw).to(self.device)
        z.requires_grad_(True)
        y = self.classes[torch.randint(len(self.classes), (size,), generator=self.draw)]
        fast = copy.deepcopy(self.generator).train()
        inner = torch.optim.Adam(fast.parameters(), lr=method.lr_g, betas=BETAS)
        inner.add_param_group({"params": [z], "lr": method.lr_z})
        best, lowest = torch.empty(0), float("inf")
        summed = [torch.zeros_like(p) for p in fast.parameters()]
        for _ in range(method.g_steps):
            images = fast(z)
            loss = descend(self._loss(images, y, adversarial), inner)
            for total, parameter in zip(summed, fast.parameters(), strict=True):
                assert parameter.grad is not None, "the images depend on every weight"
                total += parameter.grad
            if loss < lowest:
                best, lowest = quantised(images), loss
        self.earlier = followed(self.watch.layers(), self.earlier, method.bn_momentum)
        follow(self.generator, fast, summed, self.adam)
        self.wanted.append(y)
        return best, lowest

    def _loss(self, images: Tensor, y: Tensor, adversarial: bool) -> Tensor:
        method = self.method
        x = as_inputs(images, self.ctx.limits)
        x = augmented(x, self.ctx.run.experiment.training, self.draw)
        teacher = self.old(x)
        layers = self.watch.layers()
        loss = method.oh * masked_cross_entropy(teacher, y, self.known)
        distance = statistics_distance(layers, self.earlier, method.bn_momentum)
        loss = loss + method.bn * distance.to(loss.device)
        if adversarial:
            student = self.student.eval()(x)[:, self.known]
            loss = loss + method.adv * disagreement(teacher[:, self.known], student)
        return loss

    def _teach(self) -> None:
        """Distil the old model into the student on all images up to now."""
        method, pool = self.method, torch.cat(self.pool)
        order = shuffled(len(pool), method.synthesis_batch, self.draw)
        self.student.requires_grad_(True).train()
        for _ in range(method.kd_steps):
            x = as_inputs(pool[next(order)], self.ctx.limits)
            x = augmented(x, self.ctx.run.experiment.training, self.draw)
            with torch.no_grad():
                teacher = self.old(x)[:, self.known]
            student = self.student(x)[:, self.known]
            softness = method.student_temperature
            descend(softness**2 * distillation(teacher, student, softness), self.sgd)
        self.student.requires_grad_(False)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of images that the old model takes for the classes they were made as."""
        hits = [
            (self.old(as_inputs(x, self.ctx.limits))[:, self.known].argmax(1))
            == (self.known.cumsum(0) - 1)[y]
            for x, y in zip(self.pool, self.wanted, strict=True)
        ]
        return float(torch.cat(hits).float().mean()) if hits else 0.0
