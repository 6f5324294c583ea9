"""How the uploads of one interaction become one result: the mean, unless a run says otherwise.

Every method whose reduction is a mean, of weights or of prototypes, takes it from its
:class:`Uploads`, and these take it from a rule. The rule here is the mean itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.weighted_mean import mean_of_vectors, weighted_mean

Shares = Mapping[int, float]
"""The part of each client's upload in a result; under the mean the shares sum to 1."""


@dataclass(frozen=True)
class Facts:
    """What a rule may know of an interaction beside its uploads."""

    seed: int = 0
    """Of the run and the interaction: all that a rule draws derives from it."""
    interaction: int = 0
    given: Bundle = field(default_factory=Bundle)
    """The state that everybody was given to train from; tensors may be missing."""


class AggregationRule:
    """The weighted mean; the base of other rules.

    What a rule promises:

    - It is a pure function of its arguments: the same bits on any number of threads, in any layout
      of processes, and again after a restart. What it draws derives from ``facts.seed``. Whatever
      needs a memory keeps it outside, where a commit stores it.
    - It does not modify uploads. They may lie in mapped files: it reads a block at a time.
    - The result has the names, shapes and dtypes of the uploads. Integer tensors come out as the
      largest, booleans as "any", as in the mean.
    - Clients come in the order of their ids, and every count is finite and not negative; what
      counts 0 has no part in the result.
    """

    few_holders: int = 0
    """A class of prototypes that so many clients or fewer have is one whose holders may all lie."""
    keeps_rare_classes: bool = False
    """Whether such a class stays as clients were given it; a class that nobody was given is left
    out."""
    reads_each: bool = False
    """Whether it reads uploads one by one. Then they are added up neither as they come nor on
    their way."""

    def weights(
        self, sent: Mapping[int, Weights], counts: Mapping[int, float], facts: Facts
    ) -> tuple[Weights, Shares]:
        """Return the result of weights by client, and each client's share of it.

        Args:
            sent: the weights.
            counts: what each client's weights count; they sum to more than 0.
            facts: of the interaction.
        """
        total = sum(counts.values())
        found = weighted_mean([*sent.values()], [*counts.values()], total)
        return found, {client: count / total for client, count in counts.items()}

    def sets(
        self, sent: Mapping[int, Weights], counts: Mapping[int, float], facts: Facts
    ) -> tuple[Weights, Shares]:
        """Return the result of sets of rows (G, d) by level and client; arguments as above."""
        total = sum(counts.values())
        shares = {client: count / total for client, count in counts.items()}
        return weighted_mean([*sent.values()], [*shares.values()]), shares

    def rows(
        self,
        sent: Mapping[int, Tensor],
        counts: Mapping[int, int],
        uniform: bool,
        centre: Tensor | None,
        facts: Facts,
    ) -> tuple[Tensor, Shares]:
        """Return the result of one class's prototypes (d,), of the clients that report the class.

        Args:
            sent: the prototypes.
            counts: each client's examples of the class.
            uniform: every client counts alike; otherwise by its examples, if there are any.
            centre: the prototype of the class that everybody was given, if there was one.
            facts: of the interaction.
        """
        shares = shares_of(counts, uniform=uniform)
        return mean_of_vectors([*sent.values()], [*shares.values()]), shares


MEAN = AggregationRule()


def shares_of(counts: Mapping[int, int], *, uniform: bool) -> dict[int, float]:
    """Return what each client's prototype of a class counts, in all 1."""
    total = sum(counts.values())
    alike = uniform or not total
    return {c: 1 / len(counts) if alike else n / total for c, n in counts.items()}
