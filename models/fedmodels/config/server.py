"""``[server]``: how the coordinator waits, keeps and computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import Count, PositiveCount
from fedmodels.config.reduction import Reduction
from fedmodels.errors import ConfigError

FEWEST_JUDGED = 5
"""Uploads of a round among which one may stand out."""


class Server(Reduction):
    """``[server]``: how the coordinator waits, keeps and computes."""

    min_clients: PositiveCount | None = None
    """How many clients suffice when others fail or, with ``deadline_s``, are late or dead: at the
    start, in an interaction, in an evaluation and at the end; by default all. An open run needs
    half of its first clients, or of a cohort that is smaller, unless noise at clients or a robust
    rule counts on all; a round of no more clients may lack one of them."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which the answers of ``min_clients`` suffice. With a deadline, nobody waits for
    a client known to be dead once all others have answered. Without one, the run waits for
    everybody who has not failed. An open run without ``min_clients`` has 3600, or none with
    ``[schedule] wait = "all"``."""
    durability: Literal["watermark", "strict"] = "watermark"
    """``strict`` syncs every commit to the disk before it counts."""
    max_rollback: Count = 2
    """How many interactions are computed again at most for a client that lost its private states,
    beyond what a power failure explains. States of this many interactions are always kept.
    ``--resume`` may change it."""
    exclude_after: PositiveCount | None = None
    """Set a client aside for good when this many of its uploads in a row stood out of their cohorts
    (docs/robustness.md), in rounds of five uploads or more of which fewer than a third lie; by
    default only ``fedsrv exclude`` sets a client aside."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Torch threads of the coordinator; the count changes floats."""
    upload_memory_mb: Count = 256
    """Uploads of a round beyond this many MiB are added up as they come, where the method allows
    it, and those that have to wait go to a memory-mapped spool. An upload beyond half of it goes
    there at once."""

    @model_validator(mode="after")
    def _deadline_has_a_meaning(self) -> Server:
        if self.deadline_s is not None and self.min_clients is None:
            raise ValueError(
                f"deadline_s = {self.deadline_s:g} changes nothing while all clients are needed; "
                "give min_clients as well"
            )
        return self

    def check_clients(self, clients: int) -> None:
        """Check that there are as many clients as are needed; raise ConfigError if not."""
        if (needed := self.min_clients or 0) > clients:
            raise ConfigError(f"[server] min_clients = {needed} exceeds clients = {clients}")

    def check_exclusion(self, at_once: int) -> None:
        """Check that those who lie cannot aim ``exclude_after`` at another client.

        Args:
            at_once: uploads that a round ends with.

        Raises:
            ConfigError: they are too few.
        """
        if at_once < FEWEST_JUDGED:
            raise ConfigError(
                f"[server] exclude_after needs {FEWEST_JUDGED} uploads in a round to tell which "
                f"one stands out, and rounds have {at_once}: leave it out"
            )
        if (f := self.attackers or 0) > (most := (at_once - 1) // 3):
            raise ConfigError(
                f"[server] attackers = {f} of {at_once} uploads could aim exclude_after at an "
                f"honest client, {most} could not: leave exclude_after out, or let rounds have "
                f"{3 * f + 1} uploads"
            )
