"""How far a client's inputs and predictions moved from those of the task before.

Inputs are compared with a summary of the training inputs of the task before, which the private
state keeps: so a crash or a roll-back changes no figure. Predictions are of one model, on the test
data of both tasks, which no model has seen. Only ``NAMES`` of ``fedmodels.numerics.data_drift``
leave the client.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from fedcli.runtime.client_part import ClientPart, Training
from fedmodels.errors import DataError
from fedmodels.numerics.data_drift import MAX_EXAMPLES, Summary, drift, reduced
from fedmodels.numerics.randomness import derive_seed, generator, seeded
from fedmodels.parts.drift import Drift
from fedmodels.training.contexts import ClientContext

PREFIX = Drift.section
NOW, BEFORE = f"{PREFIX}now", f"{PREFIX}before"
BATCH = 256
"""Examples that are predicted together."""


class DriftMeter(ClientPart):
    """Measures one client's drift in an interaction, and keeps what the next one needs."""

    def begins(self, half: Training) -> None:
        """Measure the open task by the client's model before it trains."""
        client, ctx = self.client, half.ctx
        client.method.load(ctx, half.payload, half.state)
        kept = {name: t for name, t in half.kept.items() if name.startswith(PREFIX)}
        half.sections.update(kept)
        x = self._some(client.stream.train(ctx.task)[0], ctx)
        if not len(x) or not bool(torch.isfinite(x).all()):
            return
        numbers = reduced(x, self._projection(ctx))
        last, before = (Summary.under(kept, place) for place in (NOW, BEFORE))
        if last is not None and last.task != ctx.task:
            before = last
        for name in kept:
            del half.sections[name]
        half.sections.update(Summary.of(ctx.task, numbers).tensors(NOW))
        if before is not None:
            half.sections.update(before.tensors(BEFORE))
            moved = {"input": before.drift(numbers)}
            with suppress(DataError):  # old test data may be deleted; scoring says more
                predicted = [self._predicted(task, ctx) for task in (before.task, ctx.task)]
                if all(len(one) and bool(torch.isfinite(one).all()) for one in predicted):
                    moved["prediction"] = drift(predicted[0], predicted[1])
            for part, (furthest, p) in moved.items():
                half.figures |= {f"{part}_drift": furthest, f"{part}_drift_p": p}

    def _some(self, x: Tensor, ctx: ClientContext) -> Tensor:
        """Return at most ``MAX_EXAMPLES`` of some examples."""
        if len(x) <= MAX_EXAMPLES:
            return x
        return x[torch.randperm(len(x), generator=ctx.generator("drift"))[:MAX_EXAMPLES]]

    def _projection(self, ctx: ClientContext) -> torch.Generator:
        return generator(derive_seed(ctx.run.experiment.seed, "projection", 0, "drift"))

    @torch.no_grad()
    def _predicted(self, task: int, ctx: ClientContext) -> Tensor:
        """Return numbers (n, d) of the model's softmax on the test data of a task."""
        self.client.stream.meet(task + 1)
        x = self._some(self.client.stream.test(task)[0], ctx)
        ctx.net.eval()
        with seeded(ctx.seed("evaluate")):  # a custom net may draw
            parts = [ctx.net(part).softmax(1) for part in ctx.net.split(x, BATCH)]
        return reduced(torch.cat(parts), self._projection(ctx)) if len(x) else x
