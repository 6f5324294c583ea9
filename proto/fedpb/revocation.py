"""Lists of revoked certificates, as their authority signed them: X.509 CRLs in a PEM file."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from fedmodels.errors import ConfigError, reason_of

REVOKED = "crl.pem"
"""How the list is called beside its authority."""
SOON = timedelta(days=7)
"""Warnings begin this long before the next list is due."""
Marks = dict[str, tuple[int, float]]
"""By the fingerprint of an authority: the number of its list, and when that was made."""
_BLOCK = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
log = logging.getLogger(__name__)


def read_lists(path: Path, pem: bytes, what: str) -> Iterator[x509.CertificateRevocationList]:
    """Yield the lists of a file, one or more; ConfigError, with ``what``, if it holds none."""
    blocks = _BLOCK.findall(pem)
    if not blocks:
        raise ConfigError(f"{what} holds no PEM list of revoked certificates (fedsrv certs revoke)")
    for block in blocks:
        try:
            yield x509.load_pem_x509_crl(block)
        except ValueError:
            raise ConfigError(f"{what} cannot be read as a list of revoked certificates") from None


def number_of(found: x509.CertificateRevocationList) -> int:
    """Return the number of a list of revoked certificates; 0 where it has none."""
    try:
        return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return 0


@dataclass(frozen=True)
class _List:
    """What one authority has revoked."""

    mark: tuple[int, float] = (0, 0.0)
    """Number of the list, and when it was made: a later list has a greater mark."""
    until: datetime | None = None
    """When the next one is due."""
    revoked: Mapping[int, str] = field(default_factory=dict)
    """The day of each revocation, by serial number."""

    @classmethod
    def of(cls, found: x509.CertificateRevocationList) -> _List:
        """Return what a list says."""
        days = {one.serial_number: f"{one.revocation_date_utc:%Y-%m-%d}" for one in found}
        made = found.last_update_utc.timestamp()
        return cls((number_of(found), made), found.next_update_utc, days)


class RevocationList:
    """The revoked certificates of some authorities; follows the changes of its file.

    A file that is damaged, gone, or older than the one before revokes nothing anew, and what was
    revoked before stays so. How new the newest list was stands in a file beside it, and where else
    its owner keeps it (:meth:`kept_by`), so that an older one, or none, is noticed after a restart
    as well. A list whose successor is overdue still counts,
    with a warning: it lacks what was revoked since, and to refuse everybody would help whoever
    keeps the successor away.
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
            ConfigError: the file is damaged, older than one that was read here before, or signed
                by somebody else, or it must exist and does not.
        """
        self.path, self._authorities, self._option = path, authorities, option
        self._newest = path.with_name(f".{path.name}.newest")
        self._lists: dict[str, _List] = {}
        """By the fingerprint of the authority."""
        self._read_kept: Callable[[], Mapping[str, Any]] = dict
        self._keep: Callable[[Marks], None] = lambda marks: None
        self._reading = threading.Lock()
        """Held from reading the file to noting how new it is, so that no older mark is noted."""
        self._seen: tuple[int, ...] | None = None
        if must_exist or path.exists():
            self._seen = self._state()
            self._read()
        else:
            self._check_never_here()

    def kept_by(self, read: Callable[[], Mapping[str, Any]], keep: Callable[[Marks], None]) -> None:
        """Let how new the newest lists were be kept in another place as well.

        Whoever can change the directory of the list could remove the note beside it.

        Args:
            read: returns what was kept last; empty before that.
            keep: keeps it.

        Raises:
            ConfigError: the list is older than one that was here before, or is gone.
        """
        self._read_kept, self._keep = read, keep
        if self._lists:
            self._read()
        else:
            self._check_never_here()

    def _check_never_here(self) -> None:
        if self._known():
            raise ConfigError(
                f"{self._what} is gone, and was here before: bring the newest list of the "
                "authority (fedsrv certs crl)"
            )

    def _state(self) -> tuple[int, ...] | None:
        """Return what tells versions of the file apart; None where there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    @property
    def _what(self) -> str:
        return f"{self._option} {self.path}"

    def _read(self) -> None:
        """Take the lists of the file; ConfigError if one is damaged, foreign or too old."""
        try:
            pem = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{self._what} cannot be read: {reason_of(error)}") from None
        found: dict[str, _List] = {}
        keys = {_name_of(one): one.public_key() for one in self._authorities()}
        for read in read_lists(self.path, pem, self._what):
            signers = (name for name, key in keys.items() if read.is_signature_valid(key))  # type: ignore[arg-type]
            signer = next(signers, None)
            if signer is None:
                raise ConfigError(
                    f"{self._what} is signed by none of the authorities that are trusted"
                )
            found[signer] = max(_List.of(read), found.get(signer, _List()), key=lambda it: it.mark)
        known = self._known()
        for signer, one in found.items():
            newest = max(known.get(signer, (0, 0.0)), self._lists.get(signer, _List()).mark)
            if one.mark < newest:
                raise ConfigError(
                    f"{self._what} is an older list (number {one.mark[0]}) than one that was here "
                    f"before (number {newest[0]}): bring the newest one of the authority"
                )
        self._lists |= found
        self._remember(known | {signer: one.mark for signer, one in found.items()})

    def _known(self) -> Marks:
        """Return how new the newest list of each authority was here; nothing if that is unknown."""
        beside, kept = self._noted(), _marks_of(self._read_kept())
        return {
            name: max(marks[name] for marks in (beside, kept) if name in marks)
            for name in {*beside, *kept}
        }

    def _noted(self) -> Marks:
        try:
            return _marks_of(json.loads(self._newest.read_text("utf-8")))
        except (OSError, ValueError):
            return {}

    def _remember(self, marks: Marks) -> None:
        """Store how new the newest lists are, where the directory can be written."""
        if marks != _marks_of(self._read_kept()):
            self._keep(marks)
        if marks != self._noted():
            fresh = self._newest.with_suffix(".tmp")
            with contextlib.suppress(OSError):
                fresh.write_text(json.dumps(marks), "utf-8")
                fresh.replace(self._newest)

    def refresh(self) -> None:
        """Read the file again if it has changed; threads that call may do so at the same time."""
        if self._state() != self._seen:
            with self._reading:
                self._read_again()

    def _read_again(self) -> None:
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            if state is None:
                raise ConfigError(f"{self._what} is gone")
            self._read()
        except ConfigError as error:
            log.warning("%s; what was revoked before stays revoked", error)
            return
        count = sum(len(one.revoked) for one in self._lists.values())
        log.info("%s names %d revoked certificates", self.path, count)

    def why_refused(self, serial: int) -> str:
        """Return when a certificate was revoked, in words; empty if it was not."""
        self.refresh()
        day = next(
            (one.revoked[serial] for one in self._lists.values() if serial in one.revoked), ""
        )
        return f"was revoked on {day} (serial {serial:x})" if day else ""

    def warning(self) -> str:
        """Return a line where the next list is due soon or overdue; nothing where it is not."""
        dues = [one.until for one in self._lists.values() if one.until is not None]
        if not dues or (due := min(dues)) - datetime.now(UTC) > SOON:
            return ""
        since = "was" if due < datetime.now(UTC) else "is"
        return (
            f"the successor of {self._what} {since} due on {due:%Y-%m-%d}: this list may lack what "
            "was revoked since; bring the newest one of the authority (fedsrv certs crl)"
        )


def _marks_of(found: Any) -> Marks:
    """Return marks that were kept as JSON; nothing where they cannot be read."""
    try:
        return {str(name): (int(mark[0]), float(mark[1])) for name, mark in found.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}


def _name_of(authority: x509.Certificate) -> str:
    return authority.fingerprint(hashes.SHA256()).hex()
