"""Training that hides its examples: DP-SGD, for the stock loop.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1.

    paper   here                     paper   here
    L       batch_size, expected     C       privacy.clip
    q       rate                     sigma   noise

Each batch holds each example with the chance q, drawn from the client's secret. The gradient of
each example's loss is scaled to at most C. Per-example gradients are mapped by torch.func over
batches of one example, so a method's own loss is differentiated as it is, with all its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedmodels.config.privacy import Privacy
from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases, epsilon_of, least_noise
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.method import Batch, Method, Output
from fedmodels.training.run import RunFacts

if TYPE_CHECKING:
    from fedmodels.training.contexts import ClientContext

SPENT = ("epsilon", "epsilon_next")
"""What a client reports: epsilon of its trainings on a task, and with one training more."""
AT_ONCE = 1 << 24
"""Numbers of per-example gradients that are held at a time."""
LossOf = Callable[[Batch, Output], Tensor]


@dataclass(frozen=True)
class HiddenExamples:
    """How a client hides the examples of one task."""

    privacy: Privacy
    examples: int
    batch_size: int
    steps: int
    """Of one training."""
    trainings: int
    """On this task in the run."""
    sends_prototypes: bool

    @classmethod
    def of(cls, method: Method, ctx: ClientContext, examples: int) -> HiddenExamples | None:
        """Return what a run asks for; None where it hides no examples."""
        run, privacy = ctx.run, ctx.run.experiment.privacy
        if privacy is None or not privacy.hides_examples or not examples:
            return None
        training = run.experiment.training
        epochs = sum(phase.epochs for phase in method.phases(ctx))
        size = min(training.batch_size, examples)
        levels = any(k.startswith("prototypes/") for k in method.upload_spec(run).required)
        steps = epochs * math.ceil(examples / size)
        trainings = run.experiment.schedule.rounds  # on each task, whose examples are its own
        return cls(privacy, examples, size, steps, trainings, levels)

    @property
    def rate(self) -> float:
        """The chance of an example to be in a batch."""
        return self.batch_size / self.examples

    def releases(self, noise: float, trainings: int) -> tuple[GaussianReleases, ...]:
        """Return what so many trainings release, with a noise multiplier."""
        steps = GaussianReleases(noise, self.steps * trainings, self.rate)
        return (steps, GaussianReleases(noise, trainings)) if self.sends_prototypes else (steps,)

    @property
    def noise(self) -> float:
        """The noise multiplier: the config's, or the least that keeps all trainings in epsilon."""
        if self.privacy.noise_multiplier is not None:
            return self.privacy.noise_multiplier
        assert self.privacy.epsilon is not None, "the table is whole"
        return least_noise(
            lambda z: self.releases(z, self.trainings), self.privacy.epsilon, self.privacy.chance
        )

    def epsilon(self, trainings: int) -> float:
        """Return the epsilon of so many trainings on these examples."""
        return epsilon_of(self.releases(self.noise, trainings), self.privacy.chance)


def check_hides_examples(method: Method, run: RunFacts) -> None:
    """Check that clients can hide their examples.

    Raises:
        ConfigError: says what stands against it.
    """
    if method.trains_on != "task" or run.experiment.accumulates:
        raise ConfigError(
            '[privacy] level = "example" counts for each task by itself, and here clients train on '
            "examples of other tasks as well, or on what they made of them"
        )
    if run.batch_norm_weights:
        raise ConfigError(
            '[privacy] level = "example": batch normalisation mixes the examples of a batch, so '
            'none has a gradient of its own; take a net with norm = "layer" or without'
        )
    if run.experiment.training.together > 1:
        raise ConfigError('[privacy] level = "example" trains clients one by one: together = 1')


def check_hidden(method: Method, ctx: ClientContext, state: Bundle) -> None:
    """Check that a training took nothing from its examples but by steps and means with noise.

    Raises:
        ConfigError: the method trains, or keeps something of its examples, in a way of its own.
    """
    made = "class means" in ctx.asked
    kept = [k for k in state.by_key() if not k.startswith(("weights/", "prototypes/"))]
    kept += [k for k in state.prototypes if not made]
    kept += [k for k in state.weights if k not in ctx.run.forms]
    if "private" not in ctx.asked or kept or (ctx.hidden.sends_prototypes and not made):
        why = f"keeps {kept[0]!r} of them" if kept else "trains on them in a way of its own"
        raise ConfigError(f'[privacy] level = "example": method {method.name!r} {why}')


