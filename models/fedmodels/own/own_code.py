"""Methods, nets and data sets of users, named by file: ``my_method.py:MyMethod``.

A config that names a file runs its code. The owner of a config does so knowingly; a client, to whom
a server sends the config, runs only files that its own user named, and only if the content is the
one that the server runs.

A file is read once: the bytes whose digest was checked are the ones that run. Bytecode that lies
beside a file is neither read nor written. What a file imports is not part of its digest: that is
what is installed on the machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint
from pathlib import Path
from types import CodeType
from typing import Any

from fedmodels.errors import ConfigError, DataError, suggestion
from fedmodels.host.files import read_regular
from fedmodels.own.code_names import OWN_MODULE, is_own


def with_place(name: str) -> str:
    """Return the name with the place of its file, where there is such a file."""
    file, _, inside = name.rpartition(":")
    place = Path(file).expanduser().resolve()
    return f"{place}:{inside}" if place.is_file() else name


def own_name(name: str, table: str, sha256: str | None, trusted: Sequence[Path] | None) -> str:
    """Return the name with the file's place on this machine.

    Args:
        name: ``file.py:Name``.
        table: the config's table that says so, for error lines.
        sha256: what the file must hold, if that is known.
        trusted: the only files whose code may run; by default any file.

    Raises:
        ConfigError: the file is missing, holds something else, or is not trusted.
    """
    file, _, inside = name.rpartition(":")
    if trusted is None:
        place = Path(file).expanduser().resolve()
        source = _source_of(place)
        if sha256 not in (None, hashlib.sha256(source).hexdigest()):
            raise ConfigError(
                f"[{table}] {place} has changed since this run started (sha256 {sha256}); put "
                "the old file back, or start a new run"
            )
        return _taken(f"{place}:{inside}", source)
    for candidate in trusted:
        place = candidate.expanduser().resolve()
        source = _source_of(place)
        if hashlib.sha256(source).hexdigest() == sha256:
            return _taken(f"{place}:{inside}", source)
    given = ", ".join(map(str, trusted))
    what = f"--code {given} has other content: " if given else ""
    raise ConfigError(
        f"[{table}] {what}this run needs the code of {Path(file).name} (sha256 {sha256}); if you "
        "trust it, join with --code FILE, where FILE is your copy"
    )


def digest_of(name: str) -> str:
    """Return the sha256 of what a name's file held when it was checked, which is what runs.

    Raises:
        ConfigError: the file was not checked so far, and cannot be read.
    """
    return hashlib.sha256(_checked(name)).hexdigest()


def _checked(name: str) -> bytes:
    """Return what a name's file held when it was checked, or holds now."""
    file = name.rpartition(":")[0]
    return _CHECKED[file] if file in _CHECKED else _source_of(Path(file))


def _source_of(file: Path) -> bytes:
    """Return what a file holds now; ConfigError if it cannot be read."""
    try:
        return read_regular(file)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None


def load_entry_point(point: EntryPoint) -> Any:
    """Return what an entry point of another package stands for; ConfigError if the import fails."""
    try:
        return point.load()
    except Exception as error:  # whatever the package's code raises
        raise ConfigError(
            f"the entry point {point.name!r} of {point.group}, {point.value}, cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


_CHECKED: dict[str, bytes] = {}
"""File -> what it held when it was checked last."""
_FOUND: dict[str, tuple[str, Any]] = {}
"""Name -> the digest of its file when it was run, and what it stood for."""


def renew(name: str) -> None:
    """Forget what a name stands for if its file was edited since; call it where a run begins.

    In the midst of a run nobody does, so that all of it comes of one content.
    """
    if is_own(name):
        _taken(name, _source_of(Path(name.rpartition(":")[0])))


def _taken(name: str, source: bytes) -> str:
    """Let a name stand for what these bytes define; return the name."""
    _CHECKED[name.rpartition(":")[0]] = source
    if name in _FOUND and _FOUND[name][0] != hashlib.sha256(source).hexdigest():
        del _FOUND[name]
    return name


def own(name: str) -> Any:
    """Return what a name stands for; its file is run once, and again after :func:`renew`.

    Raises:
        ConfigError: the file fails, or holds no such thing.
    """
    if name not in _FOUND:
        source = _checked(name)
        digest = hashlib.sha256(source).hexdigest()
        _FOUND[name] = digest, _run_file(name, source, digest)
    return _FOUND[name][1]


def check_offered(name: str) -> None:
    """Check that a file offers what a name stands for: it defines that, or lists it in ``__all__``.

    A client's user trusts a file, and not every function that the file happens to import.

    Raises:
        ConfigError: the file only imports it, fails, or holds no such thing.
    """
    found, (file, _, inside) = own(name), name.rpartition(":")
    module = sys.modules[f"{OWN_MODULE}{_FOUND[name][0][:16]}"]
    if getattr(found, "__module__", None) != module.__name__ and inside not in getattr(
        module, "__all__", ()
    ):
        raise ConfigError(
            f"{file} only imports {inside!r}; a run may use what the file itself defines, or lists "
            "in __all__"
        )


class _Source(SourceFileLoader):
    """Runs bytes that were read before, whatever the file and ``__pycache__`` hold by now."""

    def __init__(self, module: str, file: str, source: bytes) -> None:
        super().__init__(module, file)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile the bytes."""
        return self.source_to_code(self._source, self.path)

    def get_data(self, path: str) -> bytes:
        """Return the bytes, for whoever shows a line of them."""
        return self._source


def _run_file(name: str, source: bytes, digest: str) -> Any:
    file, _, inside = name.rpartition(":")
    module = f"{OWN_MODULE}{digest[:16]}"
    if module not in sys.modules:
        loader = _Source(module, file, source)
        spec = importlib.util.spec_from_file_location(module, file, loader=loader)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module])
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            del sys.modules[module]
            raise ConfigError(f"{file} cannot be run{_why(error, file)}") from error
    found = vars(sys.modules[module])
    if inside not in found:
        public = [key for key in found if not key.startswith("_")]
        raise ConfigError(f"{file} defines no {inside!r}.{suggestion(inside, public)}")
    return found[inside]


def _why(error: BaseException, file: str) -> str:
    """Return what a file raised and at which of its lines, and what helps where that is known."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [number for frame, number in frames if frame.f_code.co_filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    first = str(error).partition("\n")[0]
    hint = ""
    if isinstance(error, SystemExit):
        hint = "; what a script does goes under: if __name__ == '__main__'"
    elif isinstance(error, ModuleNotFoundError) and _is_beside(error.name or "", file):
        hint = "; a file cannot import its neighbours: install what they contain"
    return f"{where}: {type(error).__name__}: {first}{hint}"


@contextmanager
def told(what: str) -> Iterator[None]:
    """Run a block of the user's code; turn what it raises into one line that says what failed."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise DataError(f"{what} failed: {type(error).__name__}: {reason}") from error


def _is_beside(module: str, file: str) -> bool:
    top = Path(file).parent / module.partition(".")[0]
    return bool(module) and (top.is_dir() or top.with_suffix(".py").exists())
