"""The files of the packages, and a report of the large ones: ``python -m tests.sizes``.

The report is advice: a long file or a large room is a reason to ask whether it is one subject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = {
    "fedtide": ROOT / "fedtide",
    "fedsrv": ROOT / "fedsrv",
    "fedcli": ROOT / "fedcli",
    "fedmodels": ROOT / "models" / "fedmodels",
    "fedpb": ROOT / "proto" / "fedpb",
}
PLUGINS = ROOT / "fedplugins"
PACKAGES = {**CORE, "fedplugins": PLUGINS} if PLUGINS.is_dir() else CORE
MAX_LINES = 400
MAX_MODULES = 15


def sources(package: str) -> list[Path]:
    """Return the hand-written files of a package, without the tests of plugins."""
    files = sorted(p for p in PACKAGES[package].rglob("*.py") if "_pb2" not in p.name)
    return [p for p in files if p.parent.name != "tests" and p.name != "conftest.py"]


def large_parts(files: Iterable[Path]) -> list[str]:
    """Return a line for each room with many modules, and for each long file."""
    files = list(files)
    rooms = Counter(path.parent for path in files if path.stem[0] != "_")
    lines = {path: len(path.read_text().splitlines()) for path in files}
    return [
        *(f"{_name(room)}: {n} modules" for room, n in sorted(rooms.items()) if n > MAX_MODULES),
        *(f"{_name(path)}: {n} lines" for path, n in lines.items() if n > MAX_LINES),
    ]


def _name(path: Path) -> str:
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


if __name__ == "__main__":
    found = large_parts(path for package in PACKAGES for path in sources(package))
    print(f"rooms of more than {MAX_MODULES} modules, files of more than {MAX_LINES} lines:")
    print("\n".join(f"  {line}" for line in found) or "  none")
