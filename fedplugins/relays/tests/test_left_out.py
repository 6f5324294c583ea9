"""Relays are one part: nothing but its command names it, and a run goes without it."""

import sys

import pytest

from fedmodels.plugins import offered
from tests.fedsrv.transport.test_results_of_pushes import World
from tests.sizes import PACKAGES, ROOT, sources
from tests.test_architecture import imports

PART = "fedplugins.relays"
OWN = "fedplugins/relays/"


class Refusing:
    """A finder that finds nothing of relays."""

    def find_spec(self, name, path=None, target=None):
        if name == PART or name.startswith(f"{PART}."):
            raise ModuleNotFoundError(f"{name} was taken out")


def test_no_file_outside_imports_it():
    found = set()
    for package in PACKAGES:
        for path in sources(package):
            place, text = path.relative_to(ROOT).as_posix(), path.read_text()
            names = imports(text, package) if "relay" in text else ()  # to parse all takes seconds
            if not place.startswith(OWN) and any(
                f"{name}.".startswith(f"{PART}.") for name in names
            ):
                found.add(place)
    assert found == set()
    assert any(point.module.startswith(PART) for point in offered("fedsrv.relays"))


def test_uploads_come_without_it(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{PART}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="was taken out"):
        __import__(f"{PART}.admission")
    world = World(tmp_path)
    world.open()
    assert not world.push(world.chunks()).repeated_upload
    assert list(world.done.result(30).by_client) == [0]
    world.engine.shutdown()
