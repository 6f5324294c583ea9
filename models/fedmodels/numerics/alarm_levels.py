"""Which of a stream of p-values are told, so that few of what is told is chance.

Levels are those of LORD with memory decay, Rebjock, Kurt, Januschowski and Callot, Online False
Discovery Rate Control for Anomaly Detection in Time Series, NeurIPS 2021,
https://arxiv.org/abs/2112.03196: level t is

    alpha η max(γ_t, 1 − δ) + alpha Σ_r δ^(t − r) γ_(t − r)

over earlier discoveries r, with γ_j = 0.0772 log(max(j, 2)) / (j exp(√log j)) of Javanmard and
Montanari 2018. Plain LORD's levels go to 0 in a stream without discoveries; these do not. So they
hold the share of false discoveries among those of the last ``memory`` tests, not of all time.

Deviation: discoveries of more than 8 ``memory`` tests ago are forgotten (their weight is < e^−8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

ALPHA, ETA = 0.05, 0.5
ENDS_AT = 0.05
"""An alarm that was told lasts until a p-value is larger."""
AGAIN = 2.0
"""An alarm that lasts is told again where the amount is so many times what was told."""


@dataclass(frozen=True)
class Levels:
    """The level of the next test of a stream."""

    memory: int
    """1 / (1 − δ)."""
    tests: int = 0
    found: tuple[int, ...] = ()
    """At which tests there were discoveries, the first test being 1."""

    def level(self) -> float:
        """Return the p-value up to which the next test is a discovery."""
        at, decay = self.tests + 1, 1 - 1 / self.memory
        payouts = math.fsum(decay ** (at - r) * _gamma(at - r) for r in self.found)
        return ALPHA * (ETA * max(_gamma(at), 1 / self.memory) + payouts)

    def after(self, p: float) -> Levels:
        """Return the levels after one more test."""
        at = self.tests + 1
        found = [r for r in self.found if at - r < 8 * self.memory]
        return replace(self, tests=at, found=(*found, at) if p <= self.level() else tuple(found))


def _gamma(j: int) -> float:
    return 0.07720838 * math.log(max(j, 2)) / (j * math.exp(math.sqrt(math.log(j))))


@dataclass
class Alarms:
    """Which alarms are on, by key, and whether to tell of one."""

    levels: Levels
    lasting: dict[str, float] = field(default_factory=dict)
    """The amount that was told last, of each alarm that is on."""

    def tells(self, key: str, p: float, amount: float) -> bool:
        """Take in a test; return whether people are told.

        What is told stays an alarm, without further lines, until the p-value says that it is over.
        Meanwhile it is no test of the stream: it would pay for the chance findings of others.
        """
        if key in self.lasting:
            if p > ENDS_AT:
                del self.lasting[key]
            elif amount >= AGAIN * self.lasting[key]:
                self.lasting[key] = amount
                return True
            return False
        is_found, self.levels = p <= self.levels.level(), self.levels.after(p)
        if is_found:
            self.lasting[key] = amount
        return is_found
