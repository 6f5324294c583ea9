"""What a client proves of its keys in secure sums, and what it asks of those of others.

A coordinator that deviates could stand between two clients, or invent some. So clients sign their
keys, and whose uploads came, with the keys of their TLS certificates (:mod:`fedpb.signatures`), as
in the variant of Bonawitz et al. (CCS 2017) against active adversaries, Section 6.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import masks_of
from fedmodels.errors import ConfigError, PayloadError
from fedpb.identities import CLIENT, role_of
from fedpb.peer_certificates import PeerCertificates, check_counted, check_keys
from fedpb.pem import authorities_of, identities_of, read_pem
from fedpb.revocation import RevocationList
from fedpb.signatures import PrivateKey, channel_statement, counted_statement, keys_statement, sign
from fedpb.v1 import coordinator_pb2 as rpc

OTHER_TERMS = (
    "its keys are signed for another cohort, payload, state or settings than this client was told "
    "of, or were exchanged on the way"
)


class SecurePeers:
    """Signs for the clients of a process, and checks the others of a secure sum."""

    def __init__(
        self, key: PrivateKey, shown: Sequence[bytes], peers: PeerCertificates, least: int = 0
    ) -> None:
        """Sign with the key of a certificate.

        Args:
            key: which.
            shown: the certificate in DER, and those between it and its authority.
            peers: checks the certificates of others.
            least: certificates that take part in a sum at least, this one among them. Whoever has
                one for several clients can take all their uploads off a sum, so they count once.
        """
        self._key, self._shown, self._peers, self.least = key, shown, peers, least
        self.run_id = ""
        """The run that the clients have joined."""

    @classmethod
    def of(
        cls, ca: Path | None, cert: Path | None, key: Path | None, crl: Path | None, least: int
    ) -> SecurePeers | None:
        """Return what signs with a client's certificate; None where it has none.

        Raises:
            ConfigError: the certificate names no client, or its key is of another kind.
        """
        if ca is None or cert is None or key is None:
            return None
        chain = x509.load_pem_x509_certificates(read_pem(cert, "--tls-cert"))
        found = load_pem_private_key(read_pem(key, "--tls-key"), None)
        if not isinstance(found, PrivateKey):
            raise ConfigError(
                f"--tls-key {key} is none of the kinds EC, Ed25519 and RSA, and secure sums take "
                "signatures of these alone"
            )
        signers = partial(authorities_of, ca, "--tls-ca")
        revoked = None
        if crl is not None:
            revoked = RevocationList(crl, signers, "--tls-crl", must_exist=True)
        peers = PeerCertificates(signers, "--tls-ca", revoked)
        return cls(found, [one.public_bytes(Encoding.DER) for one in chain], peers, least)

    def why_unfit(self) -> str:
        """Return why others will not take this process's certificate; empty if they will."""
        uris = {*identities_of(x509.load_der_x509_certificate(self._shown[0]))}
        uri = uris.pop() if len(uris) == 1 else "nobody"
        if role_of(uri) == CLIENT:
            return ""
        return f"--tls-cert is that of {uri}, and secure sums are of certificates of clients"

    # --- what this client proves ------------------------------------------------------------------

    def prove_channel(self, client: int, said: rpc.SecureAnswer) -> None:
        """Sign the channel key of an answer, and show the certificate."""
        said.signature = sign(self._key, channel_statement(self.run_id, client, said.channel_key))
        said.certificates.extend(self._shown)

    def prove_keys(
        self, terms: bytes, client: int, channel_key: bytes, said: rpc.SecureAnswer
    ) -> None:
        """Sign both keys for an attempt of these terms."""
        told = keys_statement(self.run_id, terms, client, channel_key, said.mask_key)
        said.signature = sign(self._key, told)

    def prove_counted(self, terms: bytes, client: int, counted: Sequence[int]) -> bytes:
        """Return a signature of whose uploads a sum is over."""
        return sign(self._key, counted_statement(self.run_id, terms, client, counted))

    # --- what others prove ------------------------------------------------------------------------

    def signers(self, peers: Collection[rpc.SecurePeer]) -> dict[int, bytes]:
        """Return the key of each peer's certificate, once all of them have signed for this run.

        Raises:
            PayloadError: names the first that has not, or there are too few certificates.
        """
        found = dict[int, bytes]()
        for peer in peers:
            with _named(peer.client):
                found[peer.client] = self._peers.signer_of(self.run_id, peer.client, peer)
        self.check_enough(found, found)
        return found

    def check_enough(self, signers: Mapping[int, bytes], clients: Collection[int]) -> None:
        """Check that clients have as many certificates as this client wants in a sum.

        Raises:
            PayloadError: they have fewer.
        """
        owners = len({signers[client] for client in clients})
        if owners < self.least:
            raise PayloadError(
                f"a secure sum is of {owners} certificates, and this client's --min-cohort is "
                f"{self.least}"
            )

    def check_keys(
        self, terms: bytes, peers: Collection[rpc.SecurePeer], signers: Mapping[int, bytes]
    ) -> None:
        """Check that peers signed their keys for an attempt of these terms.

        Raises:
            PayloadError: names the first that did not.
        """
        for peer in peers:
            with _named(peer.client, OTHER_TERMS):
                check_keys(
                    signers[peer.client], self.run_id, terms, peer.client, peer.channel_key, peer
                )

    def check_agreed(
        self, terms: bytes, asked: rpc.SecureSum, signers: Mapping[int, bytes]
    ) -> None:
        """Check that as many clients as the threshold agreed on whose uploads came.

        Raises:
            PayloadError: they are fewer, or one did not.
        """
        agreed = {p.client: p.agreed for p in asked.peers if p.agreed and p.client in asked.counted}
        if len(agreed) < asked.threshold:
            raise PayloadError(
                f"{len(agreed)} clients agreed on whose uploads came, and it takes "
                f"{asked.threshold}"
            )
        for client, signature in agreed.items():
            with _named(client, "it has not agreed on whose uploads came"):
                check_counted(signers[client], self.run_id, terms, client, asked.counted, signature)


