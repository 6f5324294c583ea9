"""Which files a client stored in a directory: their sha256, in a file beside them.

A checksum inside a file is computed again by whoever writes another file in its place. So the
digest of each file is noted before the file gets its name, and is compared when it is read. The
note has a line for each file, as ``sha256sum`` writes it; a line that a power loss cut counts for
nothing. A file is what it was noted as last, or the time before: a crash may come between the note
and the new name. A directory without a note is one of an earlier version, and is taken as it is;
the first file that is noted has the others noted as well.

Whoever replaces the whole directory, the note included, is not noticed here.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from fedmodels.errors import ArchiveError, ArchiveReplaced
from fedmodels.host.files import linked, replacing, sha256_of, stamp_of, sync_path

NOTE = "stored.sha256"
MAX_BYTES = 64 << 10
"""Size from which a note is written anew, with the files that are still there."""
_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")


def note(path: Path, digest: str, *, sync: bool = False) -> None:
    """Note what a file is about to hold; call it before the file gets its name.

    A directory is used by one process at a time.

    Args:
        path: the file.
        digest: sha256 of its content.
        sync: make the line safe on the disk, or fail.

    Raises:
        OSError: it cannot be written.
    """
    place = path.with_name(NOTE)
    size = place.stat().st_size if place.exists() else -1
    if size < 0 or size > MAX_BYTES:
        _write_anew(place, adopts=size < 0)
    line = f"{digest}  {path.name}\n".encode()
    handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "r+b", buffering=0) as file:
        if (end := file.seek(0, os.SEEK_END)) and os.pread(handle, 1, end - 1) != b"\n":
            line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(None, "the disk took part of a line", str(place))
    if sync:
        sync_path(place)
    elif path.exists():  # a power loss may keep the new file and lose the line
        with suppress(OSError):  # whoever makes the file safe says what is wrong
            sync_path(place)


def note_as(path: Path, source: Path) -> None:
    """Note, safely on the disk, that a file is about to hold what another one was noted as.

    Raises:
        OSError: it cannot be written.
    """
    if digests := noted(source):
        held = sha256_of(source) if digests[1:] else digests[0]  # a crash came in between
        note(path, held if held in digests else digests[0], sync=True)


def give_name(source: Path, path: Path) -> None:
    """Let a path hold what another file holds, safely on the disk: by a link, or else by a copy.

    Raises:
        OSError: it cannot be written.
    """
    note_as(path, source)
    if not linked(source, path):
        with replacing(path, sync=True, private=True) as fresh:
            shutil.copyfile(source, fresh)


def noted(path: Path) -> list[str]:
    """Return what a file may hold: its digest by the last line, and by the line before."""
    found = dict.fromkeys(reversed(_lines(path.with_name(NOTE)).get(path.name, [])))
    return [*found][:2]


def has_note(folder: Path) -> bool:
    """Tell whether what is stored in a directory is noted."""
    return bool(_lines(folder / NOTE))


def check(path: Path) -> None:
    """Check that a file holds what was noted, where something was.

    Raises:
        ArchiveReplaced: it holds something else.
        ArchiveError: the note cannot be read.
        OSError: the file cannot be read.
    """
    if not has_note(path.parent):
        return
    while True:
        stamp = stamp_of(path)
        digest, wanted = sha256_of(path), noted(path)
        if not wanted or digest in wanted:
            return
        if stamp == stamp_of(path):  # else it was replaced meanwhile
            raise ArchiveReplaced(
                f"{path} is not what was stored there: it has sha256 {digest[:16]}…, and "
                f"{path.with_name(NOTE)} says {wanted[0][:16]}…; put back the file, or a copy of "
                "the whole directory"
            )


def _lines(place: Path) -> dict[str, list[str]]:
    """Return the digests of each file by its name, the last one last."""
    try:
        text = place.read_text("ascii", errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ArchiveError(f"{place} cannot be read: {error.strerror}") from None
    found = dict[str, list[str]]()
    for line in text.split("\n"):
        if whole := _LINE.fullmatch(line):
            found.setdefault(whole[2], []).append(whole[1])
    return found


def _write_anew(place: Path, *, adopts: bool) -> None:
    """Write the note of the files that are there, with the two newest digests of each.

    With ``adopts``, files that were never noted are noted as they are.
    """
    known = _lines(place)
    lines = list[str]()
    for path in sorted(place.parent.glob("*.safetensors")):
        digests = known.get(path.name, [])[-2:]
        if adopts and not digests:
            digests = [sha256_of(path)]
        lines += [f"{digest}  {path.name}\n" for digest in digests]
    with replacing(place, sync=bool(known), private=True) as fresh:
        fresh.write_text("".join(lines), "ascii")
