"""Write the options of every command into ``docs/commands.md``; what stands above them stays.

python docs/site/commands.py > build/commands.md && mv build/commands.md docs/commands.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import fedcli.cli
import fedsrv.cli

PAGE = Path(__file__).parents[1] / "commands.md"
TITLE = "## Every command and option"
ABOUT = """Generated from the commands themselves (`make docs` updates it). Every option is also an
environment variable: `FEDSRV_LAUNCH_OUT` is `--out` of `fedsrv launch`.
"""


def page() -> str:
    """Return the whole page."""
    above = PAGE.read_text("utf-8").partition(TITLE)[0]
    parts = [f"{above}{TITLE}\n", ABOUT]
    for program, app in (("fedsrv", fedsrv.cli.app), ("fedcli", fedcli.cli.app)):
        parts += [_section(words, c) for words, c in _below(program, typer.main.get_command(app))]
    return "\n".join(parts)


def _below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, with its words."""
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name in command.list_commands(None):
        yield from _below(f"{words} {name}", command.commands[name])


def _section(words: str, command: Any) -> str:
    """Return what there is to say of a command."""
    about = " ".join((command.help or "").split("\n\n")[0].split())
    rows = [_row(p) for p in command.params if not getattr(p, "hidden", False)]
    table = ["| option | what it does |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### `{words}`\n", f"{_plain(about)}\n", *table])


def _row(param: Any) -> str:
    """Return the row of an option or of an argument."""
    told = _cell(_plain(param.help or ""))
    if param.param_type_name != "option":
        return f"| `{_cell(param.metavar or param.name.upper())}` | {told} |"
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    value = "" if param.is_flag else f" `{_cell(param.metavar or 'VALUE')}`"
    return f"| {names}{value} | {told}{_default(param)} |"


def _default(param: Any) -> str:
    """Say what an option is unless given."""
    if param.required:
        return " *Required.*"
    value = param.default
    if param.is_flag or value is None or callable(value) or value in ("", [], ()):
        return ""
    return f" Default: `{_cell(str(value))}`."


def _plain(text: str) -> str:
    """Return a help text without the marks of its markup."""
    return re.sub(r"\\\[", "[", text)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(page(), end="")
