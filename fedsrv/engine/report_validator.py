"""What a run's clients may answer, by their orders and by their announcements.

A client's answer goes into records, or into the state that everybody gets. So the engine checks
every field before it keeps the answer. A client whose answer is impossible has failed.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedmodels.config.combinations import TOLD
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.facts.position import Interaction
from fedmodels.host.guarded import Guarded
from fedmodels.numerics.metric_names import OF_UPLOADS
from fedmodels.numerics.metrics import VALIDATION
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedmodels.tensors.declared_counts import DeclaredCounts, check_examples
from fedmodels.training.asked import reads_history, reported
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.scoring import rules_of
from fedmodels.training.wire import Wire
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.schedule import Step

GLOBAL_TEST = "global-test"
OWN_KEYS = frozenset(
    (
        "loss", "seconds", "num_examples", "skipped_examples", "peak_rss_bytes", "views", "trained",
        "models",
    )
).union(OF_UPLOADS, TOLD)  # fmt: skip
"""Names that a client's row of a record uses itself; a method's own numbers have others."""
REPORTED = frozenset(
    [
        "loss",
        "seconds",
        "num_examples",
        "skipped_examples",
        "trained",
        "extra",
        "peak_rss_bytes",
        "durable",
        "state_sha256",
        "counts",
        "confusions",
        "probabilities",
        "figures",
        "refused_model",
        "withheld",
    ]
)
"""Fields of a report on an order of the kernel's; an order of a part's own has others."""
WITHHELD = ("loss", "seconds", "peak_rss_bytes", "extra", "counts")
"""Fields of a report that a client's site may keep to itself, and say so."""
MAX_SECONDS = 1e8
MAX_LOSS = 3.5e38
"""Limit of the loss of one example: the largest float32."""
MAX_BYTES = 2**50
MAX_TESTED = 2**31
"""Limit of the examples of the global test set, which no client announces."""


