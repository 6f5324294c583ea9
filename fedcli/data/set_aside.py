"""Rows and files that cannot be used: refused all together, or set aside, counted and listed.

``[data] bad`` says which. A row is bad where a cell is empty or holds what its column cannot, a
file where it cannot be read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from fedcli.data.folders import shown_in
from fedmodels.config.data import BAD_SHARE, Data
from fedmodels.console.printable import printable
from fedmodels.errors import DataError

SHOWN = 10
"""Rows or files that a line lists."""
MAX_LETTERS = 200
"""Letters of what it says of each, at most."""
log = logging.getLogger(__name__)


@dataclass
class SetAside:
    """The bad rows, or files, of one data set."""

    what: str
    """``rows``, ``files`` or ``images``."""
    skips: bool = False
    """Whether they are set aside; else they are refused."""
    share: float = BAD_SHARE
    """Part of all beyond which they are refused all the same."""
    hint: str = ""
    """How to set them aside, where a config can say it."""
    total: int = 0
    """How many were looked at."""
    count: int = 0
    """How many of them are bad."""
    lines: list[str] = field(default_factory=list)
    """What is wrong with the first ones."""
    first: DataError | None = None
    """The error of the first one."""

    @classmethod
    def of(cls, data: Data, what: str) -> SetAside:
        """Begin, as ``[data]`` says; nothing was looked at."""
        share = data.bad_share or BAD_SHARE
        return cls(what, data.bad == "skip", share, "; [data] bad = 'skip' sets them aside")

    def add(self, line: str, count: int = 1, error: DataError | None = None) -> None:
        """Take in bad ones, and what is wrong with the first of them."""
        self.count += count
        if len(self.lines) < SHOWN:
            self.lines.append(printable(shown_in(line), MAX_LETTERS))
        self.first = self.first or error

    def settle(self, where: object) -> None:
        """Say in a line what was set aside.

        Raises:
            DataError: something is bad and is not to be set aside, or too much is.
        """
        if not self.count:
            return
        shown = "; ".join(self.lines)
        more = f"; and {self.count - len(self.lines)} more" if self.count > len(self.lines) else ""
        if not self.skips and self.first is not None:
            if self.count == 1:
                raise self.first
            line = f"{self.first}. {self.count} {self.what} are bad in all: {shown}{more}"
            raise self._with_notes(f"{line}{self.hint}")
        of = f"{self.count} of {self.total} {self.what}"
        if self.count > self.share * self.total:
            raise self._with_notes(
                f"{where}: {of} are bad, and [data] bad_share = {self.share:g} allows "
                f"{int(self.share * self.total)}: {shown}{more}"
            )
        log.warning("note: %s: %s are set aside: %s%s", shown_in(str(where)), of, shown, more)

    def _with_notes(self, line: str) -> DataError:
        """Return an error with the lines that a site may paste against the first bad one."""
        whole = DataError(line)
        for note in getattr(self.first, "__notes__", ()):
            whole.add_note(note)
        return whole
