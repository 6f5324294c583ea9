"""The configs that come with fedtide: their names and their files."""

from __future__ import annotations

import os
from pathlib import Path

from fedmodels.errors import ConfigError, suggestion

FOLDERS = {
    "start": "seconds, to begin with",
    "methods": "a method each, seconds to minutes",
    "scenarios": "data that differ or change between clients and tasks",
    "streams": "data that keep coming",
    "privacy": "sums and noise that hide single clients",
    "serving": "models that answer while they train",
    "sweeps": "methods compared, for fedsrv sweep",
    "papers": "the papers' own experiments: hours on a GPU",
}
"""The folders of ``examples/`` that hold configs, in the order of the list, and what is in each."""


def preset_directory() -> Path:
    """Return where the presets lie: in the installed package, or in the checkout."""
    above = Path(__file__).parents[2]
    packaged = above / "fedtide" / "presets"
    return packaged if packaged.is_dir() else above.parent / "examples"


def preset_files() -> dict[str, Path]:
    """Return the files of the configs that come with fedtide by name, the first to try first."""
    above = preset_directory()
    return {p.stem: p for folder in FOLDERS for p in sorted((above / folder).glob("*.toml"))}


def presets() -> list[str]:
    """Return the names of the configs that come with fedtide."""
    return sorted(preset_files())


def preset_file(name: str) -> Path:
    """Return the file of a preset; ConfigError if there is none of that name."""
    known = preset_files()
    if name not in known:
        raise ConfigError(
            f"{name[:50]!r} is no preset.{suggestion(name, known)} fedsrv init lists them"
        )
    return known[name]


def config_file(path: Path) -> Path:
    """Return a config's file: the preset of that bare name, unless a file is called so."""
    if path.suffix or len(path.parts) != 1 or path.is_file():
        return path
    return preset_files().get(path.name, path)


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
