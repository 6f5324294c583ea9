"""The data that a client announced, and the values that its uploads may hold.

A spec fixes names, dtypes and shapes before memory is allocated. The checks here concern values: a
label is used as an index, a count as a share, a version tells old from new. The bounds on numbers
keep sums finite. Against plausible values that poison a model there is docs/robustness.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, Histogram, Prototypes
from fedmodels.tensors.packed_weights import BlockLayout, PackedWeights
from fedmodels.tensors.weighted_mean import MAX_INTEGER

MAX_WEIGHT = 1e6
"""Limit of a net's parameter and of a prototype's coordinate."""
MAX_STATISTIC = 1e15
"""Limit of all other numbers: statistics and variances are squares."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
NOT_NEGATIVE = ("running_var", "num_batches_tracked")
TrainsOn = Literal["task", "history", "memory", "replay"]
_USUAL = frozenset({torch.float32, torch.int64})
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DeclaredCounts:
    """The announced examples, which bound the counts in one client's upload."""

    client: int
    now: Tensor  # (K,) int64, examples of each class in the order's task
    met: Tensor  # (K,) in all its tasks up to that one
    trained: Tensor  # (K,) in all orders to train up to this one: a task may come several times

    def most_examples(self, trains_on: TrainsOn = "task") -> int:
        """Return the largest number of examples that the client can have trained on.

        Args:
            trains_on: all tasks so far count for ``history``, the order's task otherwise; for
                ``replay`` generated ones too, of each class as many as of the most frequent one.
        """
        if trains_on == "history":
            return int(self.met.sum())
        generated = len(self.now) * int(self.now.max()) if trains_on == "replay" else 0
        return self._examples + generated

    @cached_property
    def _examples(self) -> int:
        return int(self.now.sum())


def check_examples(count: float, most: int, what: str) -> None:
    """Check how many examples a client says it trained on; PayloadError of an impossible number."""
    if not 0 <= count <= most or count != int(count):
        raise PayloadError(f"{what} is {count:g}; at most {most} examples were announced")


def check_upload(upload: Bundle, announced: DeclaredCounts, most_examples: int) -> None:
    """Check the fields of most methods' uploads: numbers, examples, classes and histograms.

    Raises:
        PayloadError: names the first impossible value.
    """
    check_numbers(upload)
    if "num_examples" in upload.scalars:
        count = upload.scalars["num_examples"]
        check_examples(count, most_examples, "tensor 'scalars/num_examples'")
    for level, rows in upload.prototypes.items():
        check_classes(level, rows, announced.now)
    if upload.histogram is not None:
        check_histogram(upload.histogram, announced.now, announced.trained)


def check_numbers(upload: Bundle) -> None:
    """Check that numbers are small enough to be added up and squared.

    Raises:
        PayloadError: names the first number that is too large.
    """
    _check_sizes("weights", _not_plainly_small(upload.weights))
    for key, generator in upload.generators.items():
        _check_sizes(f"generators/{key}/tensors", generator.tensors)
    for level, rows in upload.prototypes.items():
        _check_sizes(f"prototypes/{level}", {"vectors": rows.vectors})
    for name, value in upload.scalars.items():
        if not abs(value) <= MAX_STATISTIC:
            raise PayloadError(f"tensor 'scalars/{name}' is {value:g}, beyond {MAX_STATISTIC:g}")


def check_classes(level: str, rows: Prototypes, now: Tensor) -> None:
    """Check that rows stand for classes the client has, each once, with counts it announced.

    There are no labels where the position of a row tells its class.

    Raises:
        PayloadError: names the first impossible label or count.
    """
    labels = rows.labels.long()
    _check_labels(f"prototypes/{level}/labels", labels.tolist(), len(now))
    if not len(rows.counts):
        return
    wrong = ((rows.counts < 1) | (rows.counts > now[labels])).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise PayloadError(
            f"tensor 'prototypes/{level}/counts' says {int(rows.counts[at])} examples of class "
            f"{int(labels[at])}; {int(now[labels[at]])} were announced"
        )