def check_run(
    experiment: Experiment, peers: SecurePeers | None, least: int, *, changing: bool = False
) -> None:
    """Check that a run's secure sums are such as a client wants.

    Args:
        experiment: the run's.
        peers: what signs for the client; None where it has no certificate.
        least: certificates in a sum at least; 0 for any.
        changing: whether the clients of a sum may change from round to round.

    Raises:
        ConfigError: says what is missing.
    """
    rules = masks_of(experiment.privacy)
    if rules is None or not rules.signs:
        if least:
            how = "trusts its coordinator, which could invent the others" if rules else (
                "has no [privacy] secure_sum, so that its coordinator sees each upload"
            )  # fmt: skip
            raise ConfigError(f"--min-cohort {least}: this run {how}")
        return
    if peers is None:
        raise ConfigError(
            "clients of this run know one another by certificates ([privacy.secure_sum] trust): "
            "join with --tls-ca, --tls-cert and --tls-key"
        )
    most = experiment.cohort_size // rules.groups
    if least > most:
        raise ConfigError(f"--min-cohort {least}: a secure sum of this run is of {most} clients")
    if least and not (changing or experiment.fixes_groups):
        raise ConfigError(
            f"--min-cohort {least}: the sums of this run are over other clients from round to "
            "round, and many of them tell what one client sends; it takes fixed groups "
            "([privacy.secure_sum] fixed), or here --changing-cohorts, or --require-privacy with "
            "level=client"
        )
    if why := peers.why_unfit():
        raise ConfigError(why)


@contextmanager
def _named(client: int, why: str = "") -> Iterator[None]:
    """Say of which client an error is, and what it means."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"client {client}: {why or error}") from None
