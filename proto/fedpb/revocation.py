"""Lists of revoked certificates, as their authority signed them: X.509 CRLs in a PEM file."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cryptography import x509

from fedmodels.errors import ConfigError, reason_of

REVOKED = "crl.pem"
"""How the list is called beside its authority."""
_BLOCK = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
log = logging.getLogger(__name__)


def read_lists(path: Path, pem: bytes, what: str) -> Iterator[x509.CertificateRevocationList]:
    """Yield the lists of a file, one or more.

    Raises:
        ConfigError: it holds none, or what cannot be read as one; ``what`` names it.
    """
    blocks = _BLOCK.findall(pem)
    if not blocks:
        raise ConfigError(f"{what} holds no PEM list of revoked certificates (fedsrv certs revoke)")
    for block in blocks:
        try:
            yield x509.load_pem_x509_crl(block)
        except ValueError:
            raise ConfigError(f"{what} cannot be read as a list of revoked certificates") from None


class RevocationList:
    """The revoked certificates of some authorities; follows the changes of its file.

    A file that is damaged or gone revokes nothing anew, and what was revoked before stays so.
    """

    def __init__(
        self,
        path: Path,
        authorities: Callable[[], Sequence[x509.Certificate]],
        option: str,
        *,
        must_exist: bool,
    ) -> None:
        """Read the list.

        Args:
            path: its file.
            authorities: returns the authorities that may have signed it.
            option: the option that names the file.
            must_exist: whether the user named the file; else it may come later.

        Raises:
            ConfigError: the file is damaged or signed by somebody else, or must exist and does not.
        """
        self.path, self._authorities, self._option = path, authorities, option
        self._revoked: dict[int, str] = {}
        self._seen: tuple[int, ...] | None = None
        if must_exist or path.exists():
            self._seen = self._state()
            self._revoked = self._read()

    def _state(self) -> tuple[int, ...] | None:
        """Return what tells versions of the file apart; None where there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[int, str]:
        what = f"{self._option} {self.path}"
        try:
            pem = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{what} cannot be read: {reason_of(error)}") from None
        revoked: dict[int, str] = {}
        keys = [one.public_key() for one in self._authorities()]
        for found in read_lists(self.path, pem, what):
            if not any(found.is_signature_valid(key) for key in keys):  # type: ignore[arg-type]
                raise ConfigError(f"{what} is signed by none of the authorities that are trusted")
            revoked |= {
                entry.serial_number: f"{entry.revocation_date_utc:%Y-%m-%d}" for entry in found
            }
        return revoked

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            if state is None:
                raise ConfigError(f"{self._option} {self.path} is gone")
            self._revoked = self._read()
        except ConfigError as error:
            log.warning("%s; what was revoked before stays revoked", error)
            return
        log.info("%s names %d revoked certificates", self.path, len(self._revoked))

    def why_refused(self, serial: int) -> str:
        """Return when a certificate was revoked, in words; empty if it was not."""
        self.refresh()
        day = self._revoked.get(serial)
        return f"was revoked on {day} (serial {serial:x})" if day else ""
