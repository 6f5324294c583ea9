"""Numbers of a config with the values that make sense; others are told before a run begins."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

NonNegative = Annotated[float, Field(ge=0)]
"""Such as the weight of a term of a loss: 0 leaves it out."""
Positive = Annotated[float, Field(gt=0)]
"""Such as a temperature or a learning rate."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, such as the weight of one of two terms."""
MAX_COUNT = 2**31 - 1
"""No count is larger: torch takes none beyond it."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A count; 0 is allowed."""
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A count of at least one."""
