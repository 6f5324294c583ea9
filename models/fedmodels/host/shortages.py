"""What a process may lack: room on a disk, memory, open files, and how large a file may become.

Room, memory and open files may be there again later. A limit of the process itself stays.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system that may be over later."""
_LACKS = {
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine can open no more files",
    errno.ENOMEM: "no memory is left for this process",
    errno.EFBIG: "files of this process may get no larger: raise the limit (ulimit -f)",
}
_OF_MEMORY = re.compile(
    "can't allocate memory|cannot allocate memory|failed to map segment|out of memory", re.I
)
"""How torch, and what loads libraries, say that no memory is left."""
_NUMBERED = re.compile(r"\(os error (\d+)\)")
"""How safetensors gives the system's number of an error."""
NO_MEMORY = "no memory is left for this process: give it more (ulimit -v, the container's limit)"
FEWEST_FILES = 64
"""A coordinator and its clients open about half as many."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_passing(error: BaseException) -> bool:
    """Tell whether room on a disk or open files are missing, at the bottom of an error."""
    for one in _causes(error):
        numbered = _NUMBERED.search(str(one))
        number = one.errno if isinstance(one, OSError) else int(numbered[1]) if numbered else 0
        if number in PASSING:
            return True
    return False


def lacks_memory(error: BaseException) -> bool:
    """Tell whether an error says that no memory is left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError) and bool(_OF_MEMORY.search(str(error)))
    )


def lack_of(error: OSError) -> str:
    """Return what this process may not do, or lacks; an empty text for any other error."""
    return _LACKS.get(error.errno or 0, "")


def why_cut_off() -> str:
    """Return why a file was written in part, where the system did not say it."""
    full = "the disk is full, or fails"
    if resource is None or resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY:
        return full
    return f"files of this process may get no larger (ulimit -f), or {full}"


def most_files() -> int:
    """Return how many files this process may open; where nothing bounds them, a large number."""
    if resource is None:
        return sys.maxsize
    soft: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def too_few_files() -> str:
    """Return a line if this process may open too few files; the limit is raised where it can be."""
    if resource is None:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEWEST_FILES:
        return ""
    if hard == resource.RLIM_INFINITY or hard >= FEWEST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEWEST_FILES, hard))
        return ""
    return f"this process may open {soft} files, but needs {FEWEST_FILES} (ulimit -n)"
