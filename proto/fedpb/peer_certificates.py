"""The certificates by which the clients of a secure sum know one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedmodels.errors import PayloadError
from fedpb.identities import CLIENT, covers, role_of
from fedpb.pem import identities_of
from fedpb.revocation import RevocationList
from fedpb.signatures import (
    MAX_SIGNATURE,
    channel_statement,
    check_signature,
    counted_statement,
    keys_statement,
)
from fedpb.v1 import coordinator_pb2 as rpc

MAX_SHOWN, MAX_CERTIFICATE = 4, 8 << 10
"""Certificates that a client shows at most, its own one first; bytes of each."""


class PeerCertificates:
    """Checks what clients show and sign, for one another and for the coordinator."""

    def __init__(
        self,
        authorities: Callable[[], Sequence[x509.Certificate]],
        option: str,
        revoked: RevocationList | None = None,
    ) -> None:
        """Trust some authorities, which ``option`` names, but no certificate that is revoked."""
        self._authorities, self._option, self._revoked = authorities, option, revoked

    def key_of(self, client: int, shown: Sequence[bytes]) -> bytes:
        """Return the public key of a client's certificate, a SubjectPublicKeyInfo in DER.

        Args:
            client: who must be named by it, as a client itself.
            shown: the certificate in DER, and those between it and its authority.

        Raises:
            PayloadError: it is none, another's, of another authority, not valid now, or revoked.
        """
        if not shown:
            raise PayloadError("it shows no certificate")
        if len(shown) > MAX_SHOWN or max(map(len, shown)) > MAX_CERTIFICATE:
            raise PayloadError("it shows more certificates, or larger ones, than can be expected")
        try:
            own, *between = (x509.load_der_x509_certificate(one) for one in shown)
            uris = {*identities_of(own)}
            store = Store([*self._authorities()])
            PolicyBuilder().store(store).build_client_verifier().verify(own, between)
            public = own.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        except VerificationError as error:
            raise PayloadError(
                f"its certificate is of no authority of {self._option}: {error}"
            ) from None
        except ValueError:
            raise PayloadError("its certificate cannot be read") from None
        uri = uris.pop() if len(uris) == 1 else "nobody"
        if role_of(uri) != CLIENT or not covers(uri, client):
            raise PayloadError(f"its certificate is that of {uri}")
        if self._revoked and (why := self._revoked.why_refused(own.serial_number)):
            raise PayloadError(f"its certificate {why}")
        return public

    def signer_of(self, run_id: str, client: int, said: rpc.SecureAnswer | rpc.SecurePeer) -> bytes:
        """Return the public key of a client that has signed its channel key for this run.

        Raises:
            PayloadError: as :meth:`key_of`; or the signature is another's.
        """
        public = self.key_of(client, said.certificates)
        check_signed(public, channel_statement(run_id, client, said.channel_key), said.signature)
        return public


def check_keys(
    public: bytes, run_id: str, terms: bytes, client: int, channel_key: bytes,
    said: rpc.SecureAnswer | rpc.SecurePeer,
) -> None:  # fmt: skip
    """Check that a client signed its mask key for an attempt of these terms; or PayloadError."""
    told = keys_statement(run_id, terms, client, channel_key, said.mask_key)
    check_signed(public, told, said.signature)


def check_counted(
    public: bytes, run_id: str, terms: bytes, client: int, counted: Sequence[int], signature: bytes
) -> None:
    """Check that a client signed over whose uploads a sum is; PayloadError if it did not."""
    check_signed(public, counted_statement(run_id, terms, client, counted), signature)


def check_signed(public: bytes, said: bytes, signature: bytes) -> None:
    """Check a signature and its size; PayloadError if it is no good."""
    if len(signature) > MAX_SIGNATURE:
        raise PayloadError(f"its signature has {len(signature)} bytes")
    check_signature(public, said, signature)
