"""What bash offers behind a ``=``: bash ends a word there, and Typer does not put it together."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import redirect_stdout


def for_bash(app: Callable[..., object]) -> Callable[..., object]:
    """Return an app that completes ``KEY=VALUE`` as one word, and offers what follows the sign."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    at = int(os.environ.get("COMP_CWORD", "0"))
    whole = list[str]()
    for word, before in zip(words[: at + 1], ["", *words], strict=False):
        if whole and word and "=" in (word, before):
            whole[-1] += word
        else:
            whole.append(word)
    if len(whole) == min(at + 1, len(words)):  # nothing was taken apart
        return app
    os.environ |= {"COMP_WORDS": "\n".join(whole), "COMP_CWORD": str(len(whole) - 1)}
    return lambda *given, **more: _without(whole[-1], app, *given, **more)


def _without(word: str, app: Callable[..., object], *given: object, **more: object) -> None:
    """Run an app, and print each of its lines without what stands before the last ``=``."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            app(*given, **more)
    finally:
        for line in said.getvalue().splitlines():
            print(line.rpartition("=")[2] if "=" in word else line)