def check_histogram(histogram: Histogram, now: Tensor, total: Tensor) -> None:
    """Check that a histogram counts no more than was announced; a part may be empty.

    Raises:
        PayloadError: names the first class that has too many.
    """
    for part, counts, most in (("round", histogram.round, now), ("total", histogram.total, total)):
        over = ((counts < 0) | (counts > most)).nonzero() if len(counts) else counts
        if len(over):
            k = int(over[0])
            raise PayloadError(
                f"tensor 'histogram/{part}' counts {int(counts[k])} of class {k}; at most "
                f"{int(most[k])} were announced"
            )


def _check_labels(key: str, labels: Iterable[int], num_classes: int) -> None:
    seen: set[int] = set()
    for label in labels:
        if not 0 <= label < num_classes:
            raise PayloadError(f"tensor {key!r} names class {label} of {num_classes}")
        if label in seen:
            raise PayloadError(f"tensor {key!r} names class {label} twice")
        seen.add(label)


def _not_plainly_small(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors that may be too large, or below zero where they must not be.

    The sum of squares over the whole block is the fastest way to read it. It says nothing of signs,
    nor of integers, which look like other floats there.
    """
    if not isinstance(weights, PackedWeights) or not weights.layout.dtypes <= _USUAL:
        return weights
    if not weights.block.is_cpu:
        return weights
    block = weights.block.view(torch.float32)
    if not torch.dot(block, block) <= MAX_WEIGHT * MAX_WEIGHT:
        return weights
    special = _special_of(weights.names, weights.layout)
    names = () if special.are_sound(weights.block) else special.names
    return {name: weights[name] for name in names}


@dataclass(frozen=True)
class _Special:
    """The tensors of a block that need more than a look at the sum of its squares.

    They are looked at with NumPy: operations of torch let other threads have the interpreter, and
    these are small ones in a thread among many.
    """

    names: tuple[str, ...]
    not_negative: Places
    """Where float32 elements lie that must not be below zero."""
    integers: Places
    """Where int64 elements lie."""
    least: Places
    """The smallest value that each of the integers may have."""

    def are_sound(self, block: Tensor) -> bool:
        """Tell whether no element is too large or, where that is wrong, below zero."""
        held = block.numpy()
        floats, integers = (
            held.view(np.float32)[self.not_negative], held.view(np.int64)[self.integers]
        )  # fmt: skip
        are_small = (integers >= self.least) & (integers <= MAX_INTEGER)
        return bool((floats >= 0).all() and are_small.all())


@lru_cache(maxsize=64)
def _special_of(names: tuple[str, ...], layout: BlockLayout) -> _Special:
    """Return the tensors of these names that need another look."""
    floats, integers, least = ([np.zeros(0, np.int64)] for _ in range(3))
    found = []
    facts = zip(names, layout.facts, layout.offsets, layout.ends, strict=True)
    for name, (dtype, _), begin, end in facts:
        never_below_zero = name.endswith(NOT_NEGATIVE)
        if dtype == torch.int64:
            integers.append(np.arange(begin // 8, end // 8))
            low = 0 if never_below_zero else -MAX_INTEGER
            least.append(np.full_like(integers[-1], low))
        elif never_below_zero:
            floats.append(np.arange(begin // 4, end // 4))
        else:
            continue
        found.append(name)
    return _Special(tuple(found), *map(np.concatenate, (floats, integers, least)))


def _check_sizes(prefix: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.numel() or tensor.dtype == torch.bool:
            continue
        most: float = MAX_STATISTIC if name.endswith(STATISTICS) else MAX_WEIGHT
        if not tensor.is_floating_point():
            most = MAX_INTEGER
        low, high = (edge.item() for edge in torch.aminmax(tensor))
        if not (-most <= low and high <= most):
            worst = low if -low > high else high
            raise PayloadError(f"tensor '{prefix}/{name}' holds {worst:g}, beyond {most:g}")
        if low < 0 and name.endswith(NOT_NEGATIVE):
            raise PayloadError(f"tensor '{prefix}/{name}' holds {low:g}; it cannot be below zero")
