"""The scores a run is judged by, as functions of labels, accuracies and curves."""

from __future__ import annotations

from fedmodels.numerics.metrics import average_forgetting_measure, forgetting, macro_f1

__all__ = ["average_forgetting_measure", "forgetting", "macro_f1"]
