"""What a client says of its work: scores in its report, why it failed, and lines in its log.

With ``--json`` the lines have figures.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcli.runtime.client_part import Client, Scored
from fedmodels.console.printable import event_of, without_places
from fedmodels.errors import (
    ArchiveError,
    ConfigError,
    DataError,
    FedtideError,
    OrderDeclined,
    PayloadError,
    TrainingFailed,
)
from fedmodels.numerics.metrics import VALIDATION
from fedmodels.tensors.bundle import EVALUATOR, Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.fault import fault_in, line_of
from fedmodels.training.scoring import score
from fedpb.failures import UNTOLD
from fedpb.v1 import coordinator_pb2 as rpc

REASONS: tuple[tuple[type[Exception], rpc.FailureReason], ...] = (
    (OrderDeclined, rpc.FAILURE_REASON_DECLINED),
    (PayloadError, rpc.FAILURE_REASON_REFUSED),
    (DataError, rpc.FAILURE_REASON_STORAGE),
    (ArchiveError, rpc.FAILURE_REASON_STORAGE),
    (ConfigError, rpc.FAILURE_REASON_CONFIG),
    (TrainingFailed, rpc.FAILURE_REASON_TRAINING),
)
"""What kind of failure an error is; any other one is of no kind."""
log = logging.getLogger(__name__)


def tell(
    kind: str, client: object, line: str, order: rpc.Order | None = None, **facts: Any
) -> None:
    """Log a line about one client; with ``--json`` its event has ``facts`` as well."""
    place = {} if order is None else {"interaction": order.interaction, "round": order.round}
    event = event_of(kind, time.time(), client=client, detail={"line": line, **facts}, **place)
    log.info("client %s%s", client, line, extra={"event": event})


def tell_trained(order: rpc.Order, report: rpc.Report, num_bytes: int) -> None:
    """Log the figures of a local training, and the size of its upload."""
    left_out = (
        f"; {report.skipped_examples} left out: a batch of one example cannot be normalised"
        if report.skipped_examples
        else ""
    )
    tell(
        "trained", order.client_id,
        f", round {order.round + 1}, task {order.task}: loss {report.loss:.4g} on "
        f"{report.num_examples - report.skipped_examples} examples in {report.seconds:.1f} s, "
        f"{num_bytes} bytes go back{left_out}",
        order, task=order.task, loss=report.loss, num_examples=report.num_examples,
        skipped_examples=report.skipped_examples, seconds=report.seconds, bytes=num_bytes,
        metrics=dict(report.extra),
    )  # fmt: skip


def tell_scored(order: rpc.Order, report: rpc.Report) -> None:
    """Log the accuracy of each view of the client's model on the tasks seen."""
    found = accuracies(report)
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
    line = f", round {order.round + 1}: scored {figures or 'nothing'}"
    tell("scored", order.client_id, line, order, task=order.task, accuracies=found)


def told_of(client: Client, order: rpc.Order, error: Exception) -> tuple[str, rpc.FailureReason]:
    """Log why a client could not do an order; return it in words without paths, and its kind."""
    place = f"client {client.client}, interaction {order.interaction + 1}"
    is_untold = client.hides
    if isinstance(error, OrderDeclined):
        log.warning("client %s trains no more: %s", client.client, error)
        is_untold, why = False, str(error)
    elif isinstance(error, FedtideError):
        log.error("%s: %s", place, error)
        is_untold, why = is_untold and not isinstance(error, ConfigError | ArchiveError), str(error)
    else:
        log.exception("%s", place)
        why = fault_in(client.method, error) or line_of(error)
    places = client.data.directory.parent, client.states.path.parent
    kinds = (kind for of, kind in REASONS if isinstance(error, of))
    reason = next(kinds, rpc.FAILURE_REASON_UNSPECIFIED)
    return (UNTOLD if is_untold else without_places(why, places)), reason


def accuracies(report: rpc.Report) -> dict[str, float]:
    """Return the accuracy over a report's test sets, by view and rule; of targets the figures.

    What is kept for validation, which chooses, is no test set.
    """
    right: dict[str, list[int]] = {}
    if report.figures:
        return {
            f"{one.view} {name}": value
            for one in report.figures
            if one.test_set in ("task", "global-test")
            for name, value in sorted(one.values.items())
        }
    for one in report.counts:
        if one.test_set.startswith(f"{VALIDATION}/"):
            continue
        name = f"{one.view} ({one.rule})" if one.rule else one.view
        sums = right.setdefault(name, [0, 0])
        sums[0] += sum(one.correct)
        sums[1] += sum(one.support)
    return {name: correct / tested for name, (correct, tested) in right.items() if tested}


def add_score(
    client: Client,
    order: rpc.Order,
    ctx: ClientContext,
    payload: Bundle,
    state: Bundle,
    report: rpc.Report,
) -> None:
    """Score the model in a context's net on the test sets of an order; parts see it afterwards.

    A model that the site does not let be scored leaves nothing in the report.
    """
    evaluate, view = client.experiment.evaluate, ctx.view
    masks = evaluate.class_masks and client.client != EVALUATOR
    seen = _seen(client, order) if masks else None
    sets, logits = dict(_sets(client, order, view)), dict[str, list[Tensor]]()
    if not client.may_score(order, ctx, payload, state, sets):
        for part in client.parts:
            if part.keeps_scores:
                part.scored(Scored(order, ctx, rpc.Report(), sets, logits))
        return
    kept = logits if any(part.reads_logits for part in client.parts) else None
    found = score(client.method, ctx, payload, state, sets, seen, order.confusion, kept)
    by_class = client.experiment.announced == "exact"
    for (rule, name), c in found.items():
        report.counts.append(
            rpc.Counts(
                view=view,
                rule=rule,
                test_set=name,
                loss_sum=c.loss_sum,
                support=c.support if by_class else [c.support.sum()],
                predicted=c.predicted if by_class else [c.predicted.sum()],
                correct=c.correct if by_class else [c.correct.sum()],
            )
        )
    own = [c.confusion for (_, name), c in found.items() if name.startswith("task/")]
    if counted := [cells for cells in own if cells is not None]:
        cells = np.sum(counted, axis=0)
        report.confusions.append(rpc.Confusion(view=view, counts=cells.ravel()))
    for part in client.parts:
        part.scored(Scored(order, ctx, report, sets, logits))


def _seen(client: Client, order: rpc.Order) -> Tensor:
    """Return the classes that a client has had training examples of by now, (K,) bool."""
    tasks = client.stream.counted(0, min(order.tasks_seen, client.data.num_tasks))
    counts = [client.data.counts(task, "train") for task in tasks]
    return torch.tensor(counts or [[0] * client.data.num_classes]).sum(0) > 0


def _sets(
    client: Client, order: rpc.Order, view: str
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield the test sets of an order by name: those of the tasks, and the global one."""
    stream = client.stream
    if client.client != EVALUATOR:
        for task, test, kept in stream.scored(order.tasks_seen, order.first_task):
            yield f"task/{task}", test
            if kept is not None:
                yield f"{VALIDATION}/{task}", kept
    if client.client == EVALUATOR or (order.global_test and view != "global"):
        of_all = stream.global_test()
        if of_all is not None:
            yield "global-test", of_all
