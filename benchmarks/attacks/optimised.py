"""Attacks that search how far they may go: all attackers send one vector, made of what is honest.

    min_max, min_sum   Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021, section IV
    tailored           their attack on a rule that the attackers know

    paper       here
    nabla_b     honest.mean(0), the mean of the honest updates
    nabla_p     deviation(...): "unit" is -mean / |mean|, "std" -deviation, "sign" -sign(mean)
    gamma       how far the vector goes along nabla_p: the largest for which a condition holds

``tailored`` takes of all deviations and of a grid of gamma the vector that moves the result of the
rule farthest from the mean of the honest updates, as in the paper's equation 1. The vector stays as
short as it must to be counted at all. Attackers of a run with buckets do not know who is in which.

The weights of an upload are one vector. The prototypes of each class are one, as for the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedmodels.config.reduction import Reduction
from fedmodels.reductions.rule import rule_of
from fedmodels.tensors.aggregation_rule import Facts
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.differences import WEIGHTS
from fedsrv.engine.comparison import ODD, ODD_OTHERWISE

Place = tuple[str, ...]
Numbers = Mapping[Place, Tensor]
Deviation = Literal["unit", "std", "sign"]
DEVIATIONS: tuple[Deviation, ...] = ("unit", "std", "sign")
CLOSE = 0.98
"""Part of the bound of an upload that is left out, which ``tailored`` may reach."""
SIZES = 12
"""Values of gamma that ``tailored`` tries for each deviation."""
HALVINGS = 60


def deviation(honest: Tensor, kind: Deviation) -> Tensor:
    """Return nabla_p (d,) of honest updates (n, d); zeros where they tell no direction."""
    mean = honest.mean(0)
    if kind == "std":
        return -honest.std(0, correction=0)
    return -mean.sign() if kind == "sign" else -mean / mean.norm().clamp_min(1e-30)


def largest(holds: Callable[[float], bool]) -> float:
    """Return the largest gamma of an interval from 0 on in which a condition holds."""
    low, high = 0.0, 1.0
    while holds(high) and high < 1e12:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def min_max(honest: Tensor, kind: Deviation) -> Tensor:
    """Return the vector (d,) no farther from each honest one than the farthest two are apart."""
    most = float(torch.cdist(honest, honest).max())
    return _along(honest, kind, lambda v: float((honest - v).norm(dim=1).max()) <= most)


def min_sum(honest: Tensor, kind: Deviation) -> Tensor:
    """Return the vector (d,) whose squared distances sum to no more than those of an honest one."""
    most = float(torch.cdist(honest, honest).square().sum(1).max())
    return _along(honest, kind, lambda v: float((honest - v).square().sum()) <= most)


def _along(honest: Tensor, kind: Deviation, holds: Callable[[Tensor], bool]) -> Tensor:
    mean, p = honest.mean(0), deviation(honest, kind)
    if not bool(p.any()):
        return mean
    return mean + largest(lambda gamma: holds(mean + gamma * p)) * p


def tailored(honest: Tensor, attackers: int, rule: Reduction, times: float) -> Tensor:
    """Return the vector (d,) that moves a rule's result farthest from the honest mean.

    Args:
        honest: (n, d).
        attackers: how many send it.
        rule: of the run.
        times: the vector is at most so many times as long as the median honest one.
    """
    mean, best, farthest = honest.mean(0), honest.mean(0), -1.0
    norms = honest.norm(dim=1).sort().values
    longest = CLOSE * times * float(norms[(len(norms) - 1) // 2])
    for vector in _candidates(honest, longest):
        moved = float((_reduced(honest, vector, attackers, rule) - mean).norm())
        if moved > farthest:
            best, farthest = vector, moved
    return best


def _candidates(honest: Tensor, longest: float) -> Iterator[Tensor]:
    """Yield vectors along each deviation, ever farther, up to a length."""
    mean = honest.mean(0)
    for kind in DEVIATIONS:
        p = deviation(honest, kind)
        if bool(p.any()):
            most = largest(lambda gamma, p=p: float((mean + gamma * p).norm()) <= longest)  # type: ignore[misc]
            for size in torch.logspace(-3, 0, SIZES, dtype=torch.float64).tolist():
                yield mean + size * most * p


def _reduced(honest: Tensor, vector: Tensor, attackers: int, rule: Reduction) -> Tensor:
    """Return what a rule makes of the honest updates and the attackers' vector."""
    sent = {i: {"u": row} for i, row in enumerate([*honest, *[vector] * attackers])}
    facts = Facts(given=Bundle({"u": torch.zeros_like(vector)}))
    return rule_of(rule).weights(sent, dict.fromkeys(sent, 1.0), facts)[0]["u"]


@dataclass(frozen=True)
class Conspiracy:
    """What the attackers of one interaction send."""

    attack: str
    """``min_max``, ``min_sum`` or ``tailored``."""
    kind: Deviation
    """The deviation of the first two."""
    honest: Sequence[Numbers]
    """The updates of the honest clients."""
    rule: Reduction
    """Of the run."""
    attackers: int
    _made: dict[tuple[Place, ...], Tensor] = field(default_factory=dict, init=False)
    """Vectors (d,) by their places: all attackers send the same."""

    def updates(self, own: Numbers) -> dict[Place, Tensor]:
        """Return the updates that an attacker sends, by place.

        Where fewer than two honest clients have a class, the attacker's own update stays.
        """
        found = dict(own)
        for places in _vectors(own):
            holders = [each for each in self.honest if all(place in each for place in places)]
            if len(holders) < 2:
                continue
            if places not in self._made:
                self._made[places] = self._vector(
                    torch.stack([_flat(each, places) for each in holders]), places[0]
                )
            parts = self._made[places].split([own[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.view_as(own[place]).to(own[place].dtype)
        return found

    def _vector(self, honest: Tensor, first: Place) -> Tensor:
        if self.attack != "tailored":
            return (min_max if self.attack == "min_max" else min_sum)(honest, self.kind)
        few = len(honest) + self.attackers < self.rule.fewest_uploads
        rule = Reduction(reduce="median") if few else self.rule
        times = ODD[WEIGHTS] if first[0] == WEIGHTS else ODD_OTHERWISE
        return tailored(honest, self.attackers, rule, times)


def _vectors(own: Numbers) -> list[tuple[Place, ...]]:
    """Return the places that are one vector to a rule: all weights, all sets, or a class's row."""
    weights = tuple(place for place in own if place[0] == WEIGHTS)
    sets = tuple(place for place in own if len(place) == 1)
    rows = [(place,) for place in own if place not in weights and place not in sets]
    return [each for each in (weights, sets, *rows) if each]


def _flat(numbers: Numbers, places: Sequence[Place]) -> Tensor:
    return torch.cat([numbers[place].double().flatten() for place in places])
