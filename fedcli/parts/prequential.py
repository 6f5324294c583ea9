"""How well a client's model does on a new task before it trains on it: test, then train.

The private state keeps the last task that was scored so: a crash or a roll-back changes no figure.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from fedcli.runtime.client_part import ClientPart, Training
from fedmodels.errors import DataError
from fedmodels.parts.prequential import NAMES, Prequential
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.asked import fits_for_scores, local_view
from fedmodels.training.scoring import score

LAST = f"{Prequential.section}last"
DIGITS = 4
"""Digits of the figure that leave the client."""


class TestThenTrain(ClientPart):
    """Scores the model that a client holds on the examples of a task that it begins."""

    __test__ = False  # no test of pytest's
    for_evaluator = False

    def begins(self, half: Training) -> None:
        """Score the model on all examples of the open task, unless one was trained on it before.

        A client's first task has no model that was trained before.
        """
        last = int(half.kept[LAST]) if LAST in half.kept else -1
        task = half.ctx.task
        half.sections[LAST] = torch.tensor(max(last, task))
        if not 0 <= last < task:
            return
        with suppress(DataError):  # test data may be deleted; scoring says more
            half.figures |= self._score(half)

    def _score(self, half: Training) -> dict[str, float]:
        """Return the accuracy on a task's training and test examples, by the method's own rule.

        Of numbers it is their error, of several labels the area under their curves. Nothing is told
        where the site does not let the model be scored, or the examples have no such figure.
        """
        stream, method, task = self.client.stream, self.client.method, half.ctx.task
        stream.meet(task + 1)
        parts = (stream.train(task), stream.test(task))
        x, y = (torch.cat(some) for some in zip(*parts, strict=True))
        of_all = local_view(method) == "global" or fits_for_scores(method)
        state = Bundle() if of_all else half.state
        view = "global" if of_all else "after_downlink"
        ctx = replace(half.ctx, view=view, made={}, metrics={}, asked=set())
        method.load(ctx, half.payload, state)
        sets = {"next": (x, y)}
        if not self.client.may_score(half.order, ctx, half.payload, state, sets):
            return {}
        data, outputs = self.client.data, dict[str, list[torch.Tensor]]()
        from fedmodels.problems.targets import targets_in

        targets = targets_in(data.file.transform, data.directory)
        found = score(
            method, ctx, half.payload, state, sets, kept=None if targets is None else outputs
        )
        if targets is None:
            return {"prequential": round(next(iter(found.values())).accuracy(), DIGITS)}
        told = targets.score(torch.cat(outputs["next"]), y)
        named = {f"prequential_{name}": float(f"{v:.{DIGITS}g}") for name, v in told.items()}
        return {name: named[name] for name in NAMES if name in named}
