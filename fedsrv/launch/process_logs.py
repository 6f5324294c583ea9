"""What the logs of a launch's processes say."""

from __future__ import annotations

from pathlib import Path


def notes_in(log: Path) -> list[str]:
    """Return the notes on the data in the log of a partition, each once."""
    try:
        lines = log.read_text("locale", "replace").splitlines()
    except OSError:
        return []
    said = (line.partition("note: ")[2] for line in lines if " fedcli.data." in line)
    return [f"note: {text}" for text in dict.fromkeys(said) if text]


def error_in(log: Path) -> str:
    """Return the last error line of a log, without its prefix; empty where there is none."""
    try:
        lines = log.read_text("locale", "replace").splitlines()
    except OSError:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else (lines[-1] if lines else "")
