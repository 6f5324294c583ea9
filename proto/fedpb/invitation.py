"""Invitations: one word that says whose certificate to ask for, by which secret, of whom."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedmodels.errors import ConfigError

ENROLMENT_SERVICE = "fedpb.v1.EnrolmentService"
"""Name of the gRPC service, as the schema has it."""
SECRET_BYTES = 32
_BEGIN = "fedtide-invitation-"


@dataclass(frozen=True)
class Invitation:
    """What a token holds."""

    uri: str
    """The identity, as a certificate has it."""
    secret: bytes
    authority: x509.Certificate
    """Who signs: no other server than one of this authority gets the secret."""

    def token(self) -> str:
        """Return the word."""
        der = self.authority.public_bytes(Encoding.DER)
        facts = {"identity": self.uri, "secret": self.secret.hex()}
        facts["authority"] = base64.b64encode(der).decode()
        return _BEGIN + base64.urlsafe_b64encode(json.dumps(facts).encode()).decode().rstrip("=")

    @classmethod
    def read(cls, token: str) -> Self:
        """Return the invitation that a word holds; ConfigError if it is none, or only a part."""
        text = token.strip()
        try:
            if not text.startswith(_BEGIN):
                raise ValueError
            coded = text.removeprefix(_BEGIN)
            facts = json.loads(base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)))
            der = base64.b64decode(facts["authority"], validate=True)
            secret, uri = bytes.fromhex(facts["secret"]), str(facts["identity"])
            found = cls(uri, secret, x509.load_der_x509_certificate(der))
        except (ValueError, KeyError, TypeError, binascii.Error, RecursionError):
            found = None
        if found is None or len(found.secret) != SECRET_BYTES:
            raise ConfigError(
                "the token is no invitation, or not all of one: give the word that fedsrv certs "
                "invite printed"
            )
        return found
