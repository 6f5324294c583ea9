"""What FedTGP's paper and its code do differently; docs/methods/fedtgp.md has the sources."""

from __future__ import annotations

import torch
from torch import Tensor

from fedmodels.methods.variants import Variants
from fedplugins.methods.fedtgp import FedTgp


class NearestClasses(FedTgp):
    """The margin is the largest of the classes' distances to their nearest class."""

    def largest(self, apart: Tensor) -> float:
        return float(apart.clone().fill_diagonal_(torch.inf).amin(1).max())


OF = {"fedtgp": Variants(readings={"margin_over": {"all": None, "nearest": NearestClasses}})}
