"""Who may call over mutual TLS: each certificate, compared with the call and what was revoked."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
from cryptography import x509

from fedmodels.facts.client_ids import ClientId
from fedmodels.host.guarded import Guarded
from fedpb.identities import RELAY, covers, role_of
from fedpb.peer_certificates import PeerCertificates
from fedpb.pem import authorities_of, end_of, ends_of, identities_of
from fedpb.revocation import REVOKED, RevocationList
from fedsrv.identity.guard import Guard, NotYours, Peer
from fedsrv.identity.roles import why_not


@functools.lru_cache(maxsize=4096)
def _read(pem: bytes) -> Peer:
    certificate = x509.load_pem_x509_certificate(pem)
    uris = {*identities_of(certificate)}
    uri = uris.pop() if len(uris) == 1 else None
    return Peer(uri, certificate.serial_number, certificate.not_valid_after_utc)


def peer_of(context: grpc.ServicerContext) -> Peer | None:
    """Return the peer of a call; None where it showed no certificate."""
    found = context.auth_context().get("x509_pem_cert", ())
    return _read(found[0]) if found else None


def peers_of(client_ca: Path, crl: Path | None) -> tuple[PeerCertificates, RevocationList]:
    """Return what checks certificates that clients show one another, and those revoked.

    Raises:
        ConfigError: the list of revoked certificates is named by ``crl``, and cannot be used.
    """
    signers = partial(authorities_of, client_ca, "--tls-client-ca")
    place = crl or client_ca.parent / REVOKED
    revoked = RevocationList(place, signers, "--tls-crl", must_exist=crl is not None)
    return PeerCertificates(signers, "--tls-client-ca", revoked), revoked


class CertificateGuard(Guard):
    """Checks the certificate of every call."""

    _open: Guarded[dict[grpc.ServicerContext, Peer]] = Guarded("_lock")
    """Calls under way."""
    _known: Guarded[dict[str, Peer]] = Guarded("_lock")
    """The newest certificate of each identity that has called."""
    _fresh: Guarded[list[str]] = Guarded("_lock")
    """Identities whose newest certificate :meth:`warnings` has not looked at yet."""
    _due: Guarded[datetime] = Guarded("_lock")

    requires_identity = True
    EVERY = timedelta(days=1)
    """How often it warns of the same certificate."""

    def __init__(
        self, revoked: RevocationList | None = None, files: Sequence[tuple[Path, str]] = ()
    ) -> None:
        """Know nobody yet.

        ``files`` are the certificates of this server and its authorities, with their options.
        """
        self._revoked, self._files = revoked, files
        self._lock = threading.RLock()
        self._open, self._known, self._fresh, self._due = {}, {}, [], datetime.now(UTC)

    def peer(self, context: grpc.ServicerContext) -> Peer | None:
        """Return who calls; None where nobody shows a certificate."""
        return peer_of(context)

    @contextlib.contextmanager
    def admitted(self, call: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Check that the caller may make a call, whose name is given; watch it until it ends.

        Raises:
            NotYours: its certificate was revoked, or is of another role.
        """
        peer = self.peer(context)
        if why := self._why_not(peer, call.rpartition("/")[2]):
            raise NotYours(why)
        if peer is None:
            yield
            return
        with self._lock:
            self._open[context] = peer
            if peer.uri and self._known.get(peer.uri) != peer:
                self._known[peer.uri] = peer
                self._fresh.append(peer.uri)
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(context, None)

    def _why_not(self, peer: Peer | None, call: str) -> str:
        if peer and (why := self.why_ended(peer)):
            return f"the certificate of {peer.uri or 'nobody'} {why}: ask for another one"
        return why_not(peer.uri if peer else None, call)

    def why_ended(self, peer: Peer) -> str:
        """Return when a certificate was revoked or expired, in words; empty if it holds."""
        if datetime.now(UTC) > peer.until:
            return f"expired on {peer.until:%Y-%m-%d}"
        return self._revoked.why_refused(peer.serial) if self._revoked else ""

    def check_covers(self, client: ClientId, context: grpc.ServicerContext) -> None:
        """Check that the caller may speak for a client; NotYours if its certificate has others."""
        peer = self.peer(context)
        uri = peer.uri if peer else None
        if uri is None or not covers(uri, client):
            raise NotYours(f"the certificate of {uri or 'nobody'} does not cover {client}")

    def check_joins_itself(self, context: grpc.ServicerContext) -> None:
        """Check that a caller who joins as a client itself does not pass on the calls of others.

        Raises:
            NotYours: by its certificate it does.
        """
        peer = self.peer(context)
        if peer and peer.uri and role_of(peer.uri) == RELAY:
            raise NotYours(f"{peer.uri} passes clients on, and is none itself")

    def look(self) -> None:
        """End the calls whose certificates have expired or been revoked since they began."""
        with self._lock:
            calls = [*self._open.items()]
        ended = [context for context, peer in calls if self.why_ended(peer)]
        for context in ended:
            context.cancel()

    def warnings(self) -> list[str]:
        """Return a line for each certificate that ends soon, each of them once a day."""
        with self._lock:
            is_due = datetime.now(UTC) >= self._due
            whom, self._fresh = [*self._known] if is_due else self._fresh, []
            if is_due:
                self._due = datetime.now(UTC) + self.EVERY
            ends = [(uri, self._known[uri].until) for uri in dict.fromkeys(whom)]
        found = [end_of(f"the certificate of {uri}", until) for uri, until in ends]
        if is_due:
            found += [line for path, option in self._files for line in ends_of(path, option)]
            found += [self._revoked.warning()] if self._revoked else []
        return [*filter(None, found)]
