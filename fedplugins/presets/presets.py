"""What each config that comes with fedtide is, and a copy of it to begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedmodels.config.presets import FOLDERS, preset_file, preset_files
from fedmodels.errors import ConfigError
from fedmodels.host.files import write_new

SCHEMA_LINE = "#:schema ../fedtide.schema.json\n"
"""For editors, beside the presets' folders: the first line of each."""


def listed() -> Iterator[str]:
    """Yield the lines of the list of presets: each folder, then its presets."""
    for folder, content in FOLDERS.items():
        yield f"{folder}: {content}"
        for name, path in preset_files().items():
            if path.parent.name == folder:
                yield f"  {name:28} {about(name)}"


def command_of(name: str) -> str:
    """Return the command of fedsrv that runs a preset."""
    path = preset_files().get(name)
    return "sweep" if path and path.parent.name == "sweeps" else "launch"


def about(name: str) -> str:
    """Return what a preset says of itself: the first sentence of its comment."""
    words = list[str]()
    for line in preset_file(name).read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#:"):  # for editors
            continue
        words += line.lstrip("# ").split()
    sentence, dot, _ = " ".join(words).partition(". ")
    return sentence + dot.rstrip()


def text_of(name: str) -> str:
    """Return a preset's text; for a method, its small preset or three-tasks with this method.

    Raises:
        ConfigError: there is neither a preset nor a method of this name.
    """
    from fedmodels.methods import names

    known = preset_files()
    if name in known or name not in names():
        return preset_file(name).read_text("utf-8").removeprefix(SCHEMA_LINE)
    if f"{name}-small" in known:
        return text_of(f"{name}-small")
    return text_of("three-tasks").replace('"fedavg"', f'"{name}"')


def copy_preset(name: str, out: Path) -> None:
    """Write the text of a preset or of a method with its comments to a new file.

    Raises:
        ConfigError: there is no such preset, or the file exists or cannot be written.
    """
    try:
        write_new(out, text_of(name).encode())
    except FileExistsError:
        raise ConfigError(f"{out} exists; give another name with --out") from None
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
