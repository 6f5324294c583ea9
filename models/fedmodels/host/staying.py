"""How a part in one of several runs ended, and so when again: of a site or a relay that stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from enum import Enum

from fedmodels.errors import ConfigError, SetOut
from fedmodels.times import A_NEW_RUN_S, FIRST_PAUSE_S, LAST_PAUSE_S

NEW_RUNS = 20
"""New runs that a site or a relay joins without waiting: a server chooses its run ids, and each run
costs a process or a start. Further ones are joined one per ``A_NEW_RUN_S``."""
log = logging.getLogger(__name__)


class Outcome(Enum):
    """How taking part in a run ended, and so whether it is joined again."""

    OVER = "is over"
    """It may be given further rounds: again after a minute."""
    LATER = "ended by a fault"
    """As of a link, a disk or data that are away: again, after a longer time each time."""
    NOT_ALLOWED = "this site stays out of it"
    """By what the site itself says: again once the run was away, another one was served, or the
    site's files have changed."""
    FOR_GOOD = "continues without this site"
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


class NewRuns:
    """How many more runs a site or a relay may join without waiting."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._at, self._spare, self._is_told = now, now(), float(NEW_RUNS), False

    def take(self) -> bool:
        """Return whether a run other than the last one may be joined now."""
        passed, self._at = self._now() - self._at, self._now()
        self._spare = min(NEW_RUNS, self._spare + passed / A_NEW_RUN_S)
        if is_spare := self._spare >= 1:
            self._spare -= 1
        elif not self._is_told:
            log.warning(
                "the server has named more than %d runs one after the other: a new one is joined "
                "each %g s", NEW_RUNS, A_NEW_RUN_S,
            )  # fmt: skip
        self._is_told = not is_spare
        return is_spare
