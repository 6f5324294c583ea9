"""FedMLP from its paper: equations 1 to 11, in plain torch.

Prototypes are ``{class: vector}``. Clusters are the best of all, found by trying every one.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.nn.functional import cross_entropy

from tests.independent.gldp import class_means
from tests.independent.rounds import Descent, mean_of


@dataclass
class Levels:
    """What the server sends beside the extractor."""

    everyone: dict = field(default_factory=dict)  # G
    centres: torch.Tensor = None  # P
    cluster: dict = field(default_factory=dict)  # of each class
    minority: frozenset = frozenset()  # J


def best_clusters(vectors, k):
    """Return the centres of the k clusters of least squared distance, and each vector's cluster."""
    best = (math.inf, [])

    def place(chosen, used):
        nonlocal best
        if len(chosen) == len(vectors):
            if used == k:
                groups = [vectors[[c == j for c in chosen]].double() for j in range(k)]
                cost = sum(float((group - group.mean(0)).square().sum()) for group in groups)
                best = min(best, (cost, chosen))
            return
        for j in range(min(used + 1, k)):
            place([*chosen, j], max(used, j + 1))

    place([], 0)
    chosen = best[1]
    return torch.stack([vectors[[c == j for c in chosen]].mean(0) for j in range(k)]), chosen


def smooth_l1(z, target):
    """Return Girshick's distance, a square below 1 and a line above."""
    r = (z - target).abs()
    return torch.where(r < 1, 0.5 * r * r, r - 0.5).mean()


def divergence(z, c, tau=1.0, backwards=False, unit=False):
    """Return KL(z || c) of two softmaxes, or KL(c || z)."""
    z, c = (v / v.norm() if unit else v for v in (z, c))
    p, q = torch.softmax(z / tau, 0), torch.softmax(c / tau, 0)
    p, q = (q, p) if backwards else (p, q)
    return (p * (p.log() - q.log())).sum()


def losses(z, y, levels, memory, centres, *, tau=1.0, backwards=False, unit=False):
    """Return L_P, L_I and L_S (eqs. 5, 7 and 6), one example after the other."""
    zero, count = 0 * z.sum(), len(z)
    l_p, l_i, rare = zero, zero, []
    for row, k in zip(z, y.tolist(), strict=True):
        if k in levels.everyone:
            l_p = l_p + smooth_l1(row, levels.everyone[k]) / count
        target = memory.get(k)  # eq. 8
        if target is None and centres is not None:  # eq. 9
            target = centres[(centres - row.detach()).norm(dim=1).argmin()]
        if target is not None:
            l_i = l_i + divergence(row, target, tau, backwards, unit) / count
        if k in levels.minority and k in levels.cluster:
            rare.append(smooth_l1(row, levels.centres[levels.cluster[k]]))
    return l_p, l_i, torch.stack(rare).mean() if rare else zero


def trained(
    f, g, memory, levels, x, y, *, epochs, lr, momentum, decay, alpha=1.0, used="pis", u=0,
    **readings,
):  # fmt: skip
    """Return f, g, the remembered and this task's prototypes after local training."""
    f, g, centres = copy.deepcopy(f), copy.deepcopy(g), None
    if memory:
        vectors = torch.stack([memory[k] for k in sorted(memory)])
        centres, _ = best_clusters(vectors, u or math.ceil(math.sqrt(len(memory))))
    descent = Descent([([*f.parameters(), *g.parameters()], decay)], lr, momentum)
    f.train()
    for _ in range(epochs):
        z = f(x)
        l_p, l_i, l_s = losses(z, y, levels, memory, centres, **readings)
        parts = {"p": l_p, "i": l_i, "s": alpha * l_s}
        descent.step(cross_entropy(g(z), y) + sum(parts[name] for name in used))  # eq. 11
    found = class_means(f, x, y)  # eq. 1
    return f, g, {**memory, **found}, found


def aggregated(extractors, reported, levels, counts, size, weights=None):
    """Return the mean extractor and the levels (eqs. 3, 4).

    ``counts`` holds {class: examples} of each pair of client and task.
    """
    named = sorted({k for rows in reported for k in rows})
    new = {k: torch.stack([r[k] for r in reported if k in r]).mean(0) for k in named}
    everyone = {**levels.everyone, **new}
    classes = sorted(everyone)
    vectors = torch.stack([everyone[k] for k in classes])
    centres, chosen = best_clusters(vectors, min(size, len(classes)))
    cluster = dict(zip(classes, chosen, strict=True))
    total = sum((Counter(table) for table in counts.values()), Counter())
    return mean_of(extractors, weights), Levels(everyone, centres, cluster, minority(total))


def minority(total):
    """Return the lower half by examples, the larger class first among equals; none if balanced."""
    if len(set(total.values())) < 2:
        return frozenset()
    return frozenset(sorted(total, key=lambda k: (total[k], -k))[: len(total) // 2])
