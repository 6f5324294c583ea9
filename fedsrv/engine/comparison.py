"""Which uploads lie far out of those beside them, or stand out, and what records say of each.

Each upload is measured as it comes (:mod:`fedmodels.tensors.differences`). The bounds are relative
to the other uploads, and wide: docs/decisions/085-outliers-are-excluded.md has what honest uploads
are like.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedmodels.config.server import FEWEST_JUDGED
from fedmodels.tensors.differences import (
    GENERATORS,
    STATISTICS,
    VOTERS,
    WEIGHTS,
    Measured,
    Norms,
    against,
    cosines,
)

WARNED = 0.5
"""Fraction of the bounds of ``ODD`` beyond which an upload that counts gets a warning."""
AGAINST, SPREADS, FEW = -0.2, 2.0, FEWEST_JUDGED
"""An upload points against another one if their cosine is below ``AGAINST``. It stands out if it
points against more than half of its cohort, and also lies ``SPREADS`` standard deviations below
what is usual in the cohort. This takes at least ``FEW`` uploads. The standard deviation is the
robust estimate: 1.48 times the median absolute deviation."""
MIN_COHORT = 3
"""Uploads with which an odd one shows; of two nobody knows which is the odd one."""
ODD = {WEIGHTS: 10.0}
ODD_OTHERWISE = 100.0
"""Times the median of the cohort beyond which a part of an upload is odd."""
FAR, SUSPECT = 5.0, 1.0
"""An odd upload has also moved by more than this many times the norm of what its client was given:
``FAR`` before it is left out, ``SUSPECT`` before clients' failures are put down to it. A small move
does no harm, however still the others stand."""
NORM, GIVEN, COSINE = "difference_norm", "given_norm", "difference_cosine"
ROWS = {STATISTICS: "statistics_norm", GENERATORS: "generator_norm"}
PROTOTYPES, PROTOTYPE_NORM = "prototypes/", "prototype_norm"


@dataclass(frozen=True)
class Oddity:
    """In what an upload is odd."""

    part: str
    ratio: float
    """Its norm over the median of its cohort."""
    of: int
    """The uploads that were compared."""

    @property
    def beyond(self) -> float:
        """Return the ratio over its bound; above 1 it is odd."""
        return self.ratio / ODD.get(self.part, ODD_OTHERWISE)

    def __str__(self) -> str:
        """Return it as the end of a sentence about an upload."""
        what = self.part.partition("/")[0]
        how = "are" if self.part.startswith(PROTOTYPES) or self.part == GENERATORS else "moved"
        size = "as large" if how == "are" else "as far"
        return f"its {what} {how} {self.ratio:.3g} times {size} as the median of {self.of} uploads"


def oddities(
    cohort: Mapping[int, Measured],
    far: float,
    company: Sequence[Norms] = (),
    part_of: float = 1.0,
    *,
    all_but: int | None = None,
) -> dict[int, Oddity]:
    """Return which uploads are odd, by client: the part that lies farthest beyond its bound.

    Args:
        cohort: the uploads.
        far: an odd part has also moved by more than this many times the norm of what was given.
        company: norms of other uploads; they are part of the comparison.
        part_of: fraction of the bounds beyond which a part is odd.
        all_but: an odd one is beyond the bound of all but so many; by default of the median, of an
            even number the smaller one in the middle.
    """
    found: dict[int, Oddity] = {}
    every = [*(one.norms for one in cohort.values()), *company]
    for part in sorted({part for one in cohort.values() for part in one.norms}):
        sizes = sorted(norms[part] for norms in every if norms.get(part, 0.0) > 0)
        middle = (len(sizes) - 1) // 2 if all_but is None else len(sizes) - 1 - all_but
        median = sizes[max(middle, 0)] if sizes else math.inf
        for client, one in cohort.items():
            norm = one.norms.get(part, 0.0)
            here = Oddity(part, norm / median, len(sizes))
            is_odd = here.beyond > part_of and norm > far * one.given.get(part, 0.0)
            if is_odd and (client not in found or here.beyond > found[client].beyond):
                found[client] = here
    return found


def far_out(cohort: Mapping[int, Measured], company: Sequence[Norms] = ()) -> dict[int, str]:
    """Return the clients whose uploads lie too far out of their cohort, and why.

    Where an interaction takes a few uploads at a time, earlier ones keep them ``company``.
    """
    return {
        client: f"its upload is far out of its cohort: {oddity}"
        for client, oddity in oddities(cohort, FAR, company).items()
        if oddity.of >= MIN_COHORT
    }


def sketches(cohort: Mapping[int, Measured]) -> dict[int, Tensor]:
    """Return the sketch of each difference that has one."""
    return {client: one.sketch for client, one in cohort.items() if one.sketch is not None}


def standing_out(cohort: Mapping[int, Measured], all_but: int | None = None) -> dict[int, str]:
    """Return the clients whose uploads stand out of their cohort though they count, and in what.

    Each sign takes the agreement of others. So clients that lie cannot aim it at another one by
    themselves: honest uploads have to differ from it as well.

    Args:
        cohort: the uploads that count.
        all_but: how many of the cohort need not agree, fewer than half; by default just that many.
    """
    if len(cohort) < FEW:
        return {}
    fewer_than_half = (len(cohort) - 1) // 2
    free = fewer_than_half if all_but is None else min(all_but, fewer_than_half)
    large = oddities(cohort, 0.0, (), WARNED, all_but=free)
    found = {client: str(odd) for client, odd in large.items()}
    voices = against(sketches(cohort), AGAINST, free)
    if len(voices) < FEW:
        return found
    middle = statistics.median(cosine for _, cosine in voices.values())
    spread = 1.4826 * statistics.median(abs(cosine - middle) for _, cosine in voices.values())
    others = min(len(voices), VOTERS) - 1
    for client, (opposed, cosine) in voices.items():
        if cosine < min(AGAINST, middle - SPREADS * spread):
            found.setdefault(client, f"it points against {opposed} of {others} others")
    return found


def agreed_on(cohort: Mapping[int, Measured], liars: int | None) -> list[int]:
    """Return the clients that stand out by the voices of all but those that may lie.

    Args:
        cohort: the uploads that count.
        liars: how many of them may lie; by default as many as are fewer than a third. Where more
            may, nobody is returned: they could aim at an honest client.
    """
    most = (len(cohort) - 1) // 3
    free = most if liars is None else liars
    return [] if free > most else sorted(standing_out(cohort, free))


def rows(
    counting: Mapping[int, Measured], counts: Mapping[int, float], aside: Mapping[int, Measured]
) -> dict[str, dict[str, Any]]:
    """Return what the record says of each upload, by client.

    Args:
        counting: the uploads that count.
        counts: what each of them counts in the mean.
        aside: the uploads that were left out.
    """
    found = cosines(sketches(counting), counts, sketches(aside))
    return {
        str(client): _row(one, found.get(client, one.cosine))
        for client, one in sorted({**counting, **aside}.items())
    }


def _row(one: Measured, cosine: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {ROWS[part]: norm for part, norm in one.norms.items() if part in ROWS}
    longest = [norm for part, norm in one.norms.items() if part.startswith(PROTOTYPES)]
    facts = {NORM: one.norm, COSINE: cosine, PROTOTYPE_NORM: max(longest, default=None)}
    facts[GIVEN] = one.given.get(WEIGHTS)
    row |= {name: value for name, value in facts.items() if value is not None}
    return {name: value for name, value in row.items() if math.isfinite(value)}


def measured_in(row: dict[str, Any]) -> Measured:
    """Return what a record tells of an upload; prototypes of all levels are one part."""
    names = {WEIGHTS: NORM} if GIVEN in row else {}  # else the difference is of prototypes
    names |= {PROTOTYPES: PROTOTYPE_NORM, **ROWS}
    norms = {part: float(row[name]) for part, name in names.items() if name in row}
    return Measured(norms, {WEIGHTS: float(row[GIVEN])} if GIVEN in row else {})
