"""Where a method's code failed: which of its functions raised an error, and at which line."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

from fedmodels.errors import FedtideError, RunFailed
from fedmodels.training.method import Method

log = logging.getLogger(__name__)
AROUND = ("fit",)
"""Functions that call others of the method, which say more."""


def fault_in(method: Method | type[Method], error: Exception) -> str | None:
    """Return an error on one line that names the function; None where no function raised it.

    ``method fedmine: finish failed (my.py:34): KeyError: 'boom'``.
    """
    hooks, own = _functions(method if isinstance(method, type) else type(method))
    hook, line = "", None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        found = hooks.get(code, "")
        if found and (not hook or hook in AROUND):
            hook = found
        if hook and (line is None or code.co_filename == own):
            line = f"{Path(code.co_filename).name}:{number}"
    if not hook:
        return None
    return f"method {method.name}: {hook} failed ({line}): {line_of(error)}"


def line_of(error: Exception) -> str:
    """Return an error on one line, with its type."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextmanager
def name_faults(method: Method, kind: type[FedtideError] = RunFailed) -> Iterator[None]:
    """Make one line of what a method raises outside of a client's order; the log has more.

    It is an error of this kind; ``PayloadError`` refuses an upload alone.

    Raises:
        FedtideError: of that kind; names the function and the line of the method's file.
    """
    try:
        yield
    except (FedtideError, MemoryError):
        raise
    except Exception as error:
        if (line := fault_in(method, error)) is None:
            raise
        log.exception("method %s failed", method.name)
        raise kind(line) from error


def _functions(cls: type[Method]) -> tuple[dict[CodeType, str], str]:
    """Return the code of every function of a method with its name, and the method's own file."""
    found: dict[CodeType, str] = {}
    own = ""
    for owner in cls.__mro__:
        for name, value in vars(owner).items():
            function = value.fget if isinstance(value, property) else value
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if isinstance(code, CodeType) and issubclass(owner, Method):
                if not name.startswith("__"):
                    found[code] = name
                own = own or ("" if name.startswith("__") else code.co_filename)
    return found, own