@dataclass(frozen=True)
class ReportValidator:
    """The rules that every answer of a run has to keep."""

    method: Method
    run: RunFacts
    profiles: Mapping[int, Profile]
    steps: Sequence[Step]
    times: TimesTrained | None = None
    """How often clients were asked to train; made anew where it is of other steps."""

    def __post_init__(self) -> None:
        """Refuse a method whose clients report what every report has already."""
        if self.times is None or self.times.steps is not self.steps:
            object.__setattr__(self, "times", TimesTrained(self.steps))
        for name in sorted(reported(self.method, self.run) & OWN_KEYS):
            raise ConfigError(
                f"clients of {type(self.method).__name__} cannot report {name!r}, which every "
                "report has already: give it another name in ctx.metrics and in reported"
            )

    @cached_property
    def wire(self) -> Wire:
        """How tensors travel, and what clients keep and tell beside what the method says."""
        return Wire.of(self.method, self.run)

    def grown(
        self, run: RunFacts, profiles: Mapping[int, Profile], steps: Sequence[Step]
    ) -> ReportValidator:
        """Return the rules of an open run that has grown; what is known of clients stays."""
        assert self.times is not None, "made in __post_init__"
        return ReportValidator(self.method, run, profiles, steps, self.times.grown(steps))

    def announced(self, client: int, step: Step) -> DeclaredCounts:
        """Return the announced examples behind a client's upload."""
        assert self.times is not None, "made in __post_init__"
        profile, accumulates = self.profiles[client], self.run.experiment.accumulates
        now_at, train = step.task_of(client), profile.train
        times = self.times.of(client, step.interaction)[: len(train)]
        each = (train.cumsum(0) if accumulates else train)[: len(times)]
        trained = times @ each
        for row, into in self.run.merged:  # what was trained before is counted where it was
            trained[row] = trained[into]
        parts = profile.given(now_at, accumulates), train[: now_at + 1].sum(0), trained
        return DeclaredCounts(client, *map(torch.from_numpy, parts))

    def check_report(self, client: ClientId, order: rpc.Order, report: rpc.Report) -> None:
        """Check the report of an upload; PayloadError names the first impossible fact."""
        for field, _ in report.ListFields():
            if field.name not in REPORTED:
                raise PayloadError(f"the report has {field.name}, which was not requested")
        for name in report.withheld:
            if name not in WITHHELD or list(report.withheld).count(name) > 1:
                raise PayloadError(f"the report says that it keeps {name[:50]!r} to itself")
            if name != "extra" and name in (field.name for field, _ in report.ListFields()):
                raise PayloadError(f"the report has {name} and says that it keeps it to itself")
        self._check_numbers(client, order, report)
        is_last = order.kind == rpc.ORDER_KIND_FINISH and client != EVALUATOR
        if not re.fullmatch(r"[0-9a-f]{64}" if is_last else "", report.state_sha256):
            what = "no digest of a state" if is_last else "a digest that was not requested"
            raise PayloadError(f"the report holds {what}")
        trains = order.kind == rpc.ORDER_KIND_TRAIN
        known = reported(self.method, self.run) - OWN_KEYS if trains else frozenset[str]()
        parts = self.wire.parts if trains else ()
        for part in parts:
            part.check_told(report.extra, report.num_examples)
        for name in report.extra:
            if name not in known and not (trains and name in self.wire.tells):
                raise PayloadError(f"the report holds {name[:50]!r}, unknown to the method")
        if report.trained:
            self._check_trained(client, order, report)
        self._check_counts(client, order, report)
        self._check_confusions(order, report)
        self._check_probabilities(client, order, report)
        self._check_figures(report)
        if report.HasField("refused_model"):
            self._check_refused(client, order, report.refused_model)

    def _check_numbers(self, client: ClientId, order: rpc.Order, report: rpc.Report) -> None:
        most = 0
        if order.kind == rpc.ORDER_KIND_TRAIN and isinstance(client, int):
            announced = self.announced(client, self.steps[order.interaction])
            most = announced.most_examples(self.method.trains_on)
        check_examples(report.num_examples, most, "the report's number of examples")
        if not 0 <= report.skipped_examples <= report.num_examples:
            raise PayloadError("the report leaves out more examples than it has")
        if not 0 <= report.seconds <= MAX_SECONDS or not 0 <= report.peak_rss_bytes <= MAX_BYTES:
            raise PayloadError("the report holds impossible seconds or bytes")
        for name, value in (("loss", report.loss), *report.extra.items()):
            if math.isfinite(value) and abs(value) > MAX_LOSS:  # without a step there is no loss
                raise PayloadError(f"the report's {name[:50]!r} is {value:g}, beyond {MAX_LOSS:g}")

    def _check_trained(self, client: ClientId, order: rpc.Order, report: rpc.Report) -> None:
        """Check that a training read tasks that the order allows, of the examples announced."""
        if order.kind != rpc.ORDER_KIND_TRAIN or not isinstance(client, int):
            raise PayloadError("the report has trained, which was not requested")
        if self.run.experiment.privacy is not None:
            raise PayloadError("the report holds trained, which a run with [privacy] has not")
        now = self.steps[order.interaction].task_of(client)
        announced = self.profiles[client].train.sum(1)
        first = 0 if reads_history(self.method, self.run.experiment) else now
        tasks = [one.task for one in report.trained]
        allowed = range(first, min(now + 1, len(announced)))
        if tasks != sorted({*tasks}) or any(task not in allowed for task in tasks):
            raise PayloadError(f"the report says that {tasks[:10]} were trained on, at task {now}")
        for one in report.trained:
            check_examples(one.rows, int(announced[one.task]), f"the rows of task {one.task}")

    def _check_counts(self, client: ClientId, order: rpc.Order, report: rpc.Report) -> None:
        """Check that scores match the order, each once, on the announced data."""
        supports = self._supports(client, order)
        masks = client != EVALUATOR
        rules = rules_of(self.method, self.run.experiment) if masks else self.method.rules
        kept = self._kept(client, order)
        if len(report.counts) > len(order.views) * len(rules) * (len(supports) + len(kept) + 1):
            raise PayloadError("the report holds more scores than were ordered")
        seen: dict[tuple[str, str], int] = {}
        of_global: list[int] | None = None
        for counts in report.counts:
            view, name = counts.view, counts.test_set
            if view not in order.views or (client == EVALUATOR and view != "global"):
                raise PayloadError(f"the report scores an unknown view {view[:50]!r}")
            place = seen.get((view, name), 0)
            if counts.rule not in rules[place : place + 1]:
                raise PayloadError(f"the report scores a rule {counts.rule[:50]!r} out of place")
            seen[view, name] = place + 1
            self._check_sums(counts)
            support = list(counts.support)
            scores_all = client == EVALUATOR or (order.global_test and view != "global")
            if name == GLOBAL_TEST and scores_all:
                of_global = of_global or support
                if support != of_global:
                    raise PayloadError("the report scores two global test sets")
            elif name in kept:
                most = kept[name] if self._by_class else [sum(kept[name])]
                if any(n > limit for n, limit in zip(support, most, strict=True)):
                    raise PayloadError(f"the report scores more examples of {name} than announced")
            elif name not in supports:
                raise PayloadError(f"the report scores an unknown test set {name[:50]!r}")
            elif not self._is_announced(support, supports[name]):
                raise PayloadError(f"the report scores other examples of {name} than announced")

    @property
    def _by_class(self) -> bool:
        """Whether scores are counted by class."""
        return self.run.experiment.announced == "exact"

    def _is_announced(self, support: list[int], announced: list[int]) -> bool:
        """Tell whether a client scored what it announced; rounding at most doubles a count."""
        if self._by_class:
            return support == announced
        return sum(announced) // 2 <= sum(support) <= sum(announced)

    def _supports(self, client: ClientId, order: rpc.Order) -> dict[str, list[int]]:
        """Return the examples of each class of the test sets that a client was asked to score."""
        if not isinstance(client, int):
            return {}
        rows = self.profiles[client].test[order.first_task : order.tasks_seen]
        found = enumerate(rows, order.first_task)
        return {f"task/{n}": row.tolist() for n, row in found if n not in order.set_aside}

    def _kept(self, client: ClientId, order: rpc.Order) -> dict[str, list[int]]:
        """Return the most examples of each class that a client may keep for validation, by task."""
        data = self.run.experiment.data
        if not isinstance(client, int) or data is None or data.validation_share is None:
            return {}
        rows = self.profiles[client].train[order.first_task : order.tasks_seen]
        found = enumerate(rows, order.first_task)
        return {f"{VALIDATION}/{n}": row.tolist() for n, row in found if n not in order.set_aside}

    def _check_sums(self, counts: rpc.Counts) -> None:
        arrays = (counts.support, counts.predicted, counts.correct)
        classes = self.run.problem.num_classes if self._by_class else 1
        if any(len(values) != classes for values in arrays):
            raise PayloadError(f"the report counts other than {classes} classes")
        total = sum(counts.support)
        sane = all(0 <= c <= min(s, p) for s, p, c in zip(*arrays, strict=True))
        if not sane or sum(counts.predicted) != total or total > MAX_TESTED:
            raise PayloadError("the report's counts contradict each other")
        loss = counts.loss_sum  # infinite where a rule excludes a class
        if loss < 0 or (math.isfinite(loss) and loss > MAX_LOSS * max(total, 1)):
            raise PayloadError("the report holds an impossible loss")

    def _check_confusions(self, order: rpc.Order, report: rpc.Report) -> None:
        """Check that each confusion was asked for, once, and adds up to the counts of its view."""
        views = [each.view for each in report.confusions]
        if len(set(views)) < len(views) or (views and not order.confusion):
            raise PayloadError("the report has confusions that were not requested")
        classes, rule = self.run.problem.num_classes, self.method.rules[0]
        for each in report.confusions:
            if len(each.counts) != classes**2:
                raise PayloadError(f"a confusion of the report is not of {classes} classes")
            own = [
                (c.support, c.predicted, c.correct)
                for c in report.counts
                if c.view == each.view and c.rule == rule and c.test_set.startswith("task/")
            ]
            counted = np.array(own, dtype=np.int64).reshape(-1, 3, classes).sum(0)
            cells = np.array(each.counts).reshape(classes, classes)
            sums = cells.sum(1), cells.sum(0), cells.diagonal()
            small = 0 <= cells.min() <= cells.max() <= counted[0].sum()  # sums cannot overflow
            if not own or not small or not np.array_equal(sums, counted):
                raise PayloadError("a confusion of the report contradicts its counts")

    def _check_refused(self, client: ClientId, order: rpc.Order, refused: rpc.RefusedModel) -> None:
        """Check what is told of a model that a client's guard refused; any client may have one."""
        figures = [(refused.accuracy, "accuracy"), (refused.live, "live")]
        told = [value for value, name in figures if refused.HasField(name)]
        is_known = client != EVALUATOR and 0 <= refused.round <= max(order.round, 0)
        if not is_known or not all(0 <= value <= 1 for value in told):
            raise PayloadError("the report holds an impossible model that was refused")

    def _check_figures(self, report: rpc.Report) -> None:
        """Check that figures are of targets, each once of what was scored, and possible."""
        targets = self.run.targets
        scored = {(c.view, c.test_set) for c in report.counts}
        scored |= {(view, name.partition("/")[0]) for view, name in scored}
        told = [(each.view, each.test_set) for each in report.figures]
        if len({*told}) < len(told) or not {*told} <= (scored if targets else set()):
            raise PayloadError("the report tells figures of what was not scored")
        for each in report.figures:
            for name, value in each.values.items():
                least, most = targets.figures.get(name, (1.0, 0.0)) if targets else (1.0, 0.0)
                if not least <= value <= most:
                    raise PayloadError(f"the report's figure {name[:50]!r} is {value:g}")

    def _check_probabilities(self, client: ClientId, order: rpc.Order, report: rpc.Report) -> None:
        """Check that what is told of probabilities was asked for, once, and is possible."""
        views = [each.view for each in report.probabilities]
        asked = self.run.experiment.evaluate.probabilities and client != EVALUATOR
        if len(set(views)) < len(views) or not {*views} <= ({*order.views} if asked else set()):
            raise PayloadError("the report has probabilities that were not requested")
        for each in report.probabilities:
            numbers = [each.ece, *([each.auroc] if each.HasField("auroc") else [])]
            if not all(0 <= number <= 1 for number in numbers):
                raise PayloadError("the report holds an impossible auroc or ece: they are 0 to 1")


