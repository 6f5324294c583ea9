"""Several labels of one example (``[data.columns] labels``): each is there or is not.

An output is the logit of one label. Figures need no threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedmodels.problems.targets import Targets


@dataclass(frozen=True)
class Labels(Targets):
    """Labels that an example has or lacks, each by itself."""

    @property
    def figures(self) -> Mapping[str, tuple[float, float]]:
        """The figures, all shares."""
        names = "auroc average_precision auroc_micro average_precision_micro base_rate"
        return dict.fromkeys(names.split(), (0.0, 1.0))

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each label's sigmoid, a mean over the labels."""
        return binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)

    def score(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return areas and average precision: means over the labels that occur and that lack.

        ``…_micro`` are over all pairs of an example and a label. ``base_rate`` is the average
        precision of answers that know nothing: the mean share of examples with a label.
        """
        from sklearn.metrics import average_precision_score, roc_auc_score  # takes a second to load

        outputs = outputs.double().nan_to_num()  # an infinite logit is the largest
        scores, true = outputs.cpu().numpy(), y.cpu().numpy() > 0
        rates = true.mean(0)
        known = np.flatnonzero((rates > 0) & (rates < 1))
        if not len(known):
            return {}
        told = {"base_rate": rates[known].mean()}
        for name, of in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
            told[name] = np.mean([of(true[:, k], scores[:, k]) for k in known])
            told[f"{name}_micro"] = of(true.ravel(), scores.ravel())
        return {name: float(value) for name, value in told.items()}

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the probability of each label (B, T)."""
        return outputs.double().sigmoid()
