"""Training that hides its examples: DP-SGD, for the stock loop.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1.

    paper   here                     paper   here
    L       batch_size, expected     C       privacy.clip
    q       rate                     sigma   noise

Each batch holds each example with the chance q, drawn from the client's secret. The gradient of
each example's loss is scaled to at most C. Inputs of one content are one example. A method's own
loss is differentiated as it is, with all its terms: at once where the net's layers tell each
example's part (``ghost_clipping.py``), by torch.func over batches of one example elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmodels.config.privacy import Privacy
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.facts.position import Interaction
from fedmodels.nets.independent import rows_are_independent
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases, least_noise
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.training.asked import asked, reads_history
from fedmodels.training.contexts import ClientContext
from fedmodels.training.ghost_clipping import (
    LossOf,
    apart_in,
    bounded,
    one_by_one,
    per_example,
)
from fedmodels.training.hooks import init_client
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Phase, Stepped, in_steps
from fedmodels.training.steps import Steps
from fedmodels.training.wire import SharedPart

if TYPE_CHECKING:
    from fedmodels.training.loop import ClientHalf

SPENT = ("epsilon", "epsilon_next")
"""What a client reports: epsilon of all its trainings, and with one more like the last."""
AT_ONCE = 1 << 24
"""Numbers of per-example gradients that are held at a time."""


class SpentPrivacy(SharedPart):
    """Clients hide their examples in training, and tell what they spend of their privacy."""

    hides_draws = True

    @classmethod
    def begins(cls, half: ClientHalf) -> None:
        """Let a training that has examples hide them, if it may."""
        if (hidden := HiddenExamples.of(half)) is not None:
            half.ctx.hidden = hidden
            half.ctx.may_train(hidden)

    @classmethod
    def ends(cls, half: ClientHalf, state: Bundle) -> None:
        """Check that a training has hidden its examples."""
        half.ctx.net.alone = False
        if half.ctx.hidden is not None:
            half.ctx.hidden.check(half.method, half.ctx, state)

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check that both figures are told of a training, and possible; raise PayloadError."""
        missing = [name for name in SPENT if name not in figures]
        if missing and (num_examples or len(missing) < len(SPENT)):
            raise PayloadError(f"the report does not say what was spent: {missing[0]!r} is missing")
        for name in SPENT:
            if not 0 <= figures.get(name, 0.0) < math.inf:
                value = figures[name]
                raise PayloadError(f"the report's {name!r} is {value:g}, not a number from 0 on")


