"""Where a server of gRPC listens, and what it asks of those who call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fedmodels.config.places import check_address
from fedmodels.errors import ConfigError
from fedpb.channels import is_loopback
from fedsrv.identity.guard import Guard

if TYPE_CHECKING:
    from fedpb.peer_certificates import PeerCertificates
    from fedpb.revocation import RevocationList
    from fedsrv.identity.tls import Credentials


@dataclass(frozen=True)
class Listen:
    """Where and how the coordinator listens."""

    address: str = "127.0.0.1:0"
    credentials: Credentials | None = None
    requires_identity: bool = False
    """Whether clients show certificates that name them."""
    insecure: bool = False
    """Allow a reachable address without TLS."""
    guard: Callable[[], Guard] = Guard
    """Makes what checks who calls."""
    peers: PeerCertificates | None = None
    """Checks what clients show one another; None where they show nothing."""
    revoked: RevocationList | None = None
    """The certificates that are revoked; None where nobody shows one."""

    def at(self, port: int) -> str:
        """Return the address by which clients reach a server, once its port is known."""
        if self.address.startswith("unix"):  # a path, without a port
            return self.address
        return f"{self.address.rpartition(':')[0]}:{port}"

    @classmethod
    def given(
        cls,
        address: str,
        cert: Path | None,
        key: Path | None,
        client_ca: Path | None,
        insecure: bool,
        crl: Path | None = None,
    ) -> Self:
        """Return where and how to listen, by a command's options; or raise ConfigError."""
        if (cert is None) != (key is None):
            raise ConfigError("--tls-cert and --tls-key belong together; one of them is missing")
        if client_ca is not None and cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        if crl is not None and client_ca is None:
            raise ConfigError(
                "--tls-crl needs --tls-client-ca: who is revoked shows no certificate"
            )
        if cert is None or key is None:
            return cls(address, insecure=insecure)
        from fedsrv.identity.tls import server_credentials

        credentials = server_credentials(cert, key, client_ca)
        if client_ca is None:
            return cls(address, credentials, insecure=insecure)
        from fedsrv.identity.certificate_guard import CertificateGuard, peers_of

        peers, revoked = peers_of(client_ca, crl)
        files = ((cert, "--tls-cert"), (client_ca, "--tls-client-ca"))
        guard = partial(CertificateGuard, revoked, files)
        return cls(address, credentials, True, insecure, guard, peers, revoked)

    def caveats(self) -> list[str]:
        """Return what a user may not mean: TLS that says who the server is, and nobody else."""
        if self.credentials is None or self.requires_identity:
            return []
        return [
            f"--tls-cert without --tls-client-ca: whoever reaches {self.address} may join as any "
            "client, and watch; give --tls-client-ca (fedsrv certs makes certificates for clients)"
        ]

    def check(self) -> None:
        """Check the address, and that other machines reach it over TLS alone unless ``insecure``.

        Raises:
            ConfigError: says how to go on.
        """
        check_address(self.address, "--listen", lowest_port=0)
        if self.credentials is None and not is_loopback(self.address) and not self.insecure:
            raise ConfigError(
                f"--listen {self.address} can be reached from other machines without TLS; give "
                "--tls-cert and --tls-key (fedsrv certs makes them), or --insecure"
            )
