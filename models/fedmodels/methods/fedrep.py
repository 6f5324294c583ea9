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
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedmodels.config.bounds import NonNegative
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.bases.private_parts import PrivatePrefixes
from fedmodels.methods.bases.round_heads import RoundHeads
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Phase


@register("fedrep")
@dataclass(frozen=True, kw_only=True)
class FedRep(PrivatePrefixes, RoundHeads):
    """A shared representation, fitted in turn with each client's own head."""

    citation: ClassVar[str] = "Collins et al., ICML 2021"

    weighting: Literal["examples", "uniform"] = "uniform"
    order: Literal["head_first", "base_first", "joint"] = "head_first"
    """Which phase comes first; ``joint`` is one phase of ``local_epochs`` over all weights."""
    head_epochs: int = -1
    """Epochs of the head; -1 is a sixth of ``local_epochs``, but at least one."""
    base_epochs: int = -1
    """Epochs of the base; -1 is the rest of ``local_epochs``, but at least one."""
    wd_head: NonNegative = 0.0
    """Weight decay of the head, in place of the run's."""
    bn_of_frozen: Literal["train", "eval"] = "train"
    """Whether running statistics of the base move while the head trains; as released, they do."""

    def __post_init__(self) -> None:
        """Check that the switches fit each other.

        Raises:
            ConfigError: heads live for a round and other weights are private, or epochs are given
                for phases that are one.
        """
        if self.heads_travel and self.private != ("head/",):
            raise ConfigError(
                '[method] reading.heads = "round" is for private = ["head/"] alone '
                f"(given: {list(self.private)})"
            )
        if self.order == "joint" and max(self.head_epochs, self.base_epochs) >= 0:
            raise ConfigError(
                '[method] head_epochs and base_epochs do nothing with order = "joint", whose one '
                "phase has [training] local_epochs: leave them out"
            )

    def shares(self, name: str) -> bool:
        return self.heads_travel or super().shares(name)

    def epochs(self, local_epochs: int) -> tuple[int, int]:
        """Return the epochs of head and base."""
        head = min(max(round(local_epochs / 6), 1), local_epochs)
        base = min(max(local_epochs - head, 1), local_epochs)
        return (
            self.head_epochs if self.head_epochs >= 0 else head,
            self.base_epochs if self.base_epochs >= 0 else base,
        )

    def phases(self, ctx: ClientContext) -> Sequence[Phase]:
        local_epochs, decay = ctx.run.experiment.training.local_epochs, {"head/": self.wd_head}
        if self.order == "joint":
            return [Phase(local_epochs, weight_decay=decay)]
        of_head, of_base = self.epochs(local_epochs)
        head = Phase(of_head, ("head/",), weight_decay=decay, bn_of_frozen=self.bn_of_frozen)
        base = Phase(of_base, ("base/",), bn_of_frozen=self.bn_of_frozen)
        return [head, base] if self.order == "head_first" else [base, head]
