"""Whether what is watched moved in one class alone, where sessions are named.

The tests within classes look at what all classes share, and count the rest as noise: a person sits
down anew. Whether one class moved more than it does from session to session can be known only where
it has several sessions, each a cell. Of each class and number the means of sessions then and now
are compared by a t-test with the variance between the sessions of this class, moderated by that of
all its numbers (Smyth 2004). Numbers depend on each other, which moderation does not know: the
variance is steadier for it, but the freedom is taken to be that of the sessions of the class alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmodels.numerics.data_drift import (
    MIN_DF,
    Floats,
    Summary,
    gap_of_means,
    gap_of_spreads,
    joined,
    moderated,
)


def in_one_class(
    earlier: Sequence[Summary], now: Summary, resolution: float
) -> tuple[Floats, Floats]:
    """Return the p-value (K (v + q),) of each number's shift in each class, and its amount.

    NaN where a class has fewer than four sessions in all, or sessions are not named.
    """
    from scipy.special import stdtr

    a, b = joined(earlier), joined([now])
    width, values, count = a.cells.shape[1], len(a.noise), now.mix.shape[1]
    p, amounts = np.full((count, width), np.nan), np.zeros((count, width))
    if not all(bool(one.apart) for one in (*earlier, now)):
        return p.ravel(), amounts.ravel()
    both = [label for label in np.intersect1d(a.classes, b.classes) if label < count]
    pairs = {
        int(label): [(one.cells[mine], one.sizes[mine])
                     for one in (a, b) for mine in [one.classes == label]]
        for label in both
    }  # fmt: skip
    noise = (a.noise + b.noise) / 2
    all_noise = np.concatenate([noise, np.full(width - values, 0.5)])
    for label, ((x, before), (y, after)) in pairs.items():
        df = len(x) + len(y) - 2
        if df < MIN_DF:
            continue
        shift = y.mean(axis=0) - x.mean(axis=0)
        left = ((x - x.mean(axis=0)) ** 2).sum(axis=0) + ((y - y.mean(axis=0)) ** 2).sum(axis=0)
        least = all_noise * np.mean(1 / np.concatenate([before, after]))
        variance, _ = moderated(left / df, least, df)
        variance = np.maximum(np.maximum(variance, least), resolution**2)
        t = shift / np.sqrt(variance * (1 / len(x) + 1 / len(y)))
        p[label] = 2 * stdtr(df, -np.abs(t))
        with np.errstate(divide="ignore", invalid="ignore"):
            by = np.nan_to_num(np.abs(shift[:values]) / np.sqrt(noise), posinf=1e9)
        amounts[label] = [*gap_of_means(by), *gap_of_spreads(shift[values:])]
    return p.ravel(), amounts.ravel()
