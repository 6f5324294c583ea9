"""A detector of one's own on the errors of a client's model, before it trains on a new task.

A detector keeps what it likes, and nothing of it is stored: the private state has the errors that
it saw, and each task begins with a new detector that sees these again. So a restart changes
nothing, and code of others never reads or writes a state.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from fedcli.runtime.client_part import Client, ClientPart, Training
from fedmodels.errors import DataError
from fedmodels.own.code_names import short_name
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.asked import fits_for_scores, local_view
from fedmodels.training.scoring import score
from fedplugins.detectors.interface import detections, detector_of
from fedplugins.detectors.keys import keys_of
from fedplugins.detectors.shared import NAME, Detector

LAST, ERRORS = f"{Detector.section}last", f"{Detector.section}errors"
MOST = 10_000
"""Errors that are kept: a byte each."""
log = logging.getLogger(__name__)


class ErrorDetector(ClientPart):
    """Shows a detector whether the model that a client holds names the class of each example."""

    for_evaluator = False

    def __init__(self, client: Client) -> None:
        """Find the detector; raise ConfigError where this site lacks it."""
        super().__init__(client)
        name = keys_of(client.experiment).detector
        assert name is not None, "the part is on"
        self._name, self._make = short_name(name), detector_of(name)

    def begins(self, half: Training) -> None:
        """Look at the open task, unless one was trained on it before."""
        last = int(half.kept[LAST]) if LAST in half.kept else -1
        task, before = half.ctx.task, half.kept.get(ERRORS, torch.zeros(0, dtype=torch.uint8))
        half.sections |= {LAST: torch.tensor(max(last, task)), ERRORS: before}
        if not 0 <= last < task:  # a client's first task has no model that was trained before
            return
        errors = self._errors(half)
        if errors is None:
            return
        seen = torch.cat([before, errors])
        at = [n for n in detections(self._make, seen.tolist()) if n >= len(before)]
        half.figures[NAME] = float(bool(at))
        half.sections[ERRORS] = seen[-MOST:]
        if at:
            log.warning(
                "client %d, task %d: the model's errors changed, as %s says at example %d of %d; "
                "%.0f %% of them are wrong, and of those of earlier tasks %s (docs/drift.md)",
                self.client.client, task, self._name, at[0] - len(before) + 1, len(errors),
                100 * errors.float().mean(),
                f"{100 * before.float().mean():.0f} %" if len(before) else "none was looked at",
            )  # fmt: skip

    def _errors(self, half: Training) -> Tensor | None:
        """Return whether the model errs (n,) on each training example of the open task, in order.

        None where the site does not let the model be scored, or there is no such example.
        """
        stream, method, task = self.client.stream, self.client.method, half.ctx.task
        stream.meet(task + 1)
        x, y = stream.train(task)
        if not len(y):
            return None
        of_all = local_view(method) == "global" or fits_for_scores(method)
        state = Bundle() if of_all else half.state
        view = "global" if of_all else "after_downlink"
        ctx = replace(half.ctx, view=view, made={}, metrics={}, asked=set())
        method.load(ctx, half.payload, state)
        sets, outputs = {"next": (x, y)}, dict[str, list[Tensor]]()
        if not self.client.may_score(half.order, ctx, half.payload, state, sets):
            return None
        with suppress(DataError):
            score(method, ctx, half.payload, state, sets, kept=outputs)
            named = torch.cat(outputs["next"]).argmax(1).cpu()
            return (named != y.cpu()).to(torch.uint8)
        return None