@dataclass(frozen=True, eq=False)
class HiddenExamples:
    """How a client hides the examples of one training.

    Inputs of the same content are one example, whatever their labels: its copies are drawn
    together, and have one bound together.
    """

    privacy: Privacy
    contents: NDArray[np.uint64]
    """A hash of the content of each training input (n,)."""
    batch_size: int
    steps: int
    """Of one training."""
    trainings: int
    """On the same examples in the run, as far as the config tells."""
    sends_prototypes: bool
    name: str = ""
    """That of the release: another training has another name, also of the same interaction."""
    drawn: Iterator[int] = field(default_factory=count)
    """Counts what was drawn for the training: batches and noise."""

    @classmethod
    def of(cls, half: ClientHalf) -> HiddenExamples | None:
        """Return what a run asks for; None without examples, ConfigError for others than these."""
        method, ctx, y, run = half.method, half.ctx, half.y, half.ctx.run
        privacy = run.experiment.privacy
        if privacy is None or not len(y):
            return None
        check_looks(method)
        ctx.net.alone = not rows_are_independent(ctx.net)
        contents = ctx.stream.contents(ctx.task, up_to=method.trains_on == "history")
        if len(contents) != len(y):
            raise ConfigError(
                f'[privacy] level = "example": method {method.name!r} trains on {len(y)} examples, '
                f"and its data are {len(contents)}"
            )
        size = min(run.experiment.training.batch_size, len(y))
        epochs = sum(phase.epochs for phase in in_steps(method).phases(ctx))
        levels = any(k.startswith("prototypes/") for k in method.upload_spec(run).required)
        trainings = run.experiment.schedule.rounds * _tasks_of_an_example(method, run)
        return cls(
            privacy, contents, size, epochs * math.ceil(len(y) / size), trainings, levels,
            half.release.name(ctx.secret()),
        )  # fmt: skip

    def stepping(self, method: Stepped, ctx: ClientContext, phase: Phase, refs: Any) -> Steps:
        """Begin a phase of a training; return what takes its steps."""
        return PrivateSteps(method, ctx, phase, refs)

    def class_means(
        self, ctx: ClientContext, z: Tensor, y: Tensor, means: Prototypes
    ) -> Prototypes:
        """Return class means and counts with noise that hides examples.

        The client has announced its classes and how many examples each has: a mean is given for
        each of these classes, and no count goes beyond what was announced.
        """
        ctx.asked.add("class means")
        classes, secret = ctx.run.problem.num_classes, ctx.secret()
        sums, counts = private_class_sums(z, y, classes, self, secret, ctx.interaction)
        rows = {
            label: (
                sums[label] / max(float(counts[label]), 1.0),
                min(max(1, round(float(counts[label]))), n),
            )
            for label, (_, n) in means.rows().items()
        }
        return Prototypes.of(rows, z.shape[1])

    def check(self, method: Method, ctx: ClientContext, state: Bundle) -> None:
        """Raise ConfigError if a training took more of its examples than noisy steps and means."""
        made = "class means" in ctx.asked
        kept = [*_kept(ctx.run, state), *(k for k in state.prototypes if not made)]
        if "private" not in ctx.asked or kept or (self.sends_prototypes and not made):
            why = f"keeps {kept[0]!r} of them" if kept else "trains on them in a way of its own"
            raise ConfigError(f'[privacy] level = "example": method {method.name!r} {why}')

    @property
    def examples(self) -> int:
        """How many inputs there are."""
        return len(self.contents)

    @property
    def rate(self) -> float:
        """The chance of an example to be in a batch."""
        return self.batch_size / self.examples

    @cached_property
    def places(self) -> Tensor:
        """Which of the examples each input is a copy of (n,)."""
        return torch.from_numpy(np.unique(self.contents, return_inverse=True)[1].reshape(-1))

    @cached_property
    def copies(self) -> Tensor:
        """How many inputs are of the same content as each (n,)."""
        return torch.bincount(self.places)[self.places]

    def releases(self, noise: float, trainings: int) -> tuple[GaussianReleases, ...]:
        """Return what so many trainings release, with a noise multiplier."""
        steps = GaussianReleases(noise, self.steps * trainings, self.rate)
        return (steps, GaussianReleases(noise, trainings)) if self.sends_prototypes else (steps,)

    @cached_property
    def noise(self) -> float:
        """The noise multiplier: the config's, or the least that keeps all trainings in epsilon."""
        if self.privacy.noise_multiplier is not None:
            return self.privacy.noise_multiplier
        assert self.privacy.epsilon is not None, "the table is whole"
        return least_noise(
            lambda z: self.releases(z, self.trainings), self.privacy.epsilon, self.privacy.chance
        )


def _tasks_of_an_example(method: Method, run: RunFacts) -> int:
    """Return in how many tasks a run may train on one example, as far as its config tells."""
    scenario, most = run.experiment.scenario, run.experiment.most_tasks
    comes_again = reads_history(method, run.experiment)
    if comes_again or (scenario is not None and scenario.deals_again):
        return most or 1
    return 1


def _kept(run: RunFacts, state: Bundle) -> list[str]:
    """Return the names of what a client keeps beside weights of the net and prototypes."""
    kept = [k for k in state.by_key() if not k.startswith(("weights/", "prototypes/"))]
    return [*kept, *(k for k in state.weights if k not in run.forms)]


