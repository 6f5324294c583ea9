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
from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import LEDGER
from fedmodels.errors import OrderDeclined
from fedmodels.privacy.ledger import Charge, PrivacyLedger
from fedmodels.tensors.bundle import ClientId

log = logging.getLogger(__name__)


class FloorLedger:
    """The floor of a process, and its site's ledger; used by the thread that trains."""

    def __init__(self, floor: PrivacyFloor, path: Path) -> None:
        """Open nothing yet."""
        self.floor, self.path = floor, path
        self._ledger: PrivacyLedger | None = None

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Look at a run that the site's rules allow."""

    def check(self, charge: Charge) -> None:
        """Check that a training keeps within the floor.

        Raises:
            OrderDeclined: it would spend more; says how much.
            ArchiveError: the ledger cannot be used.
        """
        with _told():
            self._opened().check(charge, self.floor.epsilon, self.floor.delta)

    def note(self, charge: Charge) -> None:
        """Charge a training before anything of it leaves; raises as :meth:`check`."""
        with _told():
            self._opened().note(charge, self.floor.epsilon, self.floor.delta)

    def _opened(self) -> PrivacyLedger:
        if self._ledger is None:
            self._ledger = PrivacyLedger(self.path, self.floor.level)
        return self._ledger


def floor_ledger(floor: PrivacyFloor, ledger: Path | None, states: Path) -> FloorLedger:
    """Return the ledger of a site's floor; it lies beside the states unless a place is given."""
    return FloorLedger(floor, ledger or states.absolute().parent / LEDGER)


@contextmanager
def _told() -> Iterator[None]:
    """Keep what the site has spent in other runs in its own log: the coordinator learns a word."""
    try:
        yield
    except OrderDeclined as error:
        log.warning("%s: %s", OPTION, error)
        raise OrderDeclined(
            "one more training would pass the epsilon that this client requires over all its runs"
        ) from None
