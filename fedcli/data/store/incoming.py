"""A folder in which what is complete becomes a task of a client.

A rename makes a file or folder complete: names that begin with a dot, or end with ``.part`` or
``.tmp``, are still being written. What became a task moves to ``taken/``; what cannot become one
moves to ``refused/``, and a text file beside it says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from fedcli.data.folders import is_foreign
from fedcli.data.store.growing import Added, add_task
from fedcli.data.store.site import How
from fedmodels.errors import ArchiveError, ConfigError, DataError, LinkError, reason_of
from fedmodels.files import write_atomically

TAKEN, REFUSED = "taken", "refused"
UNFINISHED = (".part", ".tmp")
log = logging.getLogger(__name__)


class Incoming:
    """The folder of one client."""

    def __init__(self, place: Path, root: Path, client: int, how: Callable[[], How | None]) -> None:
        """Look at nothing yet.

        Args:
            place: the folder; it is made where it is missing.
            root: the directory above the client's data.
            client: whose tasks come.
            how: tells how a site's own files are cut, where that is known.
        """
        self.place, self._root, self._client, self._how = place, root, client, how
        self._told = ""

    def take(self) -> list[Added]:
        """Make a task of each file or folder that is complete, in the order of their names.

        What is wrong for now, such as a full disk, is told once, and tried again the next time.
        """
        added = list[Added]()
        try:
            for source in self._complete():
                try:
                    how = self._how()
                    found = add_task(self._root, self._client, source, *(how or ()))
                except (DataError, ConfigError) as error:
                    self._refuse(source, str(error))
                    continue
                self._move(source, TAKEN)
                log.info("client %s: %s has come: %s", self._client, source.name, found)
                added.append(found)
            self._told = ""
        except (ArchiveError, LinkError) as error:
            self._tell(str(error))
        except OSError as error:
            self._tell(f"{self.place}: {reason_of(error)}")
        return added

    def _complete(self) -> list[Path]:
        """Return what is complete, by name."""
        self.place.mkdir(parents=True, exist_ok=True)
        return sorted(
            path for path in self.place.iterdir()
            if not is_foreign(path.name) and not path.name.endswith(UNFINISHED)
            and path.name not in (TAKEN, REFUSED)
        )  # fmt: skip

    def _refuse(self, source: Path, why: str) -> None:
        """Move away what cannot become a task, and say why."""
        log.error("client %s: %s is no task: %s", self._client, source.name, why)
        (self.place / REFUSED).mkdir(exist_ok=True)
        target = _free(self.place / REFUSED / source.name)
        write_atomically(target.with_name(f"{target.name}.txt"), why + "\n")
        source.rename(target)

    def _move(self, source: Path, folder: str) -> None:
        (self.place / folder).mkdir(exist_ok=True)
        source.rename(_free(self.place / folder / source.name))

    def _tell(self, line: str) -> None:
        """Log what is wrong for now, once."""
        if line != self._told:
            log.error("client %s: %s; it is tried again", self._client, line)
        self._told = line


def _free(path: Path) -> Path:
    """Return a path that nothing has: this one, or one with a number behind its name."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
