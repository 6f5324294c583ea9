"""How good a client's probabilities are (``[evaluate] probabilities``): told beside counts."""

from __future__ import annotations

import torch

from fedcli.runtime.client_part import ClientPart, Scored
from fedmodels.numerics.metrics import Probabilities


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
