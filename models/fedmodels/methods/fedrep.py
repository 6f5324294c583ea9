"""FedRep — Collins et al., Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, Algorithm 1. https://arxiv.org/abs/2102.07078

    paper     here                            paper   here
    phi       base/…                          tau     head_epochs (epochs, not steps)
    h_i       head/…, the private state       rn      the cohort; weighting is uniform

Deviations: base updates are ``base_epochs`` epochs, one step in the paper, and by default of 5 to 1
with those of the head (the released CIFAR-10 runs have 1 or 5 after 10 of the head); no final
fine-tuning of the heads; no weight decay on the head, where the release has it on all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from fedmodels.config.bounds import NonNegative
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.training.contexts import ClientContext
from fedmodels.training.stepped import Phase


@register("fedrep")
class FedRep(FedAvg):
    """A shared representation, fitted in turn with each client's own head."""

    citation: ClassVar[str] = "Collins et al., ICML 2021"

    weighting: Literal["examples", "uniform"] = "uniform"
    private: tuple[str, ...] = ("head/",)
    """Prefixes of the weights that stay with the client; with none, all weights travel."""
    order: Literal["head_first", "base_first"] = "head_first"
    """Which phase comes first."""
    head_epochs: int = -1
    """Epochs of the head; -1 is a sixth of ``local_epochs``, but at least one."""
    base_epochs: int = -1
    """Epochs of the base; -1 is the rest of ``local_epochs``, but at least one."""
    wd_head: NonNegative = 0.0
    """Weight decay of the head, in place of the run's."""
    bn_of_frozen: Literal["train", "eval"] = "train"
    """Whether running statistics of the base move while the head trains; as released, they do."""

    def epochs(self, local_epochs: int) -> tuple[int, int]:
        """Return the epochs of head and base."""
        head = min(max(round(local_epochs / 6), 1), local_epochs)
        base = min(max(local_epochs - head, 1), local_epochs)
        return (
            self.head_epochs if self.head_epochs >= 0 else head,
            self.base_epochs if self.base_epochs >= 0 else base,
        )

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        of_head, of_base = self.epochs(ctx.run.experiment.training.local_epochs)
        decay, mode = {"head/": self.wd_head}, self.bn_of_frozen
        head = Phase(of_head, ("head/",), weight_decay=decay, bn_of_frozen=mode)  # tau steps of h_i
        base = Phase(of_base, ("base/",), bn_of_frozen=mode)  # then phi
        return [head, base] if self.order == "head_first" else [base, head]
