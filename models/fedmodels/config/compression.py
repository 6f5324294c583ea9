"""``[compression]``: how parameters of the net travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import StrictTable

Form = Literal["float32", "float16", "bfloat16", "int8"]


class Compression(StrictTable):
    """``[compression]``: how parameters of the net travel; docs/compression.md has cost and effect.

    Left out, everything travels as it is.
    """

    up: Form | Literal["top-k"] = "float32"
    """Form of what clients' training changed; ``top-k`` sends the largest changes alone."""
    down: Form = "float32"
    """Form of the parameters that everybody gets."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Part of the parameters that ``top-k`` sends."""
    feedback: bool = True
    """With ``int8`` and ``top-k``, clients keep what they did not send, and send it later."""
    zstd: bool = False
    """Compress all payloads as well, without loss, where that makes them smaller; the coordinator
    and all clients need the extra ``zstd``."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Compression:
        if self.differs("share") and self.up != "top-k":
            raise ValueError(f"share does nothing with up = {self.up!r}: leave it out")
        if not self.feedback and self.up not in ("int8", "top-k"):
            raise ValueError(f"feedback does nothing with up = {self.up!r}: leave it out")
        return self
