"""What a relay keeps: who called it, in the form of a coordinator's, and how new its lists were.

A relay has no run directory, and no commits that could name lines of the log. So only a head that
somebody has kept shows that the end of the log was cut off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedmodels.errors import ConfigError
from fedpb.kept_lists import LISTS, KeptLists
from fedsrv.progress.events import EventLog
from fedsrv.state.audit import AUDIT, Audit
from fedsrv.state.run_directory import lock
from fedsrv.transport.journal import Journal


@contextlib.contextmanager
def kept_log(place: Path | None, events: EventLog) -> Iterator[Journal]:
    """Yield the journal of a relay, which writes into a directory; without one it keeps nothing.

    A log that is there goes on. What is wrong with it becomes a note.

    Raises:
        ConfigError: the directory cannot be used, or is that of a run.
        RunFailed: another process uses it.
    """
    if place is None:
        yield Journal()
        return
    _make(place)
    try:
        held = lock(place)
    except OSError as error:
        raise ConfigError(f"--audit {place} cannot be used: {error.strerror}") from None
    try:
        audit = Audit(place / AUDIT, None)
        for line in audit.differences:
            events.tell("note", line=line)
        try:
            yield Journal(audit)
        finally:
            audit.close()
    finally:
        os.close(held)


def kept_lists(place: Path | None) -> tuple[KeptLists, KeptLists]:
    """Return where a relay keeps how new its lists of revoked certificates were.

    The first is for what the coordinator above may show, the second for what clients show. Without
    a directory they know of the lists that this process has read.

    Raises:
        ConfigError: the directory cannot be used, or is that of a run.
    """
    if place is not None:
        _make(place)
    return KeptLists(place, f"up-{LISTS}"), KeptLists(place)


def _make(place: Path) -> None:
    """Make the directory of a relay; ConfigError if that cannot be, or if it is that of a run."""
    if (place / "run.db").exists():
        raise ConfigError(f"--audit {place} is the directory of a run: give the relay its own")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--audit {place} cannot be used: {error.strerror}") from None
