"""What commands print for programs (``--json``): objects with keys and types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Printed(BaseModel):
    """One object that a command prints."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PluginLine(Printed):
    """What is installed beside the core."""

    name: str
    package: str
    is_installed: bool
    adds: list[str]
    """The groups of entry points that it fills."""


class DataSetLine(Printed):
    """A data set that is known by name."""

    name: str
    about: str
    path: str | None
    """Where it lies; null: it is not here, or it is made as it is read."""
    advice: str
    """How to get it; empty where nothing is to be done."""


class CheckedClient(Printed):
    """What one client's directory holds."""

    client: str
    tasks: int
    train: int
    test: int
    """Examples."""
    classes: int
    """Classes of the data, at all clients."""
    classes_trained: int
    """Classes with training examples here."""
    classes_tested: int
    """Those of them with test examples, too."""
    input_shape: list[int]
    lowest: float | None
    highest: float | None
    """Least and greatest value as the net sees them; null without examples."""


class Checked(Printed):
    """What ``fedcli check`` finds."""

    clients: list[CheckedClient]
    notes: list[str]
    wrong: list[str]
    """What has to be mended; the exit status is 1 unless it is empty."""


class QueuedLine(Printed):
    """A run of a queue."""

    run: str
    state: str
    """waiting, running, skipped, over, failed or withdrawn."""
    directory: str | None
    """Its run directory, of a queue on this machine."""
    address: str | None
    """Where it is served, by a front that was asked; null: it is not."""
    doing: str
    """What it does, waits for, or failed of, as its front says."""


class Verification(Printed):
    """What ``fedsrv verify`` finds of a run, or of an audit log alone."""

    run: str
    holds: bool
    statements: int | None
    """Statements of the history; null of a log alone, which has none."""
    lines: int
    """Lines of the audit log."""
    head: str
    """NUMBER:LINK, to be kept elsewhere and compared later."""
    wrong: list[str]
    notes: list[str]
    """What was changed since the head of ``--head``, and what an earlier version did not state."""


class Tracked(Printed):
    """How far a tracker is."""

    tracker: str
    interactions: int
    """It has the metrics of so many, from the first on."""
    error: str | None
    """Why it failed, if it did."""


class Recovered(Printed):
    """What ``fedsrv recover`` made of a run."""

    run: str
    interactions: int
    """Interactions that the new run.db holds."""
    notes: list[str]


SHAPES: Mapping[str, Any] = {
    "plugins": list[PluginLine], "data": list[DataSetLine], "check": Checked,
    "queue": list[QueuedLine], "verify": Verification, "track": list[Tracked],
    "recover": Recovered,
}  # fmt: skip
"""What commands print with ``--json``."""
