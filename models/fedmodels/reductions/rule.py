"""The rule of a run: ``[server] reduce`` and what is done before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from fedmodels.config.reduction import Reduction
from fedmodels.errors import TooFewClients
from fedmodels.reductions import coefficients, coordinates
from fedmodels.reductions.rows import Numbers, Rows
from fedmodels.tensors.aggregation_rule import MEAN, AggregationRule, Facts, Shares
from fedmodels.tensors.bundle import Bundle, Weights

BY_VALUE = ("median", "trimmed_mean")
BY_COORDINATE = (*BY_VALUE, "bulyan")
OF_FEW = Reduction(reduce="median")
"""The rule for a class that fewer clients have prototypes of than the run's rule needs."""


def rule_of(settings: Reduction) -> AggregationRule:
    """Return the rule of a run."""
    return RobustRule(settings) if settings.is_robust else MEAN


@dataclass(frozen=True)
class RobustRule(AggregationRule):
    """A rule whose result stays useful where some uploads lie.

    A client's number of examples is what the client says, and one that lies would choose its own
    weight. So it says only whether an upload counts at all: those that do count alike, in
    ``norm_clipped`` and ``geometric_median`` too, whose papers weigh by it. Every floating-point
    number of an upload is a coordinate, statistics of batch normalisation too.
    """

    settings: Reduction
    threads: int | None = None
    """At most so many; by default as many as there are cores. The bits are the same."""
    reads_each: bool = field(default=True, init=False)

    @property
    def few_holders(self) -> int:  # type: ignore[override]
        """How many holders of a class are too few to tell who lies."""
        return self.settings.few_holders

    @property
    def keeps_rare_classes(self) -> bool:  # type: ignore[override]
        """Whether such a class stays as clients were given it."""
        return self.settings.rare_classes == "keep"

    def weights(
        self, sent: Mapping[int, Weights], counts: Mapping[int, float], facts: Facts
    ) -> tuple[Weights, Shares]:
        """Return the result, and each client's share; TooFewClients if the rule needs more."""
        counting = {client: weights for client, weights in sent.items() if counts[client] > 0}
        if len(counting) < self.settings.fewest_uploads:
            raise TooFewClients(
                f"{self.settings.named} needs {self.settings.fewest_uploads} uploads that count, "
                f"and interaction {facts.interaction + 1} has {len(counting)}: the state before it "
                "is kept, and --resume continues once enough clients are back"
            )
        found, shares = self._reduced(counting, facts.given.weights, facts.seed)
        return found, {client: shares.get(client, 0.0) for client in sent}

    def sets(
        self, sent: Mapping[int, Weights], counts: Mapping[int, float], facts: Facts
    ) -> tuple[Weights, Shares]:
        """Return the result of sets of rows: a client's sets are one vector."""
        given = {level: p.vectors for level, p in facts.given.prototypes.items()}
        return self.weights(sent, counts, Facts(facts.seed, facts.interaction, Bundle(given)))

    def rows(
        self,
        sent: Mapping[int, Tensor],
        counts: Mapping[int, int],
        uniform: bool,
        centre: Tensor | None,
        facts: Facts,
    ) -> tuple[Tensor, Shares]:
        """Return the result of one class's prototypes; the median where too few clients have it.

        Differences are from the prototype that clients were given; without one, from the median.
        """
        alike = uniform or not sum(counts.values())
        holders = [client for client, n in counts.items() if alike or n > 0]
        rows: dict[int, Weights] = {client: {"row": sent[client]} for client in holders}
        few = RobustRule(OF_FEW, threads=1)
        if centre is None:
            centre = few._reduced(rows, {}, 0)[0]["row"]
        rule = self if len(holders) >= self.settings.fewest_uploads else few
        found, shares = rule._reduced(rows, {"row": centre}, facts.seed)
        return found["row"], {client: shares.get(client, 0.0) for client in sent}

    def _reduced(
        self, sent: Mapping[int, Weights], centre: Weights, seed: int
    ) -> tuple[Weights, dict[int, float]]:
        """Return the result of enough uploads, which count alike, and each client's share of it."""
        rows = Rows([*sent.values()], self.threads)
        gram = rows.gram(centre) if self._compares else np.zeros((len(rows), len(rows)))
        mixing = self._mixing(gram, seed)
        if mixing is not None:
            gram = mixing @ gram @ mixing.T
        if self.settings.reduce in BY_COORDINATE:
            found, parts = self._by_coordinate(rows, gram, mixing)
        else:
            parts = self._parts(gram)
            parts = parts if mixing is None else parts @ mixing
            found = rows.sum(parts, centre)
        return found, dict(zip(sent, parts.tolist(), strict=True))

    @property
    def _compares(self) -> bool:
        """Whether inner products of uploads are needed."""
        return self.settings.mix == "nearest" or self.settings.reduce not in BY_VALUE

    def _mixing(self, gram: Numbers, seed: int) -> Numbers | None:
        """Return the mixing (m, n) that comes before the rule; None where there is none."""
        if self.settings.mix == "bucketing":
            return coefficients.bucketing(len(gram), self.settings.bucket_size or 2, seed)
        if self.settings.mix == "nearest":
            squared = coefficients.distances(gram)
            return coefficients.nearest_mixing(squared, self.settings.attackers or 0)
        return None

    def _by_coordinate(
        self, rows: Rows, gram: Numbers, mixing: Numbers | None
    ) -> tuple[Weights, Numbers]:
        """Return the result of each coordinate by itself, and each upload's share of it."""
        f, chosen = self.settings.attackers or 0, list(range(len(gram)))
        if self.settings.reduce == "bulyan":
            chosen = coefficients.bulyan_selection(coefficients.distances(gram), f)
            make = partial(coordinates.mean_near_median, kept=len(chosen) - 2 * f)
        elif self.settings.reduce == "trimmed_mean":
            make = partial(coordinates.trimmed_mean, trimmed=f)
        else:
            make = partial(coordinates.median)
        if mixing is None:
            found, kept = rows.only(chosen).by_column(make)
        else:
            found, kept = rows.by_column(make, mixing[chosen])
        parts = np.zeros(len(gram))
        parts[chosen] = kept / kept.sum()
        return found, parts if mixing is None else parts @ mixing

    def _parts(self, gram: Numbers) -> Numbers:
        """Return what each row counts in a result that is a sum of rows."""
        rule, count = self.settings, len(gram)
        f, factor, iterations = rule.attackers or 0, rule.clip_factor or 1.0, rule.iterations or 3
        match rule.reduce:
            case "norm_clipped":
                return coefficients.norm_clipped(gram, rule.clip_norm, factor)
            case "centered_clipping":
                return coefficients.centered_clipping(gram, rule.clip_norm, factor, iterations)
            case "geometric_median":
                return coefficients.geometric_median(gram, iterations)
        most = 1 if rule.reduce == "krum" else count - f
        chosen = coefficients.krum(coefficients.distances(gram), f, most)
        parts = np.zeros(count)
        parts[chosen] = 1 / most
        return parts
