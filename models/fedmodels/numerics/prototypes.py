"""Class prototypes: how they are made, moved, averaged, released and predicted with.

Shapes: B batch, K classes, P rows, d coordinates of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.host.devices import to_device
from fedmodels.numerics.algebra import class_means
from fedmodels.tensors.bundle import Prototypes


@dataclass(frozen=True)
class ByClass:
    """Prototypes by class: a row for every class, and which of them exist."""

    vectors: Tensor  # (K, d); zeros where there is none
    known: Tensor  # (K,) bool

    @classmethod
    def of(
        cls, prototypes: Prototypes | None, num_classes: int, width: int, device: torch.device
    ) -> ByClass:
        """Lay prototypes out by class; ``None`` is a set without rows."""
        vectors = torch.zeros(num_classes, width, device=device)
        known = torch.zeros(num_classes, dtype=torch.bool, device=device)
        if prototypes is not None and len(prototypes.labels):
            labels = to_device(prototypes.labels.long(), device)
            vectors[labels] = to_device(prototypes.vectors, device)
            known.index_fill_(0, labels, True)  # `known[labels] = True` waits for a GPU
        return cls(vectors, known)

    def or_else(self, others: ByClass) -> ByClass:
        """Return these prototypes; others where none of these exists."""
        some = self.known.any()
        pairs = ((self.vectors, others.vectors), (self.known, others.known))
        return ByClass(*(torch.where(some, mine, theirs) for mine, theirs in pairs))


def class_prototypes(features: Tensor, labels: Tensor, num_classes: int) -> Prototypes:
    """Return the mean embedding of every class that occurs, with its number of examples."""
    return Prototypes.of(class_means(features, labels, num_classes), features.shape[1])


def drift(before: Prototypes | None, after: Prototypes | None) -> float | None:
    """Return how far prototypes moved: mean over classes of ``|after - before| / |before|``.

    A class whose prototype was 0, as of embeddings without a positive number, is left out. None
    where no other class is in both.
    """
    if before is None or after is None:
        return None
    old, new = (dict(zip(p.labels.tolist(), p.vectors, strict=False)) for p in (before, after))
    shifts = [(new[k] - old[k]).norm() / old[k].norm() for k in old if k in new and old[k].any()]
    return float(torch.stack(shifts).mean()) if shifts else None


def moved(old: Prototypes | None, new: Prototypes, beta: float) -> Prototypes:
    """Return ``beta * old + (1 - beta) * new`` class by class.

    A class of one side only is taken from it bit for bit. Counts are the newer ones where both have
    counts, and are not told otherwise.
    """
    if old is None:
        return new
    before = {int(k): i for i, k in enumerate(old.labels)}
    now = {int(k): i for i, k in enumerate(new.labels)}
    vectors: list[Tensor] = []
    counts: list[Tensor] = []
    counted = len(old.counts) == len(before) and len(new.counts) == len(now)
    for label in sorted(before.keys() | now.keys()):
        if label in now and label in before:
            was, found = old.vectors[before[label]], new.vectors[now[label]]
            vectors.append(beta * was + (1 - beta) * found)
        else:
            source, at = (new, now[label]) if label in now else (old, before[label])
            vectors.append(source.vectors[at].clone())
        if counted:
            counts.append(new.counts[now[label]] if label in now else old.counts[before[label]])
    labels = torch.tensor(sorted(before.keys() | now.keys()), dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    stacked = torch.stack(vectors) if vectors else old.vectors[:0].clone()
    return Prototypes(stacked, labels, torch.stack(counts) if counts else none)


def uncounted(prototypes: Prototypes) -> Prototypes:
    """Return the same vectors, without telling how many examples stand behind them."""
    return Prototypes(prototypes.vectors, prototypes.labels, prototypes.counts[:0].clone())


def only(prototypes: Prototypes, like: Prototypes) -> Prototypes:
    """Return the rows of the classes that ``like`` has, with its counts."""
    rows = {int(k): v for k, v in zip(prototypes.labels, prototypes.vectors, strict=True)}
    chosen: Mapping[int, tuple[Tensor, int]] = {
        k: (rows[k], n) for k, (_, n) in like.rows().items() if k in rows
    }
    return Prototypes.of(chosen, prototypes.vectors.shape[1])


def released(
    prototypes: Prototypes,
    normal: Callable[[Tensor, str], Tensor],
    *,
    clip_norm: float = 0.0,
    noise_std: float = 0.0,
    min_count: int = 1,
) -> Prototypes:
    """Return the prototypes that may leave a client.

    Args:
        prototypes: the client's, counted.
        normal: gives N(0, 1) numbers to blur a vector, whose class is named beside it; such as
            ``ctx.secret_normal``.
        clip_norm: longer vectors are scaled to this Euclidean norm; 0 leaves all as they are.
        noise_std: standard deviation of Gaussian noise on every coordinate, after clipping.
        min_count: classes of fewer examples are left out.
    """
    rows: dict[int, tuple[Tensor, int]] = {}
    for label, (vector, count) in sorted(prototypes.rows().items()):
        if count < min_count:
            continue
        if clip_norm > 0:
            norm = float(vector.double().norm())
            vector = vector * (clip_norm / norm) if norm > clip_norm else vector
        if noise_std > 0:
            vector = vector + noise_std * normal(vector, f"class/{label}")
        rows[label] = (vector, count)
    return Prototypes.of(rows, prototypes.vectors.shape[1])


def distance_per_example(z: Tensor, y: Tensor, table: ByClass) -> Tensor:
    """Return the mean over the batch of ``‖z - prototype‖² / d``; 0 for classes without one."""
    squared = (z - table.vectors[y]).square().mean(1)  # (B,)
    return (squared * table.known[y]).mean()


def nearest_scores(z: Tensor, table: ByClass, candidates: Tensor) -> Tensor:
    """Return minus the distance of embeddings (B, d) to each class's prototype (B, K), for argmax.

    Classes that are no candidates or have no prototype score -inf. Where no candidate has one,
    every class with a prototype is a candidate; where there is none at all, all score alike.
    """
    among = table.known & candidates
    among = torch.where(among.any(), among, table.known)
    exact = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(z.float(), table.vectors, compute_mode=exact)
    return torch.where(among.any(), torch.where(among, -distance, -torch.inf), 0.0)
