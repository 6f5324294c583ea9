"""Games of one step of which each example, or client, is a canary: thousands of plays in seconds.

As Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, draw many
canaries by themselves. Here each touches a number that no other one touches, as hard as its bound
lets it, and the noise on each number is its own: so each is a play of one Gaussian release, and
errors of thousands give its epsilon to a few per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.privacy_audit.client_level import (
    FAR,
    NOISE,
    PROBLEM,
    TABLES,
    ClientGame,
    Releases,
    recorded,
)
from fedmodels.config.experiment import Experiment
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import make
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases, epsilon_of
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import START, ClientContext, ServerContext
from fedmodels.training.private_steps import HiddenExamples, PrivateSteps, private_class_sums
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, Phase, Stepped
from fedsrv.parts.private_rounds import WEIGHTS

CANARIES = 500
"""Of a step. Its work grows with their square."""
SHARP: Mapping[str, Any] = {
    **NOISE, "level": "example", "noise_multiplier": 0.35, "prototype_clip": 1.0,
}  # fmt: skip
"""So little noise that a tenth of it shows best."""
Plays = tuple[list[float], list[float]]
"""Scores of the canaries that were there, and of those that were not."""


@dataclass(frozen=True)
class OneStep:
    """What one release tells of each of many canaries."""

    name: str
    is_gaussian: bool = True

    @cached_property
    def hidden(self) -> HiddenExamples:
        """What the config asks for; all examples are in each batch."""
        privacy = experiment_of({**TABLES, "privacy": dict(SHARP)}).privacy
        assert privacy is not None, "it is in the config"
        contents = np.arange(CANARIES, dtype=np.uint64)
        return HiddenExamples(privacy, contents, CANARIES, 1, 1, sends_prototypes=False)

    @property
    def delta(self) -> float:
        """The promise's delta."""
        return self.hidden.privacy.chance

    def charged(self) -> float:
        """Return what one release costs."""
        return epsilon_of((GaussianReleases(self.hidden.noise),), self.delta)

    def plays(self, number: int) -> Plays:
        """Return at least so many scores, of one release after the other."""
        ins, outs = list[float](), list[float]()
        while len(ins) + len(outs) < number:
            secret = Secret.fresh()
            is_there = torch.from_numpy(secret.chances("canaries", CANARIES)) < 0.5
            scores = self.release(is_there, secret)
            ins += scores[is_there].tolist()
            outs += scores[~is_there].tolist()
        return ins, outs

    def release(self, is_there: Tensor, secret: Secret) -> Tensor:
        """Return a score (n,) of each canary."""
        raise NotImplementedError


@dataclass(frozen=True)
class GradientStep(OneStep):
    """A step of training: example k is the k-th unit vector, of a linear net with one output."""

    def release(self, is_there: Tensor, secret: Secret) -> Tensor:
        """Return what the step does to each weight, in bounds of an example."""
        net = SplitNet(nn.Flatten(), nn.Linear(CANARIES, 1, bias=False), CANARIES)
        ctx = _Ctx()
        ctx.net, ctx.hidden, ctx.secret = net, self.hidden, lambda: secret
        steps = PrivateSteps(
            cast(Stepped, make("fedavg")), cast(ClientContext, ctx), Phase(1), None
        )
        x, pull = torch.eye(CANARIES), FAR * is_there.float()
        batch = Batch(x, is_there.long(), torch.arange(CANARIES))
        steps.put_gradients(batch, partial(_pulled, pull), "audit")
        gradient = net.head.get_parameter("weight").grad
        assert gradient is not None, "the step was taken"
        return gradient[0] * CANARIES / self.hidden.privacy.clip  # type: ignore[operator]


@dataclass(frozen=True)
class CanaryCohort(ClientGame):
    """A run of one round, of a net with more weights than clients."""

    @cached_property
    def experiment(self) -> Experiment:
        """The config."""
        return experiment_of({
            **TABLES, "net": {"name": "mlp", "hidden": [CANARIES // 4]},
            "schedule": {"clients": CANARIES, "rounds": 1},
            "privacy": {**NOISE, "noise_multiplier": SHARP["noise_multiplier"]},
        })  # fmt: skip

    @cached_property
    def sent(self) -> tuple[Bundle, ...]:
        """What each client sends that is there: number k of the weights is moved far."""
        vector, found = torch.zeros(sum(t.numel() for t in self.given.values())), list[Bundle]()
        for client in range(CANARIES):
            moved = vector.clone()
            moved[client] = FAR
            parts = torch.split(moved, [t.numel() for t in self.given.values()])
            pairs = zip(self.given.items(), parts, strict=True)
            weights = {name: own.view(t.shape) for (name, t), own in pairs}
            found.append(Bundle(weights, scalars={"num_examples": 1.0}))
        return tuple(found)


@dataclass(frozen=True)
class ClientStep(OneStep):
    """A release of the coordinator: client k moves number k as far as its bound lets it."""

    @cached_property
    def game(self) -> CanaryCohort:
        """The run, and what its clients send."""
        return CanaryCohort(self.name)

    @property
    def delta(self) -> float:
        return self.game.delta

    def charged(self) -> float:
        return self.game.charged()

    def release(self, is_there: Tensor, secret: Secret) -> Tensor:
        """Return how far the released sum moved along what each client sends."""
        game, releases = self.game, Releases()
        releases.secret = secret
        still = Bundle(game.given, scalars={"num_examples": 1.0})
        sent = {c: own if is_there[c] else still for c, own in enumerate(game.sent)}
        ctx = ServerContext(game.run, START, range(CANARIES))
        with recorded() as drawn:
            game._private(releases).released(ctx, CANARIES, game.given, sent, None)
        total, clip = drawn[0][0][WEIGHTS], game.covered.clips[WEIGHTS]
        each = torch.stack([game.covered.vectors(own, game.given)[WEIGHTS] for own in game.sent])
        return each @ total / (FAR * clip)


class _Ctx:
    """As much of a client's context as a private step looks at."""

    run = RunFacts(experiment_of(TABLES), PROBLEM)
    device, interaction = torch.device("cpu"), 0
    net: SplitNet
    hidden: HiddenExamples
    secret: Callable[[], Secret]

    def __init__(self) -> None:
        self.asked: set[str] = set()


def _pulled(pull: Tensor, batch: Batch, out: Output) -> Tensor:
    return (pull[batch.index] * out.logits[:, 0]).sum()


@dataclass(frozen=True)
class ClassSums(OneStep):
    """The class sums of a client: example k is the only one of class k, or of another one."""

    def release(self, is_there: Tensor, secret: Secret) -> Tensor:
        """Return what the sums and counts say of each class, in bounds of an example."""
        bound = self.hidden.privacy.prototype_clip
        assert bound is not None, "it is in the config"
        z, spare = torch.full((CANARIES, 1), FAR * bound), torch.arange(CANARIES) + CANARIES
        y = torch.where(is_there, torch.arange(CANARIES), spare)
        sums, counts = private_class_sums(z, y, 2 * CANARIES, self.hidden, secret, 0)  # type: ignore[arg-type]
        return (sums[:, 0] / bound + counts)[:CANARIES]
