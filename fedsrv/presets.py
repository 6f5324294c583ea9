"""The configs that come with fedtide: their names, what each is, and a copy to begin with."""

from __future__ import annotations

from pathlib import Path

from fedmodels.errors import ConfigError, suggestion
from fedmodels.files import write_new


def preset_directory() -> Path:
    """Return where the presets lie: in the installed package, or in the checkout."""
    above = Path(__file__).parent.parent
    packaged = above / "fedtide" / "presets"
    return packaged if packaged.is_dir() else above / "examples"


def presets() -> list[str]:
    """Return the names of the configs that come with fedtide."""
    return sorted(path.stem for path in preset_directory().glob("*.toml"))


def preset_file(name: str) -> Path:
    """Return the file of a preset.

    Raises:
        ConfigError: there is none of that name; names the nearest.
    """
    known = presets()
    if name not in known:
        raise ConfigError(
            f"{name[:50]!r} is no preset.{suggestion(name, known)} fedsrv init lists them"
        )
    return preset_directory() / f"{name}.toml"


def about(name: str) -> str:
    """Return what a preset says of itself: the first sentence of its comment."""
    words = list[str]()
    for line in preset_file(name).read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
    sentence, dot, _ = " ".join(words).partition(". ")
    return sentence + dot.rstrip()


def copy_preset(name: str, out: Path) -> None:
    """Copy a preset with its comments to a new file.

    Raises:
        ConfigError: there is no such preset, or the file exists or cannot be written.
    """
    text = preset_file(name).read_text("utf-8")
    try:
        write_new(out, text.encode())
    except FileExistsError:
        raise ConfigError(f"{out} exists; give another name with --out") from None
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
