"""The score of a model on a client's test data: what a report tells of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedcli.runtime.client_part import Client, Scored
from fedmodels.numerics.metrics import VALIDATION
from fedmodels.tensors.bundle import EVALUATOR, Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.scoring import score
from fedpb.v1 import coordinator_pb2 as rpc


def add_score(
    client: Client,
    order: rpc.Order,
    ctx: ClientContext,
    payload: Bundle,
    state: Bundle,
    report: rpc.Report,
) -> None:
    """Score the model in a context's net on the test sets of an order; parts see it afterwards."""
    evaluate, view = client.experiment.evaluate, ctx.view
    masks = evaluate.class_masks and client.client != EVALUATOR
    seen = _seen(client, order) if masks else None
    sets, logits = dict(_sets(client, order, view)), dict[str, list[Tensor]]()
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
        stream.meet(order.tasks_seen, order.first_task)
        end = min(order.tasks_seen, client.data.num_tasks)
        for task in stream.counted(order.first_task, end):
            yield f"task/{task}", stream.test(task)
            if (kept := stream.validation(task)) is not None:
                yield f"{VALIDATION}/{task}", kept
    if client.client == EVALUATOR or (order.global_test and view != "global"):
        of_all = stream.global_test()
        if of_all is not None:
            yield "global-test", of_all
