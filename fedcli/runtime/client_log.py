"""What a client says of its work: a line each in the log, with figures for ``--json``."""

from __future__ import annotations

import logging
import time
from typing import Any

from fedmodels.log_lines import event_of
from fedpb.v1 import coordinator_pb2 as rpc

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


def accuracies(report: rpc.Report) -> dict[str, float]:
    """Return the accuracy over a report's test sets, by view and prediction rule."""
    right: dict[str, list[int]] = {}
    for one in report.counts:
        name = f"{one.view} ({one.rule})" if one.rule else one.view
        sums = right.setdefault(name, [0, 0])
        sums[0] += sum(one.correct)
        sums[1] += sum(one.support)
    return {name: correct / tested for name, (correct, tested) in right.items() if tested}
