"""FedNTD — Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning, NeurIPS 2022. https://arxiv.org/abs/2106.03097

    paper          here                   paper   here
    w^g, q^g       refs, batch.taught     beta    beta
    q^l            out.logits             tau     tau
    L_NTD          not_true_distance

Deviations: the teacher is in evaluation mode (the released code leaves it in training mode for the
very first client); the not-true logits are gathered, as in the released code, never masked by an
infinity; clients weigh by their examples, as in the released code.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedmodels.config.bounds import NonNegative, Positive
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.distances import distillation
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.stepped import Batch, Output


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each row without the logit of its label: (B, K) and (B,) give (B, K-1)."""
    column = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, column + (column >= labels[:, None]))


def not_true_distance(teacher: Tensor, student: Tensor, labels: Tensor, tau: float) -> Tensor:
    """Return tau^2 KL(teacher || student) over the classes that are not true, batch mean.

    Args:
        teacher: logits (B, K), a constant.
        student: logits (B, K).
        labels: (B,) whose columns are left out.
        tau: temperature of both softmaxes.
    """
    kept = not_true(teacher, labels), not_true(student, labels)
    return tau**2 * distillation(*kept, tau)


@register("fedntd")
class FedNTD(FedAvg):
    """FedAvg whose clients keep what the global model says of the classes that are not true."""

    citation: ClassVar[str] = "Lee et al., NeurIPS 2022"
    takes_targets: ClassVar[bool] = False

    beta: NonNegative = 1.0
    """Weight of the not-true distillation; 0 is FedAvg."""
    tau: Positive = 1.0
    """Temperature of both softmaxes."""

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> SplitNet:
        return kept_copy(ctx.net, "teacher").requires_grad_(False).eval()  # w^g

    def taught(self, ctx: ClientContext, x: Tensor, refs: SplitNet) -> tuple[Tensor, ...]:
        return (refs(x),)  # q^g

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: SplitNet) -> Tensor:
        (teacher,) = batch.taught
        distance = not_true_distance(teacher, out.logits, batch.y, self.tau)  # L_NTD
        return super().loss(ctx, batch, out, refs) + self.beta * distance  # L_CE + beta L_NTD
