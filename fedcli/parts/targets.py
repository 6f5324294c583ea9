"""Figures of targets (``[data.columns] target``, ``labels``): told beside counts of examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedcli.runtime.client_part import Client, ClientPart, Scored
from fedmodels.numerics.metrics import VALIDATION
from fedmodels.problems.targets import Targets, targets_in


class TargetScores(ClientPart):
    """Tells the figures of each scored model, by the method's own rule."""

    reads_logits = True

    def __init__(self, client: Client) -> None:
        """Look up the unit of the targets; raise ConfigError where the data have others."""
        super().__init__(client)
        own = targets_in(client.data.file.transform, client.data.directory)
        self.targets = Targets.of(client.experiment, own.columns if own else None)
        self.targets.check_data(own)

    def scored(self, at: Scored) -> None:
        """Tell the figures of each test set, and of all tasks together."""
        for name, outputs, y in _parts(at):
            told = self.targets.score(outputs, y) if len(y) else {}
            if told:
                at.report.figures.add(view=at.ctx.view, test_set=name, values=told)


def _parts(at: Scored) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield outputs and targets of each test set by name; of what has several tasks, of all too."""
    for kind in ("task", VALIDATION):
        names = [name for name in at.logits if name.startswith(f"{kind}/")]
        if names:
            outputs = torch.cat([piece for name in names for piece in at.logits[name]])
            yield kind, outputs, torch.cat([at.sets[name][1] for name in names])
    for name, pieces in at.logits.items():
        if not name.startswith(f"{VALIDATION}/"):
            yield name, torch.cat([*pieces]), at.sets[name][1]
