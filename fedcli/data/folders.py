"""What of a directory is data: no hidden file, none of another program, none outside of it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from fedmodels.console.printable import printable
from fedmodels.errors import DataError, reason_of
from fedmodels.host.files import check_inside

FOREIGN = {
    "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "#recycle", "lost+found",
    "$recycle.bin", "system volume information", "__pycache__",
}  # fmt: skip
"""What systems and other programs leave beside one's files, in small letters."""
OF_TEXT = tuple(f".{kind}{packed}" for kind in ("csv", "tsv") for packed in ("", ".gz", ".zip"))
"""How the names of tables of text end, packed or not."""
BOOKS = {
    **dict.fromkeys((".xlsx", ".xlsm"), ("workbooks", "xlsx")),
    **dict.fromkeys((".h5", ".hdf5"), ("hdf5", "hdf5")),
    ".sql": ("queries", "sql"),
}
"""By the end of their names: files of several tables, what reads them, and the extra for that."""
TABLE_ENDS = (*OF_TEXT, ".parquet", *BOOKS)
"""How the names of tables end."""
SHOWN = 3
"""Files that a note names."""
KINDS, MAX_LETTERS = 5, 100
"""Ends of names that a note counts, and its letters for that."""
UNPACKED: dict[Path, Path] = {}
"""By where the files of an archive lie while they are read: the archive, which lines name."""
log = logging.getLogger(__name__)


def ending(path: Path) -> str:
    """Return how a file's name ends, in small letters: ``.csv``, or ``.csv.gz`` where packed."""
    last = path.suffix.lower()
    whole = "".join(path.suffixes[-2:]).lower()
    return whole if last in (".gz", ".zip") and whole in OF_TEXT else last


def shown(path: Path) -> Path:
    """Return what lines call a file or folder: one of an archive has its place there."""
    for place, archive in [*UNPACKED.items()]:
        if path.is_relative_to(place):
            return shown(archive).joinpath(*path.relative_to(place).parts[1:])
    return path


def shown_in(line: str) -> str:
    """Return a line that names archives, and no place where their files lie for now."""
    for place, archive in reversed([*UNPACKED.items()]):  # an archive may lie in one before
        line = line.replace(str(place / archive.stem), str(archive))
    return line


def is_foreign(name: str) -> bool:
    """Tell whether a file or directory of this name is hidden, or another program's own."""
    return name.startswith((".", "~$")) or name.casefold() in FOREIGN


def entries(place: Path, root: Path) -> list[Path]:
    """Return the files and directories in a place by name, without hidden and foreign ones.

    Raises:
        DataError: one is a link that leads out of ``root``, or the place cannot be read.
    """
    return [path for path in _all_of(place, root) if not is_foreign(path.name)]


def files_below(root: Path) -> list[Path]:
    """Return every file below a directory by its path, with the errors of :func:`entries`."""
    return sorted(path for path in _walk(root, root) if not is_foreign(path.name))


def note_left_out(
    root: Path, read: Collection[Path], convertible: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Say in a line which files below a directory were not read, if any.

    ``convertible`` says by the end of a name what such files are, and what to do with them.
    """
    found = sorted(set(_walk(root, root)) - set(read))
    if found:
        names = [printable(str(path.relative_to(root)), 60) for path in found[:SHOWN]]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        left = "1 file is" if len(found) == 1 else f"{len(found)} files are"
        kinds = Counter(path.suffix.lower() for path in found if not is_foreign(path.name))
        if more and kinds:
            counts = (f"{count} *{end}" for end, count in kinds.most_common(KINDS) if end)
            more += f" ({printable(', '.join(counts), MAX_LETTERS)})"
        known = dict.fromkeys(convertible[end] for end in kinds if end in convertible)
        log.warning("note: %s: %s left out: %s%s%s", shown(root), left, ", ".join(names), more,
                    "".join(f"; {advice}" for advice in known))  # fmt: skip


def _all_of(place: Path, root: Path) -> list[Path]:
    """Return what is in a place, by name."""
    try:
        with os.scandir(place) as found:
            all_of = sorted((entry.name, entry.is_symlink()) for entry in found)
    except OSError as error:
        raise DataError(f"{place} cannot be read: {reason_of(error)}") from None
    for name, is_link in all_of:
        if is_link and not is_foreign(name):
            check_inside(place / name, root)
    return [place / name for name, _ in all_of]


def _walk(place: Path, root: Path) -> Iterator[Path]:
    """Yield every file below a place, and hidden and foreign directories as they are.

    A directory that is a link is not entered: what it leads to is there by itself.
    """
    for path in _all_of(place, root):
        if path.is_dir() and not is_foreign(path.name):
            yield from () if path.is_symlink() else _walk(path, root)
        else:
            yield path
