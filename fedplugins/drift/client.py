"""Whether a client's examples and predictions moved since its earlier tasks.

Inputs are compared with summaries of the training inputs of earlier tasks, which the private state
keeps: so a crash or a roll-back changes no figure. Predictions are of one model, on the test data
of all tasks that are compared, which no model has seen. What is kept does not grow with the number
of tasks. Only ``NAMES`` of ``fedmodels.numerics.data_drift``, rounded, and where in the list of
watched numbers those lie that moved in three columns (``places_of``) leave the client; which moved
besides, its own log says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fedcli.data.store.stream import Examples
from fedcli.runtime.client_part import Client, ClientPart, Training
from fedmodels.config.transforms import channels_in
from fedmodels.errors import DataError
from fedmodels.numerics.alarm_levels import Alarms, Levels
from fedmodels.numerics.data_drift import (
    ALPHA,
    DRIFT_PARTS,
    MAX_EXAMPLES,
    Moved,
    Summary,
    Watched,
    moved,
)
from fedmodels.numerics.data_drift_numbers import Numbers
from fedmodels.numerics.randomness import seeded
from fedmodels.training.contexts import ClientContext
from fedplugins.drift.columns import WatchedWords
from fedplugins.drift.keys import keys_of
from fedplugins.drift.one_class import in_one_class
from fedplugins.drift.shared import Drift, places_of, said_of

PREFIX = Drift.section
ALARMS = f"{PREFIX}alarms"
BATCH = 256
"""Examples that are predicted together."""
WINDOW = 3
"""Tasks of the reference, unless a config says how many."""
MEMORY = 10
"""Tests of one client after which its levels forget: four or five of its tasks."""
SHARP = 1e-2
"""Deviations of probabilities that are taken for none."""
PARTS_PER_ONE = 10**6
"""Amounts are kept as whole numbers of these."""
log = logging.getLogger(__name__)


class DriftMeter(ClientPart):
    """Measures one client's drift in an interaction, and keeps what the next one needs."""

    def __init__(self, client: Client) -> None:
        """Begin before the first task."""
        super().__init__(client)
        keys = keys_of(client.experiment)
        self._window = keys.drift_window or WINDOW
        self._slides, self._season = keys.drift_reference == "sliding", keys.season

    def begins(self, half: Training) -> None:
        """Measure the open task by the client's model before it trains."""
        client, ctx = self.client, half.ctx
        client.method.load(ctx, half.payload, half.state)
        kept = {name: t for name, t in half.kept.items() if name.startswith(PREFIX)}
        half.sections.update(kept)
        before = [one.merged(ctx.run.merged) for one in _summaries(kept)]
        summaries = {int(one.task): one for one in before}
        now = summaries.get(ctx.task) or self._summary(ctx)
        if now is None:
            return
        words, numbers = self._words("input", ctx), self._numbers(ctx)
        size = numbers.count - numbers.spreads, ctx.run.problem.num_classes
        earlier = [wide(summaries[t], *size) for t in sorted(summaries) if t < ctx.task]
        reference, last = self._compared(earlier, ctx.task)
        found = {"input": moved(
            reference, last, wide(now, *size), columns=words.columns, more=[in_one_class]
        )}  # fmt: skip
        with suppress(DataError):  # old test data may be deleted; scoring says more
            if self._may_predict(half):
                found["prediction"] = self._predictions(earlier, ctx)
        told = {part: one for part, one in found.items() if one is not None}
        for part, one in told.items():
            half.figures |= _figures(part, one)
        for name in kept:
            del half.sections[name]
        half.sections.update(self._kept([*summaries.values(), now]))
        half.sections[ALARMS] = self._told(told, kept.get(ALARMS), ctx)

    def _may_predict(self, half: Training) -> bool:
        """Tell whether the site lets the model be looked at, which is a score: see ``--scores``."""
        stream, ctx = self.client.stream, replace(half.ctx, view="drift")
        stream.meet(ctx.task + 1)
        sets = {"drift": stream.test(ctx.task)}
        return self.client.may_score(half.order, ctx, half.payload, half.state, sets)

    # --- what is compared -------------------------------------------------------------------------

    def _compared(
        self, earlier: Sequence[Summary], now: int
    ) -> tuple[Sequence[Summary], Summary | None]:
        """Return the tasks of the reference, and the one before where it is none of them.

        With seasons it is not looked at: it was of another one.
        """
        if self._season:
            same = [one for one in earlier if (now - int(one.task)) % self._season == 0]
            return same[: self._window], None
        reference = earlier[-self._window :] if self._slides else earlier[: self._window]
        before = earlier[-1] if len(earlier) > 1 else None
        return reference, before

    def _kept(self, summaries: Sequence[Summary]) -> dict[str, Tensor]:
        """Return what is kept of so many tasks: those of the reference, the last, the one before.

        A task that comes again, in runs that go through all tasks in each round, is the same one.
        """
        by_task = {int(one.task): one for one in summaries}
        tasks = sorted(by_task)
        if self._season:
            first = [
                task for at, task in enumerate(tasks)
                if sum((task - t) % self._season == 0 for t in tasks[:at]) < self._window
            ]  # fmt: skip
            return self._named(by_task[task] for task in sorted({*first, tasks[-1]}))
        last = tasks[-(self._window + 1 if self._slides else 2) :]
        first = [] if self._slides else tasks[: self._window]
        wanted = sorted({*first, *last})
        return self._named(by_task[task] for task in wanted)

    @staticmethod
    def _named(kept: Iterable[Summary]) -> dict[str, Tensor]:
        parts = (one.tensors(f"{PREFIX}{place}") for place, one in enumerate(kept))
        return {name: t for part in parts for name, t in part.items()}

    def _summary(self, ctx: ClientContext) -> Summary | None:
        """Return the summary of the open task's inputs; None where they are no numbers."""
        stream, numbers = self.client.stream, self._numbers(ctx)
        x, y, sessions = _some(stream.train(ctx.task), stream.sessions(ctx.task), ctx)
        if not len(x) or not bool(torch.isfinite(x).all()):
            return None
        classes, alike = ctx.run.problem.num_classes, _alike(y)
        watched = Watched(numbers.of(x), numbers.spreads, alike, alike, classes, sessions)
        return Summary.of(ctx.task, watched)

    def _predictions(self, earlier: Sequence[Summary], ctx: ClientContext) -> Moved | None:
        """Return how far the model's probabilities moved on the test data of these tasks."""
        reference, before = self._compared(earlier, ctx.task)
        tasks = {int(one.task) for one in (*reference, *([before] if before else []))}
        now = self._predicted(ctx.task, ctx) if tasks else None
        if now is None:
            return None
        found = {task: self._predicted(task, ctx) for task in sorted(tasks)}
        others = [one for s in reference if (one := found[int(s.task)]) is not None]
        columns = [*range(now.mix.shape[1])] * 2
        return moved(others, found[int(before.task)] if before else None, now, SHARP, columns)

    @torch.no_grad()
    def _predicted(self, task: int, ctx: ClientContext) -> Summary | None:
        """Return a summary of the model's softmax on the test data of a task.

        Numbers are watched in their deviations, and several labels each by its probability.
        """
        self.client.stream.meet(task + 1)
        x, y, _ = _some(self.client.stream.test(task), None, ctx)
        if not len(x):
            return None
        ctx.net.eval()
        with seeded(ctx.seed("evaluate")):  # a custom net may draw
            outputs = torch.cat([ctx.net(part) for part in ctx.net.split(x, BATCH)])
        if (targets := ctx.run.targets) is None:
            p, named = outputs.softmax(1).float().cpu(), y
            mixed = p.argmax(1)
        else:
            p = (outputs.sigmoid() if targets.columns.labels else outputs).float().cpu()
            mixed = named = _alike(y)
        if not bool(torch.isfinite(p).all()):
            return None
        return Summary.of(task, Watched(p, 0, named, mixed, p.shape[1]))

    # --- what is said -----------------------------------------------------------------------------

    def _told(self, found: dict[str, Moved], kept: Tensor | None, ctx: ClientContext) -> Tensor:
        """Say in the client's own log what moved in a task that is new; return the alarms after.

        The log holds the share of false lines among this client's own; the coordinator does so over
        all clients.
        """
        alarms, last = _read(kept)
        for part, one in found.items() if ctx.task > last else ():
            if alarms.tells(part, one.p, one.amount):
                line = self._words(part, ctx).line(one.number, one.amount, one.p, one.others)
                log.warning(
                    "client %s, task %d: %ss moved since task %d: %s (docs/drift.md)",
                    ctx.client, ctx.task, part, one.task, line,
                )  # fmt: skip
        return _written(alarms, max(last, ctx.task))

    def _words(self, part: str, ctx: ClientContext) -> WatchedWords:
        data, problem = self.client.data, ctx.run.problem
        channels = channels_in(data.file.transform)
        return WatchedWords(
            part, tuple(problem.input_shape), problem.num_classes, channels, data.class_names,
            said_of(self.client.experiment),
        )  # fmt: skip

    def _numbers(self, ctx: ClientContext) -> Numbers:
        return Numbers(tuple(ctx.run.problem.input_shape))


