"""Which version a build carries: that of a release at its tag, and otherwise one of its own."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parent.parent.parent
NUMBER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["fedtide"]["version"]


def git(place: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=place, check=True, capture_output=True)


def built(place: Path) -> str:
    """Return the version that hatchling gives to a build of a directory."""
    return str(ProjectMetadata(str(place), PluginManager()).version)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a small project whose version is made as this one's is."""
    for name in ("pyproject.toml", "hatch_version.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "fedsrv").mkdir()
    (tmp_path / "fedsrv" / "cli.py").write_text("a = 1\n")
    return tmp_path


@pytest.fixture
def clone(sources: Path) -> Path:
    git(sources, "init", "-q")
    git(sources, "add", ".")
    git(sources, "commit", "-qm", "one")
    return sources


def test_two_commits_never_have_the_same_version(clone):
    first = built(clone)
    assert first.startswith(f"{NUMBER}.dev0+g")
    assert built(clone) == first
    git(clone, "commit", "-qm", "two", "--allow-empty")
    assert first != built(clone)


def test_what_is_not_committed_gives_a_version_of_its_own(clone):
    versions = [built(clone)]
    (clone / "fedsrv" / "cli.py").write_text("a = 2\n")
    versions += [built(clone)]
    (clone / "fedsrv" / "new.py").write_text("b = 1\n")
    versions += [built(clone)]
    (clone / "fedsrv" / "new.py").write_text("b = 2\n")
    versions += [built(clone)]
    assert len({*versions}) == 4
    assert len({version.partition(".d")[0] for version in versions}) == 1


def test_a_release_is_what_its_tag_holds_and_nothing_else(clone):
    git(clone, "tag", "v9.9.9")
    assert built(clone) != NUMBER
    git(clone, "tag", f"v{NUMBER}")
    assert built(clone) == NUMBER
    (clone / "fedsrv" / "cli.py").write_text("a = 2\n")
    assert built(clone).startswith(f"{NUMBER}.dev0+g")


def test_sources_without_git_are_told_apart_by_what_they_hold(sources):
    first = built(sources)
    assert first.startswith(f"{NUMBER}.dev0+s")
    assert built(sources) == first
    (sources / "fedsrv" / "cli.py").write_text("a = 2\n")
    assert built(sources) != first


def test_a_clone_that_git_does_not_read_is_built(sources):
    (sources / ".git").write_text("gitdir: nowhere\n")
    assert built(sources).startswith(f"{NUMBER}.dev0+s")


def test_a_source_archive_keeps_its_version(clone):
    (clone / "PKG-INFO").write_text(
        f"Metadata-Version: 2.4\nName: fedtide\nVersion: {NUMBER}.dev0+g12ab\n\nx\n"
    )
    assert built(clone) == f"{NUMBER}.dev0+g12ab"
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "hatch_version.py" in include["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
