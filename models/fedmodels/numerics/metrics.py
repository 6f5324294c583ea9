"""The scores of a run.

A client reports mergeable :class:`ClassCounts`, never predictions; every score is made from them.
Scores are fractions in 0…1. K is the number of classes, T of tasks; means over clients are
unweighted unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.errors import DataError

VALIDATION = "validation"
"""Begins the names of the validation parts that clients score, such as ``validation/0``, and of the
metrics of them: what chooses a round or a run looks at these alone."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """The sufficient statistics of a classifier on a test set; they add up over parts of it."""

    support: Ints  # (K,) examples of each class
    predicted: Ints  # (K,) how often each class was predicted
    correct: Ints  # (K,) how often it was predicted rightly
    loss_sum: float = 0.0  # sum of the examples' losses
    confusion: Ints | None = None  # (K, K) examples by true class and predicted class, if counted

    @classmethod
    def zeros(cls, num_classes: int) -> ClassCounts:
        """Return the counts of an empty test set."""
        return cls(*np.zeros((3, num_classes), dtype=np.int64))

    @classmethod
    def of(
        cls,
        outputs: Tensor | ArrayLike,
        labels: Tensor | ArrayLike,
        num_classes: int,
        confusion: bool = False,
    ) -> ClassCounts:
        """Count a batch.

        Args:
            outputs: logits (n, K), whose cross-entropy is summed too, or predicted classes (n,).
            labels: (n,) true classes.
            num_classes: K.
            confusion: count what each class was taken for as well.

        Raises:
            DataError: a class is out of range, or the lengths differ.
        """
        logits, loss = _tensor(outputs), 0.0
        true = _tensor(labels).to(logits.device).long()
        if len(true) != len(logits):
            raise DataError(f"{len(logits)} predictions for {len(true)} labels")
        if logits.dim() == 2:
            if len(true):
                loss = float(cross_entropy(logits.float(), true, reduction="sum"))
            logits = logits.argmax(1)
        truth, guess = (t.cpu().numpy().astype(np.int64) for t in (true, logits))
        [counts] = cls.each(guess, truth, [len(truth)], num_classes, confusion)
        return replace(counts, loss_sum=loss)

    @classmethod
    def each(
        cls, guess: Ints, truth: Ints, sizes: Sequence[int], classes: int, confusion: bool = False
    ) -> list[Self]:
        """Count several test sets, which lie one after the other, without losses.

        Args:
            guess: (N,) predicted classes.
            truth: (N,) true classes.
            sizes: how many examples each set has.
            classes: K.
            confusion: as of :meth:`of`.

        Raises:
            DataError: a class is out of range.
        """
        for name, codes in (("label", truth), ("prediction", guess)):
            if len(codes) and not 0 <= codes.min() <= codes.max() < classes:
                raise DataError(f"a {name} lies outside of 0…{classes - 1}")
        sets, place, right = len(sizes), np.repeat(np.arange(len(sizes)), sizes), truth == guess
        support = _table(place, truth, (sets, classes))
        predicted = _table(place, guess, (sets, classes))
        correct = _table(place[right], truth[right], (sets, classes))
        found = [cls(*row) for row in zip(support, predicted, correct, strict=True)]
        if confusion:
            cells = _table(place * classes + truth, guess, (sets * classes, classes))
            split = cells.reshape(sets, classes, classes)
            found = [replace(c, confusion=own) for c, own in zip(found, split, strict=True)]
        return found

    def __add__(self, other: ClassCounts) -> ClassCounts:
        """Return the counts of both test sets together; the confusion, if both have it."""
        one, two = self.confusion, other.confusion
        return ClassCounts(
            self.support + other.support,
            self.predicted + other.predicted,
            self.correct + other.correct,
            self.loss_sum + other.loss_sum,
            None if one is None or two is None else one + two,
        )

    def total(self) -> int:
        """Return the number of examples."""
        return int(self.support.sum())

    def accuracy(self) -> float:
        """Return the share of correct predictions, 0 for no examples."""
        return int(self.correct.sum()) / max(self.total(), 1)

    def loss(self) -> float:
        """Return the mean loss of an example, 0 for no examples."""
        return self.loss_sum / max(self.total(), 1)

    def per_class(self) -> Floats:
        """Return the accuracy on each class (K,), NaN where a class has no example."""
        share = self.correct / np.maximum(self.support, 1)
        return np.where(self.support > 0, share, np.nan)

    def subset(self, classes: Iterable[int]) -> ClassCounts:
        """Return the counts of the examples of these classes alone, as for minority accuracies.

        What other classes' examples were predicted as is not known per class: ``predicted`` keeps
        the rows of ``classes``. The loss is not known per class and becomes 0.
        """
        keep = np.zeros(len(self.support), dtype=bool)
        keep[list(classes)] = True
        return ClassCounts(self.support * keep, self.predicted * keep, self.correct * keep)

    def macro_f1(self) -> float:
        """Return the mean F1 over classes that occur or are predicted (scikit-learn's rule)."""
        occurs = (self.support + self.predicted) > 0
        if not occurs.any():
            return 0.0
        f1 = 2 * self.correct[occurs] / (self.support + self.predicted)[occurs]
        return float(f1.mean())


def _table(rows: Ints, columns: Ints, shape: tuple[int, int]) -> Ints:
    """Return how often each pair of a row and a column occurs."""
    flat = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return flat.astype(np.int64).reshape(shape)


def _tensor(values: Tensor | ArrayLike) -> Tensor:
    """Return a tensor; arrays are copied, since they may be read-only."""
    return values.detach() if isinstance(values, Tensor) else torch.tensor(np.asarray(values))


def macro_f1(y_true: Tensor | ArrayLike, y_pred: Tensor | ArrayLike) -> float:
    """Return the mean of per-class F1 over labels that occur in either, F1 = 0 without a hit.

    Equals scikit-learn's ``f1_score(average="macro")``. An absent class is not penalised, but one
    false prediction of it is.
    """
    true, pred = (_tensor(y).cpu().numpy() for y in (y_true, y_pred))
    classes, codes = np.unique(np.concatenate([true, pred]), return_inverse=True)
    codes = codes.reshape(-1)
    return ClassCounts.of(codes[len(true) :], codes[: len(true)], len(classes)).macro_f1()


# --- over tasks: accuracy[t, k] is the accuracy on task k after learning task t -------------------


def forgetting(accuracy: ArrayLike) -> float:
    """Return how much of the best earlier accuracy on a task is gone after the last one.

    Chaudhry et al., Riemannian Walk, ECCV 2018: the mean over tasks k < T - 1 of
    ``max_{k <= t < T-1} accuracy[t, k] - accuracy[T-1, k]``.

    Args:
        accuracy: (T, T); the part above the diagonal is not read.

    Returns:
        The forgetting, 0 for a single task; negative where later tasks helped.
    """
    a = _square(accuracy)
    last = len(a) - 1
    return _mean(a[k:last, k].max() - a[last, k] for k in range(last))


def _square(accuracy: ArrayLike) -> Floats:
    """Return the accuracies as (T, T) floats."""
    a = np.asarray(accuracy, dtype=np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or not len(a):
        raise DataError(f"accuracies must be (T, T), not {list(a.shape)}")
    return a


def _mean(values: Iterable[Any]) -> float:
    """Return the mean, 0 of nothing."""
    listed = [float(v) for v in values]
    return sum(listed) / len(listed) if listed else 0.0


# --- over clients and rounds ----------------------------------------------------------------------


def iaa(accuracies: Sequence[float], num_examples: Sequence[float]) -> float:
    """Return the instant average accuracy: clients' accuracies weighted by n (pFedGRP).

    Args:
        accuracies: a_i, on all test parts client i has met.
        num_examples: n_i, training examples client i has met.
    """
    n = np.asarray(num_examples, dtype=np.float64)
    total = float(n.sum())
    return float(np.asarray(accuracies, dtype=np.float64) @ n) / total if total else 0.0


def average_forgetting_measure(iaa_series: ArrayLike, reference_series: ArrayLike) -> float:
    """Return AFM, the mean over rounds of the reference's IAA minus this run's.

    pFedGRP, equation 11, with the sign its text implies: smaller is better, and it may be negative.

    Args:
        iaa_series: (R,) of the run.
        reference_series: (R,) of "Centralized" on the same stream and seed.

    Raises:
        DataError: the series differ in length.
    """
    run, reference = (np.asarray(s, dtype=np.float64) for s in (iaa_series, reference_series))
    if run.shape != reference.shape:
        raise DataError(f"AFM needs the reference's rounds: {run.size} against {reference.size}")
    return float((reference - run).mean()) if run.size else 0.0


def mean_and_std(scores: Iterable[float]) -> tuple[float, float]:
    """Return the unweighted mean over clients and the population standard deviation (ddof 0)."""
    values = np.asarray(list(scores), dtype=np.float64)
    return (float(values.mean()), float(values.std())) if values.size else (0.0, 0.0)


def mean_accuracy(counts: Iterable[ClassCounts], classes: Iterable[int] | None = None) -> float:
    """Return the unweighted mean over clients of their accuracies: A_glo, A_loc and A_sel.

    Args:
        counts: one per client.
        classes: count examples of these classes alone, for minority variants; clients without such
            examples are then left out.
    """
    listed = list(counts)
    if classes is not None:
        wanted = list(classes)
        listed = [part for c in listed if (part := c.subset(wanted)).total()]
    return _mean(c.accuracy() for c in listed)


def last_rounds(series: Sequence[float], rounds: int = 10) -> float:
    """Return the mean of the last ``rounds`` values (GLDP's and FedMLP's rule)."""
    return _mean(series[-rounds:])


def best_round(series: Sequence[float]) -> int:
    """Return the first round at which the series is highest (FedAli's rule); ties: the earliest."""
    return int(np.argmax(np.asarray(series, dtype=np.float64)))


def frequency_groups(counts: ArrayLike) -> dict[str, list[int]]:
    """Return the known classes in three groups by training examples: many, medium, minority.

    They are the most frequent 20 %, the next 30 %, and the lower half; of an odd number of classes
    the middle one is ``medium``. Classes of equally many examples are never told apart: where some
    of them lie on both sides of a border, all of them are ``medium``. So a group may be empty, and
    all are where all classes are equally frequent.

    Args:
        counts: (K,) global training counts; classes with 0 are unknown.
    """
    n = np.asarray(counts, dtype=np.int64)
    falling = np.sort(n[n > 0])[::-1]
    if not len(falling) or falling[0] == falling[-1]:
        return {"many": [], "medium": [], "minority": []}
    most = falling[round(0.2 * len(falling))]  # of the classes that are not many
    least = falling[(len(falling) - 1) // 2]  # of the upper half
    is_many, is_minority = n > most, (n > 0) & (n < least)
    is_medium = (n > 0) & ~is_many & ~is_minority
    parts = {"many": is_many, "medium": is_medium, "minority": is_minority}
    return {name: np.flatnonzero(part).tolist() for name, part in parts.items()}


def as_one(scores: Tensor, merged: Iterable[tuple[int, int]]) -> Tensor:
    """Return logits (B, K) where some classes are part of others, which have their probability too.

    Args:
        scores: (B, K).
        merged: labels, each with that of the class that it is part of; those leave no logit but
            -inf. Labels beyond K are passed over.
    """
    found = scores.clone()
    for row, into in merged:
        if max(row, into) < scores.shape[1]:
            found[:, into] = torch.logaddexp(found[:, into], found[:, row])
            found[:, row] = -torch.inf
    return found


def chosen(values: Sequence[float | None]) -> int | None:
    """Return which of several validation scores is the best, the earliest of equal ones."""
    known = [number for number, value in enumerate(values) if value is not None]
    scores = [value for value in values if value is not None]
    return known[best_round(scores)] if known else None