class PrivateSteps:
    """The batches and the gradients of one training that hides its examples."""

    def __init__(self, ctx: ClientContext, hidden: HiddenExamples) -> None:
        """Start before the first step."""
        self.net, self.hidden, self.noise = ctx.net, hidden, hidden.noise
        self._secret, self._interaction, self._taken = ctx.secret(), ctx.interaction, 0

    def batches(self) -> Iterator[Tensor]:
        """Yield the indices of an epoch's batches: each example with the same chance in each."""
        for _ in range(math.ceil(self.hidden.examples / self.hidden.batch_size)):
            self._taken += 1
            drawn = self._secret.chances(self._purpose("batch"), self.hidden.examples)
            yield (torch.from_numpy(drawn) < self.hidden.rate).nonzero().flatten()

    def _purpose(self, what: str) -> str:
        return f"{self._interaction}/step/{self._taken}/{what}"

    def put_gradients(self, batch: Batch, loss_of: LossOf, name: str) -> Tensor:
        """Put the noisy mean of bounded gradients into the net; return the mean loss.

        Raises:
            ConfigError: the loss cannot be taken example by example.
        """
        trained = {k: p for k, p in self.net.parameters_by_key().items() if p.requires_grad}
        sizes = [p.numel() for p in trained.values()]
        total, losses = torch.zeros(sum(sizes), device=batch.x.device), list[Tensor]()
        for part in torch.split(torch.arange(len(batch.y)), max(1, AT_ONCE // sum(sizes))):
            if not len(part):
                continue
            some = Batch(batch.x[part], batch.y[part], batch.index[part])
            try:
                gradients, found = per_example(self.net, trained, some, loss_of)
            except RuntimeError as error:
                raise ConfigError(
                    f'[privacy] level = "example": the loss of method {name!r} cannot be taken '
                    f"example by example ({str(error).splitlines()[0]})"
                ) from None
            norms = gradients.norm(dim=1)
            factors = (self.hidden.privacy.clip / norms.clamp(min=1e-12)).clamp(max=1.0)
            total += factors @ gradients
            losses.append(found)
        noise = self._secret.normal(total, self._purpose("noise"))
        noisy = total + self.noise * self.hidden.privacy.clip * noise
        mean = noisy / self.hidden.batch_size
        for parameter, piece in zip(trained.values(), torch.split(mean, sizes), strict=True):
            parameter.grad = piece.reshape(parameter.shape).clone()
        return torch.cat(losses).mean() if losses else torch.zeros((), device=batch.x.device)


def per_example(
    net: SplitNet, trained: Mapping[str, nn.Parameter], batch: Batch, loss_of: LossOf
) -> tuple[Tensor, Tensor]:
    """Return the gradients (B, P) of each example's loss, and the losses (B,).

    The ``trained`` parameters are P numbers in all; ``loss_of`` gives the loss of a batch of one.
    """
    whole = _WithLoss(net, loss_of)
    names = {id(p): name for name, p in whole.named_parameters()}
    wanted = {names[id(p)]: p.detach() for p in trained.values()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, index: Tensor) -> Any:
        return functional_call(whole, parameters, (x[None], y[None], index[None]))

    mapped = vmap(grad_and_value(loss), in_dims=(None, 0, 0, 0), randomness="different")
    found, losses = mapped(wanted, batch.x, batch.y, batch.index)
    flat = [found[name].flatten(1) for name in wanted]
    return torch.cat(flat, 1).detach(), losses.detach()


class _WithLoss(nn.Module):
    """A net and a loss in one module: the loss may look at the net's parameters as well."""

    def __init__(self, net: SplitNet, loss_of: LossOf) -> None:
        super().__init__()
        self.net, self._loss_of = net, loss_of

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss of a batch."""
        features = self.net.embedded(x)
        return self._loss_of(Batch(x, y, index), Output(features, self.net.head(features)))


def private_class_sums(
    z: Tensor, y: Tensor, classes: int, hidden: HiddenExamples, secret: Secret, interaction: int
) -> tuple[Tensor, Tensor]:
    """Return the sums of embeddings (K, d) by class and the counts (K,), both with noise.

    An example adds its embedding, scaled to a norm of at most ``prototype_clip``, and a mark of
    that size. So its contribution has a norm of at most sqrt(2) ``prototype_clip``.

    Raises:
        ConfigError: ``[privacy]`` gives no bound for embeddings.
    """
    bound = hidden.privacy.prototype_clip
    if bound is None:
        raise ConfigError(
            '[privacy] prototype_clip is needed: with level = "example" it bounds the embedding of '
            "an example, and the method sends prototypes"
        )
    table = torch.zeros(classes, z.shape[1] + 1)
    norms = z.norm(dim=1).clamp(min=1e-12)
    rows = torch.cat(
        [z * (bound / norms).clamp(max=1.0)[:, None], z.new_full((len(z), 1), bound)], 1
    )
    table.index_add_(0, y.cpu(), rows.float().cpu())
    std = hidden.noise * bound * math.sqrt(2)
    noisy = table + std * secret.normal(table, f"{interaction}/prototypes/noise")
    return noisy[:, :-1], noisy[:, -1] / bound