Times = npt.NDArray[np.int64]
"""Orders to train by task, (T,): as many tasks as were ordered, or more."""


class TimesTrained:
    """Counts orders as the steps have them; each step is looked at once, whoever asks."""

    _counted: Guarded[int] = Guarded("_lock")
    """The steps that are counted so far."""
    _times: Guarded[dict[int, Times]] = Guarded("_lock")

    def __init__(self, steps: Sequence[Step]) -> None:
        """Begin with the steps of a run, all of them."""
        self.steps = steps
        self._counted, self._times = 0, {}
        self._lock = threading.RLock()
        """Uploads are checked on several threads."""

    def of(self, client: int, interaction: Interaction) -> Times:
        """Return the orders of a client by task, up to and with those of an interaction."""
        with self._lock:
            self._count_up_to(interaction + 1)
            found = self._times.get(client, _NEVER).copy()
            later = self.steps[interaction + 1 : self._counted]  # an upload that comes late
        for step in later:
            if _takes_part(client, step):
                found[step.task_of(client)] -= 1
        return found

    def grown(self, steps: Sequence[Step]) -> TimesTrained:
        """Return the counts of a run whose steps go on otherwise from some step on."""
        found = TimesTrained(steps)
        with self._lock:
            last = self._counted - 1
            if last < len(steps) and (last < 0 or steps[last] is self.steps[last]):
                with found._lock:
                    found._counted = self._counted
                    found._times = {client: times.copy() for client, times in self._times.items()}
        return found

    def _count_up_to(self, end: int) -> None:
        for step in self.steps[self._counted : end]:
            for client in step.cohort:
                task = step.task_of(client)
                times = self._times.get(client, _NEVER)
                if task >= len(times):
                    more = np.zeros(task + 1, dtype=np.int64)  # twice as many: few are moved
                    times = np.concatenate([times, more])
                    self._times[client] = times
                times[task] += 1
        self._counted = max(self._counted, end)


_NEVER = np.zeros(0, dtype=np.int64)


def _takes_part(client: int, step: Step) -> bool:
    place = bisect_left(step.cohort, client)
    return step.cohort[place : place + 1] == (client,)
