"""The version of a build, which hatchling asks for: no two builds of other sources have the same.

At the tag of a release it is the number in ``pyproject.toml``. Any other clone gives a development
version before that number, with the commit and a digest of what is not committed; sources without
git give a digest of the packages. (What is built from a source archive keeps its version.)
"""

from __future__ import annotations

import hashlib
import subprocess
import tomllib
from pathlib import Path


def version(root: Path = Path(__file__).parent) -> str:
    """Return the version of what is built from the sources in a directory."""
    tool = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]
    number = str(tool["fedtide"]["version"])
    try:
        if not (root / ".git").exists():
            raise FileNotFoundError
        commit, changes = _git(root, "rev-parse", "HEAD").decode().strip(), _changes(root)
        tags = _git(root, "tag", "--points-at", "HEAD").decode().split()
    except (OSError, subprocess.CalledProcessError):  # no clone, no git, or another user's clone
        return f"{number}.dev0+s{_of_packages(root, tool['hatch']['build']['targets']['wheel'])}"
    if f"v{number}" in tags and not changes:
        return number
    return f"{number}.dev0+g{commit[:12]}{changes}"


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=root, check=True, stdout=subprocess.PIPE).stdout


def _changes(root: Path) -> str:
    """Return the suffix of a work tree that differs from its commit; nothing of one that does not.

    A file that is read while it changes gives just another suffix.
    """
    found = hashlib.sha256(changed := _git(root, "diff", "HEAD", "--binary", "--no-ext-diff"))
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")[:-1]
    for name in new:
        found.update(name + b"\0" + (root / name.decode()).read_bytes())
    return f".d{found.hexdigest()[:8]}" if changed or new else ""


def _of_packages(root: Path, wheel: dict[str, list[str]]) -> str:
    """Return a digest of what a wheel is made of."""
    found = hashlib.sha256((root / "pyproject.toml").read_bytes())
    for package in (*wheel["packages"], *wheel.get("force-include", ())):
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]
