"""How new lists of revoked certificates were, in a file beside a client's states, or a relay's log.

Whoever can change the directory of a list could remove the note beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, reason_of
from fedmodels.host.files import write_atomically

LISTS = "fedtide-revocations.json"


class KeptLists:
    """The file, or without a place what this process knows; used by one thread at a time."""

    def __init__(self, place: Path | None, name: str = LISTS) -> None:
        """Read nothing yet; the file lies in this directory."""
        self.path = None if place is None else place / name
        self._marks: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        """Return what was kept last; ConfigError if that cannot be read."""
        if self.path is None:
            return self._marks
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {reason_of(error)}") from None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(
                f"{self.path} cannot be read: it is damaged; delete it to take the list as it is"
            )
        return found

    def keep(self, marks: Mapping[str, tuple[int, float]]) -> None:
        """Store how new the lists are; ConfigError if that cannot be written."""
        if self.path is None:
            self._marks = marks
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(marks) + "\n", sync=True, private=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {reason_of(error)}") from None
