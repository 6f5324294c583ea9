"""Archives ``*.zip`` of a site's files, unpacked within bounds, for as long as they are read."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from zipfile import BadZipFile, ZipFile, ZipInfo

from fedcli.data.folders import OF_TEXT, UNPACKED, ending, entries, is_foreign, shown, shown_in
from fedmodels.console.printable import bytes_text
from fedmodels.errors import DataError, reason_of
from fedmodels.host.files import open_regular

MAX_FILES = 100_000
"""Files of an archive."""
MUCH, TIMES = 1 << 30, 100
"""Bytes that any archive may unpack to, with all that lie in it; more only up to so many times its
own size."""
PIECE = 1 << 20
MAX_DEPTH = 4
"""Archives that lie within one another."""
IN_UTF8 = 0x800
"""Flag of a file whose name says its encoding."""


def is_archive(path: Path) -> bool:
    """Tell whether a file is an archive of files, and not one packed table."""
    return path.suffix.lower() == ".zip" and ending(path) not in OF_TEXT and path.is_file()


def check_growth(archive: ZipFile, path: Path) -> int:
    """Return the bytes that an archive may unpack to.

    Raises:
        DataError: it says itself that it has more, or has too many files.
    """
    most = max(MUCH, TIMES * path.stat().st_size)
    said = sum(info.file_size for info in archive.infolist())
    if len(archive.infolist()) > MAX_FILES:
        raise _too_many(path)
    if said > most:
        raise DataError(
            f"{path} unpacks to {bytes_text(said)}, more than {TIMES} times its size: if it is "
            "none that is made to fill a disk, unpack it, and give the folder"
        )
    return most


def _too_many(path: Path) -> DataError:
    return DataError(f"{path} holds more than {MAX_FILES} files: unpack it, and give the folder")


def _name_of(info: ZipInfo) -> str:
    """Return the name of a file; some systems write UTF-8, and no flag that says so."""
    if not info.flag_bits & IN_UTF8:
        with suppress(UnicodeError):
            return info.filename.encode("cp437").decode("utf-8")
    return info.filename


class Archives:
    """Where archives are unpacked for the time that they are read."""

    def __init__(self, place: Path) -> None:
        """Begin in an empty directory."""
        self._place = place
        self._known: dict[Path, Path] = {}
        """By where its files lie for now: an archive."""
        self._left: dict[Path, tuple[int, int]] = {}
        """Bytes and files that an archive may still unpack to, with those that lie in it."""

    def unpacked(self, archive: Path) -> Path:
        """Unpack an archive; return the directory, or the one directory that it holds.

        Raises:
            DataError: it is damaged, encrypted, too large, too deep in others, or leads elsewhere.
        """
        outer = self._outermost(archive)
        place = self._place / str(len(self._known)) / archive.stem
        self._known[place.parent] = UNPACKED[place.parent] = archive
        try:
            place.mkdir(parents=True)
            with open_regular(archive) as file, ZipFile(file) as content:
                most = check_growth(content, archive)
                left, files = self._left.get(outer, (most, MAX_FILES))
                if (files := files - len(content.infolist())) < 0:
                    raise _too_many(outer)
                for info in content.infolist():
                    left -= self._unpack(content, info, archive, place, min(left, most))
                self._left[outer] = left, files
        except (OSError, BadZipFile, RuntimeError, NotImplementedError, ValueError) as error:
            raise DataError(f"{archive} cannot be unpacked: {reason_of(error)}") from None
        within = entries(place, place)
        only = within[0] if len(within) == 1 and within[0].is_dir() else None
        if only is not None and all(path.is_dir() for path in entries(only, place)):
            return only
        return place

    def _outermost(self, archive: Path) -> Path:
        """Return the archive that one lies in, itself if none; DataError if it lies too deep."""
        outer, depth = archive, 0
        while (held := self.holding(outer)) != outer:
            outer, depth = held, depth + 1
        if depth >= MAX_DEPTH:
            raise DataError(f"{outer} holds archives within archives, more than {MAX_DEPTH} deep")
        return outer

    def _unpack(
        self, content: ZipFile, info: ZipInfo, archive: Path, place: Path, left: int
    ) -> int:
        """Write one file of an archive below a place; return its size."""
        name = PurePosixPath(_name_of(info).replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or PureWindowsPath(name).drive:
            raise DataError(f"{archive} holds a file {str(name)!a} that leads out of it")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{archive} holds a link, {str(name)!a}, which is not followed")
        if info.is_dir() or not name.parts or any(map(is_foreign, name.parts)):
            return 0
        if info.flag_bits & 1:
            raise DataError(f"{archive} is encrypted: unpack it, and give the folder")
        target, size = place.joinpath(*name.parts), 0
        target.parent.mkdir(parents=True, exist_ok=True)
        with content.open(info) as packed, target.open("xb") as file:
            while piece := packed.read(PIECE):
                size += len(piece)
                if size > left or size > shutil.disk_usage(place).free:
                    raise DataError(
                        f"{self._outermost(archive)} unpacks to more than there is room for, or "
                        f"than {TIMES} times its size: unpack it, and give the folder"
                    )
                file.write(piece)
        return size

    def holding(self, path: Path) -> Path:
        """Return the archive that holds a file; the file itself if none does."""
        return next((a for place, a in self._known.items() if path.is_relative_to(place)), path)

    def shown(self, path: Path) -> Path:
        """Return what lines call a file of an archive."""
        return shown(path)

    def forget(self) -> None:
        """Let lines call no more files by these archives."""
        for place in self._known:
            UNPACKED.pop(place, None)

    def renamed(self, error: DataError) -> DataError:
        """Return an error that names the archives, and no place where they lie for now."""
        line = shown_in(str(error))
        if line == str(error):
            return error
        made = DataError(line)
        for note in getattr(error, "__notes__", ()):
            made.add_note(note)
        return made


@contextmanager
def archives() -> Iterator[Archives]:
    """Yield where archives are unpacked, for as long as they are read."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="fedtide-")
    except OSError as error:
        raise DataError(f"there is no room to unpack files: {reason_of(error)}") from None
    with folder as place:
        held = Archives(Path(place))
        try:
            yield held
        except DataError as error:
            if (named := held.renamed(error)) is error:
                raise
            raise named from None
        finally:
            held.forget()
