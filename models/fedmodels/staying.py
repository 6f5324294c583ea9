"""How a part in one of several runs ended, and so when again: of a site or a relay that stays."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from fedmodels.errors import ConfigError, SetOut
from fedmodels.times import FIRST_PAUSE_S, LAST_PAUSE_S


class Outcome(Enum):
    """How taking part in a run ended, and so whether it is joined again."""

    OVER = "is over"
    """It may be given further rounds: again after a minute."""
    LATER = "ended by a fault"
    """As of a link, a disk or data that are away: again, after a longer time each time."""
    NOT_ALLOWED = "this site stays out of it"
    """By what the site itself says: again once the run was away, or another one was served."""
    FOR_GOOD = "goes on without this site"
    """As the run says: never again."""

    @classmethod
    def of(cls, status: int) -> Outcome:
        """Return what the exit status of a process says that took part in a run."""
        known = {
            0: cls.OVER,
            ConfigError.exit_code: cls.NOT_ALLOWED,
            SetOut.exit_code: cls.FOR_GOOD,
        }
        return known.get(status, cls.LATER)


def pauses() -> Iterator[float]:
    """Yield the pauses after faults that follow one another, in seconds: each twice the last."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
