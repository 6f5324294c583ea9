"""Names of users' own methods, nets and data sets, ``my_method.py:MyMethod``, and their exits.

:mod:`fedmodels.own.own_code` runs what they name.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fedmodels.errors import RunFailed, RunStopped

OWN_MODULE = "fedtide_own_"
"""How the names of modules of custom files begin."""


def is_own(name: str) -> bool:
    """Tell whether a name is that of a file and of something in it."""
    return ".py:" in name


def of_a_file(name: str) -> str:
    """Return a hint, after a blank, where a name is a file's without what it holds; or nothing."""
    return f" A custom one is named by its file: '{name}:Name'" if name.endswith(".py") else ""


def short_name(name: str) -> str:
    """Return a name without the place of its file: ``my_data.py:load``; others as they are."""
    return name.rpartition("/")[2] if is_own(name) else name


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Make a RunFailed of it when custom code ends the process, with the file and the line."""
    try:
        yield
    except SystemExit as error:
        place = ""
        for frame, number in traceback.walk_tb(error.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith(OWN_MODULE):
                place = f"{frame.f_code.co_filename} (line {number})"
        if not place or error.code == RunStopped.exit_code:  # SIGTERM came in the midst of it
            raise
        line = f"{place} ends the process; in a run, code returns or raises an error"
        raise RunFailed(line) from error
