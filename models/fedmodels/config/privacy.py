"""What a config says of privacy: ``[privacy]``."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fedmodels.config.bounds import PositiveCount
from fedmodels.config.strict_table import StrictTable

Announced = Literal["exact", "rounded", "none"]
"""How exactly clients tell how many examples of each class they have."""
HOW: tuple[Announced, ...] = ("exact", "rounded", "none")
"""The same in falling order of what is told."""
FEWEST = 3
"""Clients below which a sum tells a client too much of the others."""


class SecureSum(StrictTable):
    """``[privacy.secure_sum]``: how uploads are summed under masks."""

    threshold: Annotated[float, Field(gt=0.5, le=1)] | None = None
    """Part of the cohort, rounded up, whose shares open the masks; two thirds unless given. That
    many clients must stay until the sum is known, and as many together could open one upload."""
    bits: Literal[32, 64] = 32
    """Bits of an integer that stands for a number. With 32 an upload is as large as without."""
    largest: Annotated[float, Field(ge=1, le=1e6)] = 64.0
    """Limit of the numbers of an upload. A client with a number beyond it fails for the round."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Norm that a client's change of the weights it received is scaled down to, if it is larger.
    Clients do it themselves; nobody can look."""
    groups: PositiveCount = 1
    """Groups that a cohort is cut into. Each agrees on masks and makes a sum of its own. To
    ``[server] reduce`` the mean of a group is one upload."""

    def needed(self, clients: int) -> int:
        """Return how many of so many clients open the masks."""
        return max(2, math.ceil((self.threshold or 2 / 3) * clients - 1e-9))


def _defaults(value: Any) -> Any:
    """Return the table that ``true`` or ``false`` stands for."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class Privacy(StrictTable):
    """``[privacy]``: what is kept from others by computation, or not told at all."""

    announce: Announced = "exact"
    """How many examples of each class a client tells: as many as it has; ``rounded`` up to a power
    of two; or ``none``, for each task their sum alone. Unless ``exact``, scores are sums over
    classes. Methods that send or read class counts are refused: docs/privacy.md."""
    secure_sum: Annotated[SecureSum | None, BeforeValidator(_defaults)] = None
    """Let the coordinator see sums of uploads alone: ``true``, or a table with what differs from
    the defaults (docs/secure-aggregation.md). Needs the extra ``secure-sum``."""
