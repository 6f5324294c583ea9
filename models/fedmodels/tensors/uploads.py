"""What the clients of one interaction sent, as the server half of a method sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeVar

from fedmodels.errors import ConfigError, TooFewClients
from fedmodels.tensors.aggregation_rule import MEAN, AggregationRule, Facts, Shares
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights

K = TypeVar("K")
Reduction = Literal["mean", "each"]
"""What a server half reads of its uploads' weights: their mean alone, or each upload's."""


@dataclass(frozen=True)
class Summed:
    """The mean of one group of a secure sum; nobody saw a single upload."""

    mean: Bundle
    """The mean of their weights, and of their prototypes by class."""
    count: float
    """The sum of what they count."""
    by_examples: bool
    """Whether prototypes count by their examples; else clients count alike."""


class Uploads(Mapping[int, Bundle]):
    """The uploads by client, in client-id order, and what the run's rule makes of them.

    The rule is the mean, unless ``[server] reduce`` names another one. A server half takes means of
    weights and of prototypes from here alone, so the rule of a run (:class:`AggregationRule`) holds
    for every method. Where the reduction is the mean, an upload's own weights cannot be read,
    whether they are still in memory or were added up as they came: a method that runs with small
    uploads runs with large ones too.
    """

    def __init__(
        self,
        sent: Mapping[int, Bundle],
        count: Callable[[Bundle], float],
        reduction: Reduction = "each",
        folded: Weights | None = None,
        rule: AggregationRule = MEAN,
        facts: Facts | None = None,
        sums: Sequence[Summed] | None = None,
        stands_for: Collection[int] | None = None,
        expected: float | None = None,
    ) -> None:
        """Take the uploads as they came.

        Args:
            sent: the uploads by client.
            count: gives what an upload's weights count in the mean.
            reduction: what may be read of their weights.
            folded: the mean, if it was taken as the uploads came; they hold no weights then.
            rule: makes one result of several uploads.
            facts: what the rule may know of the interaction.
            sums: what groups of uploads come to; these hold no weights and no prototypes then.
            stands_for: the clients that the only upload stands for, all alike, where it does; there
                may be none.
            expected: how many clients the only upload is a mean over, where nobody may learn how
                many came.
        """
        self._sums = None if sums is None else dict(enumerate(sums))
        self._sent, self._count, self._reduction, self._folded = sent, count, reduction, folded
        self._rule, self._facts = rule, facts or Facts()
        self._stands_for = None if stands_for is None else tuple(stands_for)
        self._expected = expected
        self._shares: dict[str, Shares] = {}
        self.rare_classes: dict[str, list[int]] = {}
        """By level the classes whose prototypes too few clients have for the rule."""
        self.was_asked = False
        """Whether a mean was taken."""
        self._seen = sent
        if sums is not None:
            hidden: Any = _Unread(_SUMMED)
            self._seen = {c: replace(u, weights=hidden, prototypes=hidden) for c, u in sent.items()}
        elif reduction == "mean":
            self._seen = {c: replace(u, weights=_Unread(_MEAN)) for c, u in sent.items()}

    def __getitem__(self, client: int) -> Bundle:
        return self._seen[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def is_ruled(self) -> bool:
        """Tell whether another rule than the mean makes one result of the uploads."""
        return self._rule is not MEAN

    @property
    def is_folded(self) -> bool:
        """Tell whether the mean was taken as the uploads came: nobody can be taken out of it."""
        summed = self._folded is not None or self._sums is not None
        return summed or self._stands_for is not None

    @property
    def shares(self) -> Mapping[str, Shares]:
        """Each client's share of what was taken so far: of ``weights``, or of a level."""
        return self._shares

    def share_of_each(self) -> Shares:
        """Return each client's share of the weights that were taken, or else of prototypes.

        Of several levels of prototypes it is the mean over those that a client has.
        """
        if self._stands_for is not None:
            return dict.fromkeys(self._stands_for, 1 / max(1, len(self._stands_for)))
        if "weights" in self._shares:
            return self._shares["weights"]
        parts: dict[int, list[float]] = {}
        for shares in self._shares.values():
            for client, share in shares.items():
                parts.setdefault(client, []).append(share)
        return {client: sum(found) / len(found) for client, found in parts.items()}

    def took_part(self) -> float:
        """Return how many clients count; where it may not be known, how many were expected."""
        if self._expected is not None:
            return self._expected
        if self._stands_for is not None:
            return float(len(self._stands_for))
        return float(sum(self._count(upload) > 0 for upload in self._sent.values()))

    def mean(self) -> Weights | None:
        """Return the weighted mean of what weights came; None without any, or if nothing counts."""
        self.was_asked = True
        if self._sums is not None:
            means = {place: one.mean.weights for place, one in self._sums.items()}
            parts = {place: one.count for place, one in self._sums.items()}
            return self._rule.weights(means, parts, self._facts)[0] if any(means.values()) else None
        counts = {client: self._count(upload) for client, upload in self._sent.items()}
        total = sum(counts.values())
        if self._folded is not None or not total:
            if self._folded and total:
                self._shares["weights"] = {c: count / total for c, count in counts.items()}
            return self._folded or None
        sent = {client: upload.weights for client, upload in self._sent.items()}
        if not any(sent.values()):
            return None
        mean, self._shares["weights"] = self._rule.weights(sent, counts, self._facts)
        return mean

    def means(
        self,
        groups: Mapping[K, Mapping[int, Weights]],
        counts: Mapping[K, Mapping[int, float]] | None = None,
    ) -> dict[K, Weights]:
        """Return the weighted mean of each group of weights, where clients trained several models.

        A group of which nothing counts, or that is too small for the run's rule, is left out.

        Args:
            groups: by key the weights that clients of the group sent, all of the same names.
            counts: by key what each client counts there; by default what its upload counts.

        Raises:
            TooFewClients: every group is too small for the run's rule.
        """
        self.was_asked = True
        if counts is None:
            each = {client: self._count(upload) for client, upload in self._sent.items()}
            counts = {key: {client: each[client] for client in groups[key]} for key in groups}
        found, shares = dict[K, Weights](), dict[int, float]()
        total = sum(sum(parts.values()) for parts in counts.values())
        small = list[TooFewClients]()
        for key, sent in groups.items():
            if not (own := sum(counts[key].values())):
                continue
            try:
                found[key], of_group = self._rule.weights(sent, counts[key], self._facts)
            except TooFewClients as error:
                small.append(error)
            else:
                for client, share in of_group.items():
                    shares[client] = shares.get(client, 0.0) + share * own / total
        if small and not found:
            raise small[0]
        self._shares["weights"] = shares
        return found

    def mean_sets(self, levels: Iterable[str]) -> dict[str, Prototypes]:
        """Return the mean of each level's sets of the uploads that count, row by row."""
        self.was_asked = True
        counting = {c: u for c, u in self._sent.items() if self._count(u)}
        names = [*levels]
        sent: dict[int, Weights] = {
            c: {name: u.prototypes[name].vectors for name in names} for c, u in counting.items()
        }
        counts = {client: self._count(upload) for client, upload in counting.items()}
        means, shares = self._rule.sets(sent, counts, self._facts)
        self._shares |= dict.fromkeys(names, shares)
        return {level: Prototypes.by_position(mean) for level, mean in means.items()}

    def mean_prototypes(
        self, level: str, num_classes: int, width: int, *, uniform: bool
    ) -> Prototypes:
        """Return the mean prototype (d,) of each class over the clients that report it, counted.

        Args:
            level: which prototypes.
            num_classes: K.
            width: d.
            uniform: every client counts alike; otherwise by its number of examples of the class.

        Raises:
            PayloadError: a client reports a class that does not exist.
            ConfigError: a sum under masks did not weigh prototypes as ``uniform`` says.
        """
        from fedmodels.tensors.prototype_means import reduced_prototypes  # many methods have none

        self.was_asked = True
        if self._sums is not None:
            if any(one.by_examples is uniform for one in self._sums.values()):
                raise ConfigError(
                    "the masked sum of prototypes is weighted differently than the method's "
                    "mean: set weighs_prototypes accordingly"
                )
            uniform = False  # a group counts by its clients then
        sent = self._sent if self._sums is None else {g: s.mean for g, s in self._sums.items()}
        sets = {client: bundle.prototypes[level] for client, bundle in sent.items()}
        found, shares, rare = reduced_prototypes(
            sets, num_classes, width, level, self._rule, self._facts, uniform=uniform
        )
        if rare:
            self.rare_classes[level] = rare
        if self._sums is None:  # else they are shares of groups
            self._shares[level] = shares
        return found

    def of(self, clients: Mapping[int, object] | set[int]) -> Uploads:
        """Return the uploads of some of the clients; only where they were not folded."""
        assert not self.is_folded, "no upload can be removed from a running mean"
        sent = {c: upload for c, upload in self._sent.items() if c in clients}
        return Uploads(sent, self._count, self._reduction, None, self._rule, self._facts)

    def alone(self, client: int) -> Uploads:
        """Return the upload of one client, which is its own mean; as :meth:`of`."""
        assert not self.is_folded, "no upload can be removed from a running mean"
        return Uploads({client: self._sent[client]}, self._count, self._reduction)


class _Unread(Mapping[str, Any]):
    """What the method said it does not read, or nobody can read."""

    def __init__(self, line: str) -> None:
        self._line = line

    def __getitem__(self, name: str) -> Any:
        self._refuse()

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(self._line)


_MEAN = (
    "the method's reduction is 'mean', but its server half reads the weights of single "
    "uploads: let it take uploads.mean(), or declare reduction = 'each'"
)
_SUMMED = (
    "masks hide single uploads, and the method's server half reads the weights or the prototypes "
    "of one: let it take uploads.mean() and uploads.mean_prototypes()"
)