def check_looks(method: Method) -> None:
    """Check that clients look at examples in noisy steps alone; ConfigError says what they do."""
    if looks := asked(method, "looks_at_examples", {}, ""):
        raise ConfigError(f'[privacy] level = "example": method {method.name!r} {looks}')


def check_hides_examples(method: Method, run: RunFacts) -> None:
    """Check that clients can hide their examples; ConfigError says what stands against it."""
    check_looks(method)
    if method.trains_on not in ("task", "history"):
        raise ConfigError(
            '[privacy] level = "example" counts trainings on examples, and here clients train on '
            "what they made of examples of earlier tasks as well"
        )
    if run.batch_norm_weights:
        raise ConfigError(
            '[privacy] level = "example": batch normalisation mixes the examples of a batch, so '
            'none has a gradient of its own; take a net with norm = "layer" or without'
        )
    if kept := _kept(run, init_client(method, run, 0)):
        raise ConfigError(
            f'[privacy] level = "example": method {method.name!r} keeps {kept[0]!r} of them'
        )


class PrivateSteps(Steps):
    """The batches and the steps of a phase of a training that hides its examples."""

    def __init__(self, method: Stepped, ctx: ClientContext, phase: Phase, refs: Any) -> None:
        """Begin a phase."""
        super().__init__(method, ctx, phase, refs, 1)
        self.net, self.hidden, self.noise = ctx.net, ctx.hidden, ctx.hidden.noise
        self._secret, self._maps, self._one_by_one = ctx.secret(), False, False

    def drawn(self) -> list[Tensor]:
        """Return the indices of an epoch's batches: each example with the same chance in each."""
        places, found = self.hidden.places, []
        for _ in range(math.ceil(self.hidden.examples / self.hidden.batch_size)):
            drawn = self._secret.chances(self._purpose("batch"), int(places.max()) + 1)
            is_in = torch.from_numpy(drawn)[places] < self.hidden.rate
            found.append(is_in.nonzero().flatten())
        return found

    def take(self, batch: Batch, fixed: Tensor | None) -> Tensor:
        """Take a step that hides the examples of a batch; return their mean loss."""
        method, ctx = self.step.method, self.ctx
        ctx.asked |= {"private", "criterion", "optimizer"}
        self.step.optimizer.zero_grad(set_to_none=True)
        loss_of = partial(method.loss, ctx, refs=self.refs)
        loss = self.put_gradients(batch, loss_of, method.name)
        self.step.optimizer.step()
        method.after_step(ctx, batch, self.refs)
        return loss

    def _purpose(self, what: str) -> str:
        """Return a purpose that nothing else has, of this training or of another one."""
        return f"{self.ctx.interaction}/{self.hidden.name}/{what}/{next(self.hidden.drawn)}"

    def put_gradients(self, batch: Batch, loss_of: LossOf, name: str) -> Tensor:
        """Put the noisy mean of bounded gradients into the net; return the mean loss.

        Raise ConfigError if the loss cannot be taken example by example.
        """
        trained = {k: p for k, p in self.net.parameters_by_key().items() if p.requires_grad}
        kept = {k: t.clone() for k, t in self.net.buffers_by_key().items()}
        sizes = [p.numel() for p in trained.values()]
        try:
            total, losses = self._bounded(trained, batch, loss_of)
        except (RuntimeError, ValueError) as error:  # of batch normalisation by one example
            raise ConfigError(
                f'[privacy] level = "example": the loss of method {name!r} cannot be taken '
                f"example by example ({str(error).splitlines()[0]})"
            ) from None
        now = self.net.buffers_by_key()
        if changed := [key for key, t in kept.items() if not torch.equal(t, now[key])]:
            raise ConfigError(
                f'[privacy] level = "example": the net keeps {changed[0]!r} of its examples in '
                "training, and no noise would cover it"
            )
        noise = self._secret.normal(total, self._purpose("noise"))
        noisy = total + self.noise * self.hidden.privacy.clip * noise
        mean = noisy / self.hidden.batch_size
        for parameter, piece in zip(trained.values(), torch.split(mean, sizes), strict=True):
            parameter.grad = piece.reshape(parameter.shape).clone()
        return losses.mean() if len(losses) else losses.sum()

    def _bounded(
        self, trained: Mapping[str, nn.Parameter], batch: Batch, loss_of: LossOf
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the examples' bounded gradients (P,), and their losses (B,)."""
        if len(batch.y) and not self._maps:
            apart = apart_in(self.net, trained, batch)
            at_once = None if apart is None else bounded(self.net, trained, batch, loss_of, apart)
            if at_once is not None:
                factors = self._factors(batch.index, at_once.squares.sqrt())
                return at_once.total(factors), at_once.losses
            self._maps = True
        size = sum(p.numel() for p in trained.values())
        total, losses = torch.zeros(size, device=batch.x.device), [batch.x.new_zeros(0)]
        for part in torch.split(torch.arange(len(batch.y)), max(1, AT_ONCE // size)):
            taught = tuple(each[part] for each in batch.taught)
            some = Batch(batch.x[part], batch.y[part], batch.index[part], taught=taught)
            if len(part):
                gradients, found = self._each(trained, some, loss_of)
                total += self._factors(some.index, gradients.norm(dim=1)) @ gradients
                losses.append(found)
        return total, torch.cat(losses)

    def _each(
        self, trained: Mapping[str, nn.Parameter], batch: Batch, loss_of: LossOf
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients (B, P) and losses (B,) of examples that meet no other one."""
        if not self._one_by_one:
            try:
                return per_example(self.net, trained, batch, loss_of)
            except RuntimeError:  # torch cannot map what looks at values or draws by itself
                self._one_by_one = True
        return one_by_one(self.net, trained, batch, loss_of)

    def _factors(self, index: Tensor, norms: Tensor) -> Tensor:
        """Return by what gradients are multiplied: none, with its copies, passes the clip."""
        clips: Tensor = self.hidden.privacy.clip / self.hidden.copies[index.cpu()].to(norms)
        return (clips / norms.clamp(min=1e-12)).clamp(max=1.0)


def private_class_sums(
    z: Tensor,
    y: Tensor,
    classes: int,
    hidden: HiddenExamples,
    secret: Secret,
    interaction: Interaction,
) -> tuple[Tensor, Tensor]:
    """Return the sums of embeddings (K, d) by class and the counts (K,), both with noise.

    An example adds its embedding, scaled to a norm of at most ``prototype_clip``, and a mark of
    that size; of copies, each adds its part of that. So the contribution of an example has a norm
    of at most sqrt(2) ``prototype_clip``.

    Raises:
        ConfigError: ``[privacy]`` gives no bound for embeddings, or the embeddings are not those of
            the training inputs.
    """
    bound = hidden.privacy.prototype_clip
    if bound is None:
        raise ConfigError(
            '[privacy] prototype_clip is needed: with level = "example" it bounds the embedding of '
            "an example, and the method sends prototypes"
        )
    if len(z) != hidden.examples:
        raise ConfigError(
            f'[privacy] level = "example": class means of {len(z)} inputs, and the client trains '
            f"on {hidden.examples}"
        )
    table = torch.zeros(classes, z.shape[1] + 1)
    norms = z.norm(dim=1).clamp(min=1e-12)
    rows = torch.cat(
        [z * (bound / norms).clamp(max=1.0)[:, None], z.new_full((len(z), 1), bound)], 1
    )
    table.index_add_(0, y.cpu(), rows.float().cpu() / hidden.copies[:, None])
    std = hidden.noise * bound * math.sqrt(2)
    noisy = table + std * secret.normal(table, f"{interaction}/{hidden.name}/prototypes/noise")
    return noisy[:, :-1], noisy[:, -1] / bound
