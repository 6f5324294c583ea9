"""What a site itself wants of privacy: ``fedcli join --require-privacy``, with a ledger of its own.

The floor is checked against the run's config before the first order, and against the site's ledger
before each training. The ledger is a file of the site and not of a run: it counts what all runs
together released, by the content of examples. So the site need not trust the coordinator to count.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedcli.gate.privacy_floor import OPTION, PrivacyFloor
from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import LEDGER, masks_of
from fedmodels.errors import OrderDeclined
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases, noise_seen
from fedmodels.privacy.exposures import Keys
from fedmodels.privacy.ledger import Charge, PrivacyLedger
from fedmodels.tensors.bundle import Bundle, ClientId, state_digest
from fedmodels.training.method import Method
from fedmodels.training.private_uploads import noise_share
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc

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


def charge_of_client(
    method: Method,
    run: RunFacts,
    order: rpc.Order,
    parts: tuple[Bundle, Bundle],
    contents: Keys,
    secret: Secret,
) -> Charge:
    """Return what a training is charged for whose noise hides the whole client.

    The client takes part for certain, as it cannot check with what chance it was drawn. The noise
    is that of the smallest sum that anybody sees; of a single upload, the client's own.

    Args:
        method: says whether uploads are summed.
        run: the run.
        order: what the client is to do.
        parts: the payload, and the client's private state.
        contents: of the examples that it trains on (n,).
        secret: tells this training from that of another run.
    """
    experiment = run.experiment
    privacy = experiment.privacy
    assert privacy is not None, "the floor was checked"
    noise = noise_seen(experiment, privacy.noise)
    if privacy.noise_at_clients and masks_of(privacy) is None:
        noise = privacy.noise * noise_share(method, run)
    known = state_digest([("payload", parts[0]), ("state", parts[1])])
    made = hashlib.blake2b(f"client/{order.interaction}/{known}".encode(), key=secret.key)
    made.update(contents.tobytes())
    what = f"client {order.client_id}, round {order.round + 1}, task {order.task}"
    return Charge(made.hexdigest()[:32], (GaussianReleases(noise),), what=what)
