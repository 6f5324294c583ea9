"""One prototype of each class from those of the clients that have the class."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.aggregation_rule import MEAN, AggregationRule, Facts, Shares
from fedmodels.tensors.bundle import Prototypes


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
