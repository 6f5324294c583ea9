"""How the uploads of one interaction become one result: the mean, unless a run says otherwise.

Every method whose reduction is a mean, of weights or of prototypes, takes it from its
:class:`Uploads`, and these take it from a rule. The rule here is the mean itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
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


def reduced_prototypes(
    sets: Mapping[int, Prototypes],
    num_classes: int,
    width: int,
    level: str = "",
    rule: AggregationRule = MEAN,
    facts: Facts | None = None,
    *,
    uniform: bool,
) -> tuple[Prototypes, Shares, list[int]]:
    """Return one prototype of each class from those of the clients that report it.

    Clients count alike if ``uniform``; otherwise by their number of examples of the class.

    Returns:
        The prototypes with the sums of the counts, each client's mean share over the classes that
        it reports, and the classes that too few clients have for the rule, ascending.

    Raises:
        PayloadError: a client reports a class that does not exist.
    """
    found: dict[int, dict[int, tuple[Tensor, int]]] = {}
    for client, reported in sets.items():
        for label, row in reported.rows().items():
            if not 0 <= label < num_classes:
                raise PayloadError(f"client {client} reports a prototype of class {label}")
            found.setdefault(label, {})[client] = row
    facts = facts or Facts()
    given = facts.given.prototypes.get(level)
    known = [] if given is None else zip(given.labels.tolist(), given.vectors, strict=False)
    centres: dict[int, Tensor] = dict(known)
    rows: dict[int, tuple[Tensor, int]] = {}
    shares: dict[int, list[float]] = {client: [] for client in sets}
    rare = sorted(label for label, held in found.items() if len(held) <= rule.few_holders)
    for label, held in found.items():
        counts = {client: count for client, (_, count) in held.items()}
        vectors = {client: vector for client, (vector, _) in held.items()}
        centre = centres.get(label)
        if rule.keeps_rare_classes and label in rare:
            if centre is not None:
                rows[label] = centre, sum(counts.values())
            for client in held:
                shares[client].append(0.0)
            continue
        vector, parts = rule.rows(vectors, counts, uniform, centre, facts)
        rows[label] = vector, sum(counts.values())
        for client, part in parts.items():
            shares[client].append(part)
    mean = {client: sum(parts) / len(parts) for client, parts in shares.items() if parts}
    return Prototypes.of(rows, width), mean, rare


def mean_prototypes(
    sets: Mapping[int, Prototypes], num_classes: int, width: int, *, uniform: bool
) -> Prototypes:
    """Return the mean over clients, class by class; arguments as of :func:`reduced_prototypes`.

    Raises:
        PayloadError: a client reports a class that does not exist.
    """
    return reduced_prototypes(sets, num_classes, width, uniform=uniform)[0]
