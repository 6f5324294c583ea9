"""How good a client's probabilities are (``[evaluate] probabilities``): told beside counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedcli.runtime.client_part import ClientPart, Scored

BINS = 15


@dataclass(frozen=True)
class Probabilities:
    """What scores of test examples come to as probabilities."""

    auroc: float | None
    """Mean over the classes that occur, and are not all there is, of the area under the ROC curve
    of the class against the rest; None without such a class."""
    ece: float
    """Expected calibration error: the mean over examples of how far the accuracy in a bin lies from
    the mean confidence there (Guo et al., ICML 2017), 15 bins of equal width."""

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor) -> Self:
        """Measure scores (n, K), of which the softmax is taken, by true labels (n,); n > 0."""
        from sklearn.metrics import roc_auc_score  # loading it takes a second

        p = scores.double().softmax(1).nan_to_num(1 / scores.shape[1]).cpu().numpy()
        y = labels.cpu().numpy()
        known = [k for k in np.unique(y) if 0 < (y == k).sum() < len(y)]
        areas = [roc_auc_score(y == k, p[:, k]) for k in known]
        confidence, right = p.max(1), p.argmax(1) == y
        bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        gaps = np.bincount(bins, weights=right - confidence, minlength=BINS)
        auroc = float(np.mean(areas)) if areas else None
        return cls(auroc, min(float(np.abs(gaps).sum()) / len(y), 1.0))


class ProbabilityScores(ClientPart):
    """Tells the area under curves and the calibration error of each scored model."""

    for_evaluator = False
    reads_logits = True

    def scored(self, at: Scored) -> None:
        """Score the probabilities of the test data of the client's tasks."""
        names = [name for name in at.logits if name.startswith("task/")]
        own = [(torch.cat([*at.logits[name]]), at.sets[name][1]) for name in names]
        if sum(len(y) for _, y in own):
            logits, y = (torch.cat(parts) for parts in zip(*own, strict=True))
            told = Probabilities.of(logits, y)
            at.report.probabilities.add(view=at.ctx.view, auroc=told.auroc, ece=told.ece)
