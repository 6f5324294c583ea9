"""Weights among clients: models that are mixed by them, and what a run records of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedmodels.techniques.aggregation_weights import entropy
from fedmodels.tensors.bundle import Weights
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import Metrics, ServerContext

ROWS = "aggregation_weights"
"""The series of a run that holds the weights; pFedGraph's state has them under the same name."""
MAX_RECORDED_CLIENTS = 200
"""Clients of a run up to which its records hold the weights of all of them; of more, a record would
grow with their square, and holds those of its cohort."""


def mix(models: Sequence[Weights], row: Tensor) -> Weights:
    """Return ``sum_j w_ij theta_j``, buffers too; a row of a single 1 returns that model."""
    return weighted_mean(models, row.tolist())


def graph_metrics(ctx: ServerContext, rows: Tensor, clients: Iterable[int]) -> Metrics:
    """Put the weights into the run's series; return how spread out they are."""
    total = ctx.run.experiment.schedule.clients
    ctx.series[ROWS] = (
        square(rows, list(clients), total) if total <= MAX_RECORDED_CLIENTS else round_weights(rows)
    )
    spread = [entropy(row) for row in rows]
    return {
        "weights_entropy": sum(spread) / len(spread),
        "weights_self": float(rows.diagonal().mean()),
    }


def square(rows: Tensor, clients: Sequence[int], total: int) -> list[list[float]]:
    """Return weights (n, n) of a cohort as a matrix of all clients; others have zero rows."""
    out = torch.zeros(total, total, dtype=torch.float64)
    index = torch.tensor(clients, dtype=torch.int64)
    out[index[:, None], index] = rows.double()
    return round_weights(out)


def round_weights(rows: Tensor) -> list[list[float]]:
    """Return weights (n, m) as a record holds them."""
    return [[round(value, 6) for value in row] for row in rows.double().tolist()]
