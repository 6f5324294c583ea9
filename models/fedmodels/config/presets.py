"""The configs that come with fedtide: their names and their files."""

from __future__ import annotations

import os
from pathlib import Path

from fedmodels.errors import ConfigError, suggestion


def preset_directory() -> Path:
    """Return where the presets lie: in the installed package, or in the checkout."""
    above = Path(__file__).parents[2]
    packaged = above / "fedtide" / "presets"
    return packaged if packaged.is_dir() else above.parent / "examples"


def presets() -> list[str]:
    """Return the names of the configs that come with fedtide."""
    return sorted(path.stem for path in preset_directory().glob("*.toml"))


def preset_file(name: str) -> Path:
    """Return the file of a preset; ConfigError if there is none of that name."""
    known = presets()
    if name not in known:
        raise ConfigError(
            f"{name[:50]!r} is no preset.{suggestion(name, known)} fedsrv init lists them"
        )
    return preset_directory() / f"{name}.toml"


def suggest_config(path: Path) -> str:
    """Return what may be meant by a config that is not there, as the end of a line; or nothing.

    It may be a file whose ``.toml`` was left out, or a preset that was not copied yet.
    """
    file = path if path.suffix == ".toml" else path.with_name(f"{path.name}.toml")
    if os.path.isfile(file):  # false for a name too long for the disk, where Path.is_file raises
        return f"; {file} is there"
    known = presets()
    if file.stem in known:
        return f"; fedsrv init {file.stem} writes the preset of that name to {file.name}"
    near = suggestion(file.stem, known)
    return f".{near} fedsrv init copies a preset" if near else ""
