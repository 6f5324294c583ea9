"""How far a client's inputs and predictions moved from those of the task before.

Inputs are compared with a summary of the training inputs of the task before, which the private
state keeps: so a crash or a roll-back changes no figure. Predictions are of one model, on the test
data of both tasks, which no model has seen. Only ``NAMES`` of ``fedmodels.numerics.data_drift``
leave the client.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcli.data.store.stream import TaskStream
from fedmodels.errors import DataError
from fedmodels.numerics.data_drift import MAX_EXAMPLES, Summary, drift, reduced
from fedmodels.numerics.randomness import derive_seed, generator, seeded
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.contexts import ClientContext

PREFIX = "drift/"
NOW, BEFORE = f"{PREFIX}now", f"{PREFIX}before"
BATCH = 256
"""Examples that are predicted together."""


@dataclass
class DriftMeter:
    """Measures one client's drift in an interaction, and keeps what the next one needs."""

    stream: TaskStream
    figures: dict[str, float] = field(default_factory=dict, init=False)
    """Figures of the interaction under way; none where there is no earlier task."""
    _kept: Weights = field(default_factory=dict, init=False)

    def measure(self, ctx: ClientContext, stored: Bundle) -> None:
        """Measure the open task; ``ctx.net`` holds the client's model before it trains.

        The private state before is as it was stored, with the summaries.
        """
        self.figures, self._kept = {}, _of_drift(stored.weights)
        x = self._some(self.stream.train(ctx.task)[0], ctx)
        if not len(x) or not bool(torch.isfinite(x).all()):
            return
        numbers = reduced(x, self._projection(ctx))
        last, before = (Summary.under(self._kept, place) for place in (NOW, BEFORE))
        if last is not None and last.task != ctx.task:
            before = last
        self._kept = Summary.of(ctx.task, numbers).tensors(NOW)
        if before is not None:
            self._kept |= before.tensors(BEFORE)
            moved = {"input": before.drift(numbers)}
            with suppress(DataError):  # old test data may be deleted; scoring says more
                predicted = [self._predicted(task, ctx) for task in (before.task, ctx.task)]
                if all(len(one) and bool(torch.isfinite(one).all()) for one in predicted):
                    moved["prediction"] = drift(predicted[0], predicted[1])
            for part, (furthest, p) in moved.items():
                self.figures |= {f"{part}_drift": furthest, f"{part}_drift_p": p}

    def with_summaries(self, state: Bundle) -> Bundle:
        """Return a private state as it is stored after the interaction."""
        return replace(state, weights={**state.weights, **self._kept}) if self._kept else state

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
        self.stream.meet(task + 1)
        x = self._some(self.stream.test(task)[0], ctx)
        ctx.net.eval()
        with seeded(ctx.seed("evaluate")):  # a custom net may draw
            parts = [ctx.net(part).softmax(1) for part in ctx.net.split(x, BATCH)]
        return reduced(torch.cat(parts), self._projection(ctx)) if len(x) else x


def without_summaries(stored: Bundle) -> Bundle:
    """Return a stored private state without the summaries."""
    kept = _of_drift(stored.weights)
    rest = {name: tensor for name, tensor in stored.weights.items() if name not in kept}
    return replace(stored, weights=rest) if kept else stored


def _of_drift(weights: Weights) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
