"""What a site itself wants of privacy: ``fedcli join --require-privacy``, with a ledger of its own.

The floor is checked against the run's config before the first order, and against the site's ledger
before each training. The ledger is a file of the site and not of a run: it counts what all runs
together released, by the content of examples. So the site need not trust the coordinator to count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedcli.gate.privacy_floor import OPTION, PrivacyFloor
from fedcli.parts.privacy.ledger_marks import LedgerMark
from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import LEDGER
from fedmodels.errors import OrderDeclined
from fedmodels.privacy.ledger import Charge, PrivacyLedger
from fedmodels.tensors.bundle import ClientId

log = logging.getLogger(__name__)


class FloorLedger:
    """The floor of a process, and its site's ledger; used by the thread that trains."""

    def __init__(self, floor: PrivacyFloor, path: Path, states: Path | None = None) -> None:
        """Open nothing yet; ``states`` is where the clients have their state directories."""
        self.floor, self.path, self._states = floor, path, states
        self._ledger: PrivacyLedger | None = None
        self._marks: dict[Path, LedgerMark] = {}

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Look at a run that the site's rules allow; ArchiveError where the ledger lacks rows."""
        if self._states is None:
            return
        for client in clients:
            mark = self._mark_of(self._states / str(client))
            if mark.exists():
                mark.check(self._opened())

    def check(self, charge: Charge, states: Path) -> None:
        """Check that a training keeps within the floor.

        ``states`` is the directory of its client.

        Raises:
            OrderDeclined: it would spend more; says how much.
            ArchiveError: the ledger cannot be used, or was put back.
        """
        self._mark_of(states).check(self._opened())
        with _told():
            self._opened().check(charge, self.floor.epsilon, self.floor.delta)

    def note(self, charge: Charge, states: Path) -> None:
        """Charge a training before anything of it leaves; arguments and errors as there."""
        self._mark_of(states).check(self._opened())
        with _told():
            self._opened().note(charge, self.floor.epsilon, self.floor.delta)
        self._mark_of(states).set(self._opened())

    def _mark_of(self, states: Path) -> LedgerMark:
        if states not in self._marks:
            self._marks[states] = LedgerMark(states, f"site, {self.floor.level}", "trainings")
        return self._marks[states]

    def _opened(self) -> PrivacyLedger:
        if self._ledger is None:
            self._ledger = PrivacyLedger(self.path, self.floor.level)
        return self._ledger


def floor_ledger(floor: PrivacyFloor, ledger: Path | None, states: Path) -> FloorLedger:
    """Return the ledger of a site's floor; it lies beside the states unless a place is given."""
    return FloorLedger(floor, ledger or states.absolute().parent / LEDGER, states)


@contextmanager
def _told() -> Iterator[None]:
    """Keep what the site has spent in other runs in its own log: the coordinator learns a word."""
    try:
        yield
    except OrderDeclined as error:
        log.warning("%s: %s", OPTION, error)
        raise OrderDeclined(
            "one more training would exceed this client's epsilon over all its runs"
        ) from None
