"""What GLDP's paper leaves open; docs/methods/gldp.md argues the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedmodels.config.bounds import NonNegative
from fedmodels.methods.readings.heads import HeadsReading


@dataclass(frozen=True, kw_only=True)
class GldpReading(HeadsReading):
    """How Guo et al., 2025, is read; a value ``stage`` is the paper's word for one interaction."""

    order: Literal["base_first", "head_first"] = "base_first"
    """Which phase comes first."""
    wd_head: NonNegative = 0.0
    """Weight decay of the head, in place of the run's: none, as in a code base by the same author.
    The paper decays "local training" without a split: the run's value here, too."""
    kl_space: Literal["embedding", "head"] = "embedding"
    """Where eq. 8 compares: softmax over the embedding's coordinates, or over the head's logits. No
    interval tells the two apart (docs/results/gldp.md)."""
    kl_reduction: Literal["batchmean", "mean", "sum"] = "batchmean"
    """``batchmean`` is the mean over examples, ``mean`` that over examples and coordinates."""
    gp_mode: Literal["class_mean", "per_sample"] = "class_mean"
    """What eq. 10 compares with the global prototype: the batch's class mean, or every example."""
    uplink_proto: Literal["raw", "ema"] = "raw"
    """What goes up: this task's class means, or the client's moving averages of them."""
    proto_pass: Literal["eval", "running"] = "eval"
    """Class means after training, in evaluation mode, or as embedded in the last epoch."""
    own_moves: Literal["stage", "epoch"] = "stage"
    """When eq. 9 moves a client's own prototypes: after the interaction, or after each epoch of
    the representation too, by its embeddings, so that eq. 8 follows (Algorithm 1, line 15). No
    interval of five seeds tells the two apart (docs/results/gldp.md)."""
    gp_refresh: Literal["stage", "round"] = "stage"
    """Which global prototypes clients train with: the newest, or those of the round's beginning."""
    bn: Literal["average", "local"] = "average"
    """Whether running statistics belong to the representation or stay with the client."""
    inference: Literal["gldp_gp", "gldp_lp", "classifier"] = "gldp_gp"
    """The rule whose scores count: nearest global or local prototype, or the head. All three are
    reported."""
    candidates: Literal["client_seen", "all"] = "client_seen"
    """Classes of eq. 13: those the client has trained on, or all. Methods without such a mask are
    compared with the rule ``all_classes``, which has none."""
    eval_base: Literal["aggregated", "local"] = "aggregated"
    """Representation of a client's personal model: everyone's, or its own of its last training."""
    eval_model: Literal["last", "stage_mean"] = "last"
    """What is scored: the newest model, or the mean of those after each interaction of the round;
    a head that travels belongs to it."""

    @property
    def keeps_embeddings(self) -> bool:
        """Whether class means are taken of embeddings as they were while they trained."""
        return self.proto_pass == "running" or self.own_moves == "epoch"

    @property
    def averages_round(self) -> bool:
        """Whether what is scored is the mean over the interactions of the round."""
        return self.eval_model == "stage_mean"

    @property
    def holds_prototypes(self) -> bool:
        """Whether all interactions of a round train with the global prototypes of its beginning."""
        return self.gp_refresh == "round"
