"""How large the project is, and which files and rooms are large: ``python -m tests.sizes``.

The list of large files and rooms is advice: each is a reason to ask whether it is one subject. The
table of measures has borders (:data:`MOST`), which ``tests/test_architecture.py`` holds: they fall
with what is moved into plugins or deleted, and never rise.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
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


MOST: Mapping[str, int] = {
    "lines of the core": 91_859,
    "seams of parts": 58,
    "loose files in fedmodels": 3,
    "loose files in fedsrv": 2,
    "loose files in fedcli": 5,
    "bindings named found": 622,
}
"""The borders."""


def measures() -> dict[str, int]:
    """Return the measures of the project that it is to keep small, by what they count."""
    core = [path for package in CORE for path in sources(package)]
    beside = [path for package in PACKAGES.keys() - CORE for path in sources(package)]
    tests = [*(ROOT / "tests").rglob("*.py"), *PLUGINS.rglob("tests/*.py")]
    loose = {
        f"loose files in {package}": len([*CORE[package].glob("[!_]*.py")])
        for package in ("fedmodels", "fedsrv", "fedcli")
    }
    bound = (len(re.findall(r"\bfound(?:: [^=\n]+)? = ", path.read_text())) for path in core)
    return {
        "lines of the core": _lines(core),
        "lines of plugins": _lines(beside),
        "lines of tests": _lines(tests),
        "seams of parts": sum(map(_functions, SEAMS)),
        **loose,
        "bindings named found": sum(bound),
    }


SEAMS = (
    ("fedsrv/engine/server_part.py", "ServerPart"),
    ("fedcli/runtime/client_part.py", "ClientPart"),
    ("models/fedmodels/training/wire.py", "SharedPart"),
)


def _functions(place: tuple[str, str]) -> int:
    """Return how many functions a class has that parts may override."""
    tree = ast.parse((ROOT / place[0]).read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == place[1])
    return sum(isinstance(n, ast.FunctionDef) and n.name != "__init__" for n in found.body)


def _lines(files: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


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
    for measure, count in measures().items():
        print(
            f"{measure:28} {count:8,}", f"of at most {MOST[measure]:,}" if measure in MOST else ""
        )
    found = large_parts(path for package in PACKAGES for path in sources(package))
    print(f"rooms of more than {MAX_MODULES} modules, files of more than {MAX_LINES} lines:")
    print("\n".join(f"  {line}" for line in found) or "  none")
