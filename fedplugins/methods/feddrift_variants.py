"""What FedDrift begins with in two readings of its code; docs/methods/feddrift.md has sources."""

from __future__ import annotations

from typing import ClassVar

from fedmodels.methods.variants import Variants
from fedplugins.methods.feddrift import FedDrift


class OneModel(FedDrift):
    """All clients begin with one model, as in the code's ``H_A_C_1``."""

    begins_alone: ClassVar[bool] = False


OF = {"feddrift": Variants(readings={"begins": {"client": None, "one": OneModel}})}
