"""What FedMLP's paper leaves open; docs/methods/fedmlp.md argues the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedmodels.config.bounds import Positive
from fedmodels.errors import ConfigError
from fedmodels.methods.readings.heads import HeadsReading
from fedmodels.techniques.shallow import check_share


@dataclass(frozen=True, kw_only=True)
class FedMLPReading(HeadsReading):
    """How Guo et al., Pattern Recognition 2024, is read."""

    share: str = "extractor"
    """What travels: ``extractor``, ``all``, or ``shallow(n)``: the first n layers with weights."""
    clustering: Literal["kmeans", "finch"] = "kmeans"
    """How semantic prototypes are found; ``finch`` finds their number itself."""
    smooth_l1_threshold: Positive = 1.0
    """Distance at which smooth-L1 turns from a square into a line."""
    sl1_reduction: Literal["mean", "sum"] = "mean"
    """Mean or sum over the coordinates of an embedding."""
    ls_norm: Literal["minority_mean", "class_sum", "batch_mean"] = "minority_mean"
    """What L_S is divided by: minority examples, those of each class, or the batch."""
    kl_norm: Literal["softmax", "l2_softmax"] = "softmax"
    """How embeddings become distributions; the paper does not say. ``l2_softmax`` normalises them
    first. Then L_I is at most about 3 / d nats, and training does what it does without L_I: mean
    scores are within 0.1 points of that row (docs/results/fedmlp.md). On a small net without
    normalisation it gains 3.4 [0.9, 6.0] points of A_loc over the default, which keeps the loss."""
    kl_dir: Literal["z_c", "c_z"] = "z_c"
    """KL(embedding || prototype), as eq. 7 is written, or the other way round. No interval of six
    rounds of Fashion-MNIST tells the two apart (docs/results/fedmlp.md)."""
    history: Literal["accumulate", "previous_task"] = "accumulate"
    """Local prototypes a client remembers: the latest of every class, or the last task's."""
    c_new: Literal["sample", "class_mean"] = "sample"
    """A new class starts at the semantic prototype nearest to each example, or to their mean."""
    minority: Literal["server_counts", "oracle"] = "server_counts"
    """J from the counts clients reported, or from those of all data, known in advance."""
    minority_when_balanced: bool = False
    """Whether the upper half of the classes stands for J where all reported counts are equal. With
    ``minority = "oracle"`` it does."""
    proto_agg: Literal["participants", "all_latest"] = "participants"
    """Global prototypes: means over this interaction's clients, or over everybody's latest."""
    inference: Literal["classifier", "prototype"] = "classifier"
    """The rule that counts; the other one is scored beside it."""
    eval_base: Literal["aggregated", "local"] = "aggregated"
    """Extractor of a client's scored model: the received one, or the one it just trained."""

    def __post_init__(self) -> None:
        """Check what types leave open."""
        check_share(self.share)
        if self.share == "all" and self.heads == "round":
            raise ConfigError(
                "method.reading.share = 'all' shares heads for good: heads = 'round' has none"
            )
