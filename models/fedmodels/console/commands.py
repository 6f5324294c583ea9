"""How a command ends: a user's mistake is one line on standard error, never a traceback."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from fedmodels import times
from fedmodels.console.help_panels import COMMANDS, MANY, OPTIONS, in_order, panel_of
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, FedtideError, RunStopped
from fedmodels.host.files import require_utf8, why_file_is_no_good
from fedmodels.host.shortages import NO_MEMORY, lacks_memory, too_few_files
from fedmodels.own.code_names import refuse_exits
from fedmodels.plugins import gone, owner_of

MAX_LETTERS = 10_000
"""Of the line that a command ends with."""


_used: list[str] = []
"""The variables that gave options to the command."""
PREFIXES = ("FEDSRV", "FEDCLI")
"""How the environment variables begin that stand for options, ``FEDSRV_LAUNCH_OUT`` for one."""


def run_command(
    app: Callable[..., object], arguments: Sequence[str] | None = None, prefix: str = ""
) -> None:
    """Run a command line's app; where it fails, say why in one line and end the process.

    Args:
        app: a Typer app.
        arguments: those of the process unless given; with these no variable counts.
        prefix: of the environment variables that may give its options, one of ``PREFIXES``.
    """
    _used.clear()
    given = {"auto_envvar_prefix": prefix} if prefix and arguments is None else {}
    if not _has_directory():  # relative paths have no meaning, and torch ends the process
        _end("error: the current directory is gone: change to one that is there", 2)
    _print_what_it_can()
    if line := too_few_files():
        _end(f"error: {line}", 2)
    try:
        times.check()
        for word in [*(sys.argv[1:] if arguments is None else arguments), *_values(prefix)]:
            require_utf8(word)
        if os.environ.get(f"_{prefix}_COMPLETE") == "complete_bash":
            from fedmodels.console.completion import for_bash

            app = for_bash(app)
        with refuse_exits():
            app(arguments, **given)
    except RunStopped as stopped:
        _end(str(stopped), stopped.exit_code)
    except FedtideError as error:
        _end(f"error: {error}{_from_variables(error)}", error.exit_code, error.lines)
    except OSError as error:
        if not (why := why_file_is_no_good(error)):
            raise
        _end(f"error: {why}", 2)
    except (MemoryError, RuntimeError, ImportError) as error:
        if not lacks_memory(error):
            raise
        _end(f"error: {NO_MEMORY}", 1)
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as ended:
        if ended.code == 130:  # so Typer ends at Ctrl-C, without a word
            _interrupted()
        raise
    finally:
        if arguments is None:  # the process ends: to look for cycles in all of torch takes 0.7 s
            gc.freeze()


def _values(prefix: str) -> list[str]:
    """Return the values of the variables that stand for options of one program."""
    return [v for name, v in os.environ.items() if prefix and name.startswith(f"{prefix}_")]


def _from_variables(error: FedtideError) -> str:
    """Return, behind an error of options, which variables gave some; nothing where none did."""
    is_of_options = isinstance(error, ConfigError) and _used
    return f" (options came from the environment: {', '.join(_used)})" if is_of_options else ""


def forget_options() -> None:
    """Take the variables that stand for options away from processes that this one starts."""
    for name in [*os.environ]:
        if name.startswith(tuple(f"{prefix}_" for prefix in PREFIXES)):
            del os.environ[name]


class Commands:
    """For a group of Typer: short help, and options that may come from environment variables."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of their headings."""
        return in_order(super().list_commands(ctx), COMMANDS)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options before a command."""
        return _plain(super().get_params(ctx))  # type: ignore[misc]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is meant; ConfigError for one of a plugin that is not here."""
        if args[0] not in self.list_commands(ctx) and (owner := owner_of("commands", args[0])):
            raise ConfigError(gone(args[0], owner))
        return super().resolve_command(ctx, args)  # type: ignore[misc]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None where there is none of that name."""
        found = super().get_command(ctx, cmd_name)  # type: ignore[misc]
        if found is not None and ctx.parent is None:
            _set_panels(found, cmd_name, ctx)
        for option in _plain(found.get_params(ctx)) if found is not None else ():
            if ctx.auto_envvar_prefix and option.param_type_name == "option":
                words = (ctx.auto_envvar_prefix, cmd_name, max(option.opts, key=len).strip("-"))
                option.envvar = "_".join(words).replace("-", "_").upper()
                option.consume_value = partial(_noted, option, option.consume_value)
        return found


def _set_panels(command: Any, name: str, ctx: Any) -> None:
    """Have help list a command, and its options where these are many, under their headings."""
    command.rich_help_panel = panel_of(name, COMMANDS) or command.rich_help_panel
    options = [one for one in command.get_params(ctx) if one.param_type_name == "option"]
    for option in options if len(options) > MANY else ():
        listed = panel_of(max(option.opts, key=len), OPTIONS)
        option.rich_help_panel = listed or option.rich_help_panel


def _noted(option: Any, consume: Callable[..., tuple[Any, Any]], *given: Any) -> tuple[Any, Any]:
    """Return an option's value and its source; remember the variable that it comes from, if any."""
    value, source = consume(*given)
    if getattr(source, "name", "") == "ENVIRONMENT":
        _used.append(option.envvar)
        name = f"'{option.envvar}' (the variable that stands for {max(option.opts, key=len)})"
        option.get_error_hint = lambda *_: name
    return value, source


def _plain(options: list[Any]) -> list[Any]:
    """Have help show a flag as ``--quiet``, kinds of values in words, and no variables."""
    for option in options:
        if hasattr(option, "display_type"):  # an older Typer names kinds in words by itself
            option.display_type = partial(_kind_of_value, option.display_type)
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
        if hasattr(option, "_get_number_range_help_str"):  # such as [x>=0]
            option._get_number_range_help_str = lambda: ""
        option.show_envvar = False
    return options


WORDS = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH"}
"""What help calls a kind of value that Typer names by its type in Python."""


def _kind_of_value(typed: Callable[[Any], str], ctx: Any) -> str:
    """Return what help says of an option's values, such as ``PATH`` for ``<list[Path]>``."""
    name = typed(ctx).strip("<>").removeprefix("list[").removesuffix("]").removesuffix(" range")
    return WORDS.get(name, name.upper() if name.isalpha() else name)


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _print_what_it_can() -> None:
    """Let standard output show ``?`` for a letter that its encoding lacks, such as µ in ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # an embedding program may have its own
        sys.stdout.reconfigure(errors="replace")


def _interrupted() -> NoReturn:
    """Say that Ctrl-C ended the command; another one does not disturb its last steps."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end("stopped", 130)


def _end(line: str, exit_code: int, below: Sequence[str] = ()) -> NoReturn:
    if sys.stderr is not None:  # it may have been closed before the command began
        for each in (line, *below):
            sys.stderr.write(f"{printable(each, MAX_LETTERS)}\n")  # it may quote a peer or a file
    _drop_unwritten_output()
    sys.exit(exit_code)


def _drop_unwritten_output() -> None:
    """Write standard output, or nowhere if that fails: the interpreter's end would fail again."""
    if sys.stdout is None:  # it was closed before the command began
        return
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
