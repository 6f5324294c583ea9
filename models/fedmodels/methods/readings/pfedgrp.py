"""What pFedGRP's paper leaves open; docs/methods/pfedgrp.md argues the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedmodels.config.bounds import Count, NonNegative, PositiveCount, Share
from fedmodels.techniques.mixing import Search
from fedmodels.training.settings import Part


@dataclass(frozen=True, kw_only=True)
class PFedGRPReading(Part):
    """How Tan and Liu, 2024, is read."""

    loss_norm: Literal["joint", "separate", "sum"] = "joint"
    """Normalisation of eq. 6: both sums over b, means over each set, or plain sums."""
    align: Literal["logits", "probs"] = "logits"
    """Outputs that eq. 6 compares."""
    images: Literal["round", "epoch"] = "round"
    """How long generated images serve: all epochs of a round, or one, after which others are drawn
    for local training and for eq. 8: docs/results/pfedgrp.md has both."""
    label_dist: Literal["counts", "freq"] = "counts"
    """What clients send of S: the counts, or shares in parts per million."""
    w_param: Literal["softmax", "quad", "pgd", "affine"] = "softmax"
    """Parametrisation of the simplex in eq. 8; ``affine`` allows negative weights."""
    w_init: Literal["uniform", "self"] = "uniform"
    """Weights that the search of eq. 8 begins with."""
    w_optimizer: Literal["adam", "sgd"] = "adam"
    """Optimiser of eq. 8."""
    w_lr: NonNegative = 0.01
    """Learning rate of eq. 8: FedLAW's, as the paper gives none. docs/results/continual.md has runs
    with ten times that."""
    w_epochs: Count = 20
    """Epochs of eq. 8."""
    w_batch: PositiveCount = 64
    """Batch size of eq. 8."""
    w_entropy_floor: Share = 0.0
    """Lower bound of the entropy of a row of weights, as a share of log n, its maximum."""
    w_device: Literal["cpu", "auto"] = "cpu"
    """Where eq. 8 is minimised: on the coordinator's cores, or on its GPU where it has one."""
    bn: Literal["weighted", "batch"] = "weighted"
    """Batch normalisation in eq. 8: by statistics mixed with w, or by the batch's."""

    def search(self) -> Search:
        """Return the settings of eq. 8's minimisation."""
        return Search(
            epochs=self.w_epochs,
            lr=self.w_lr,
            optimizer=self.w_optimizer,
            batch_size=self.w_batch,
            param=self.w_param,
            init=self.w_init,
            entropy_floor=self.w_entropy_floor,
        )
