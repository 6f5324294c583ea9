"""What a site wants of secure sums, said before it knows whether a run has any.

Every site with a certificate brings it. What signs and checks (:mod:`fedcli.parts.secure_peers`) is
made once a run has secure sums, or the site wants to be in no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import masks_of
from fedmodels.tensors.bundle import ClientId

if TYPE_CHECKING:
    from fedcli.parts.secure_peers import SecurePeers


@dataclass(frozen=True)
class SumTerms:
    """What a site wants of secure sums."""

    signing: Callable[[], SecurePeers | None] = lambda: None
    """Makes what signs for the clients of the process; None without a certificate."""
    least: int = 0
    """Certificates in a sum at least; 0 for any."""
    notes: Path | None = None
    """Where the site notes the fixed group of each client, for all its runs; None leaves the note
    in the client's state directory."""
    changing: bool = False
    """Whether the clients of its sums may change: the site says so, or requires clients' noise."""

    @cached_property
    def peers(self) -> SecurePeers | None:
        """What signs for the clients of the process.

        Raises:
            ConfigError: it cannot sign for them.
        """
        return self.signing()

    def joined(self, experiment: Experiment, run_id: str, clients: Sequence[ClientId]) -> None:
        """Check that a run's sums are such as the site wants; raise ConfigError if not."""
        if masks_of(experiment.privacy) is None and not self.least:
            return
        from fedcli.parts.secure_peers import check_run  # few runs need it

        if any(isinstance(client, int) for client in clients):
            check_run(experiment, self.peers, self.least, changing=self.changing)
        if self.peers is not None:
            self.peers.run_id = run_id


def signing(
    ca: Path | None, cert: Path | None, key: Path | None, crl: Path | None, least: int
) -> Callable[[], SecurePeers | None]:
    """Return what makes :meth:`SecurePeers.of` these files, when it is needed."""

    def made() -> SecurePeers | None:
        from fedcli.parts.secure_peers import SecurePeers  # few runs need it

        return SecurePeers.of(ca, cert, key, crl, least)

    return made