def _figures(part: str, one: Moved) -> dict[str, float]:
    """Return what leaves the client: two figures, and where it moved if that is beyond chance."""
    told = {f"{part}_drift": round(one.amount, 2), f"{part}_drift_p": float(f"{one.p:.1e}")}
    places = dict.fromkeys([one.number, *one.others]) if one.p < ALPHA else ()
    return told | dict(zip(places_of(part), places, strict=False))


def _some(
    examples: Examples, sessions: Tensor | None, ctx: ClientContext
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return at most ``MAX_EXAMPLES`` of some examples, in their order."""
    x, y = examples
    if len(x) > MAX_EXAMPLES:
        chosen = torch.randperm(len(x), generator=ctx.generator("drift"))[:MAX_EXAMPLES]
        chosen = chosen.sort().values.to(x.device)
        x, y = x[chosen], y[chosen]
        sessions = None if sessions is None else sessions[chosen.cpu()]
    return x, y.cpu(), sessions


def _alike(y: Tensor) -> Tensor:
    """Return labels (n,) as they are, and one label for all examples with targets (n, T)."""
    return y if y.dim() == 1 else torch.zeros(len(y), dtype=torch.int64)


def wide(one: Summary, values: int, classes: int) -> Summary:
    """Return a summary with numbers that a version before did not watch, as unknown ones.

    And with classes that have come since, of which it had none.
    """
    v, more, cells = len(one.noise), values - len(one.noise), one.cells
    unknown = cells.new_full((len(cells), more), math.nan)
    return replace(
        one, cells=torch.cat([cells[:, :v], unknown, cells[:, v:]], 1),
        noise=torch.cat([one.noise, one.noise.new_full((more,), math.nan)]),
        mix=functional.pad(one.mix, (0, classes - one.mix.shape[1])),
    )  # fmt: skip


def _summaries(kept: dict[str, Tensor]) -> list[Summary]:
    """Return the summaries that were kept, by task; an earlier version's have other names."""
    places = sorted({int(n) for name in kept if (n := name.split("/")[1]).isdecimal()})
    return [one for place in places if (one := Summary.under(kept, f"{PREFIX}{place}"))]


def _read(kept: Tensor | None) -> tuple[Alarms, int]:
    """Return the alarms of a client as they were kept, and its last task."""
    if kept is None:
        return Alarms(Levels(MEMORY)), -1
    last, tests, *numbers = map(int, kept.tolist())
    amounts = dict(zip(DRIFT_PARTS, numbers, strict=False))
    lasting = {part: a / PARTS_PER_ONE for part, a in amounts.items() if a >= 0}
    found = tuple(numbers[len(DRIFT_PARTS) :])
    return Alarms(Levels(MEMORY, tests, found), lasting), last


def _written(alarms: Alarms, last: int) -> Tensor:
    """Return the alarms of a client as whole numbers."""
    amounts = [round(alarms.lasting.get(part, -1) * PARTS_PER_ONE) for part in DRIFT_PARTS]
    return torch.tensor([last, alarms.levels.tests, *amounts, *alarms.levels.found])
