"""What each config that comes with fedtide is, and a copy of it to begin with."""

from __future__ import annotations

from pathlib import Path

from fedmodels.config.presets import preset_file
from fedmodels.errors import ConfigError
from fedmodels.files import write_new

SCHEMA_LINE = "#:schema fedtide.schema.json\n"
"""For editors, in the presets' own directory: the first line of each."""


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


def copy_preset(name: str, out: Path) -> None:
    """Copy a preset with its comments to a new file, without the schema that is not beside it.

    Raises:
        ConfigError: there is no such preset, or the file exists or cannot be written.
    """
    text = preset_file(name).read_text("utf-8").removeprefix(SCHEMA_LINE)
    try:
        write_new(out, text.encode())
    except FileExistsError:
        raise ConfigError(f"{out} exists; give another name with --out") from None
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
