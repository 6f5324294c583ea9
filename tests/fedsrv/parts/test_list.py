"""The list of parts: a part is loaded where a config asks for it, and the kernel knows none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.combinations import LISTED, part_at, parts_on
from fedsrv.engine.server_part import ServerPart
from tests.combinations import WITHOUT_KEY, needed_by, tables_of
from tests.conftest import tiny_experiment
from tests.sizes import ROOT

ALWAYS = ["UnusedData", "OddUploads", "Exclusions", "RefusedModels"]
"""What takes effect without a key of its own."""
UNASKED = ("unused data", "odd uploads", "exclusion by hand", "refused models")
"""Their names in the list."""


def on(**tables: Any) -> list[str]:
    experiment = tiny_experiment(**tables)
    places = dict.fromkeys(part.server for part in parts_on(experiment) if part.server)
    return [place.partition(":")[2] for place in places]


def test_a_plain_run_has_the_parts_that_need_no_key():
    assert on() == ALWAYS


OF_THE_CORE = [p for p in LISTED if p.server and p.name not in UNASKED and not p.home]


@pytest.mark.parametrize("part", OF_THE_CORE)
def test_a_part_is_there_where_its_section_asks_for_it(part, tmp_path):
    names = needed_by([part.name])
    tables = dict(WITHOUT_KEY.get(part.name, {})) or tables_of(names, tmp_path)
    needed = {p.server.partition(":")[2] for p in LISTED if p.name in names and p.server}
    assert {*on(**tables)} == {*ALWAYS, *needed}


def test_every_part_is_a_part():
    places = {part.at("server") for part in LISTED if part.server}
    assert all(issubclass(part_at(place), ServerPart) for place in places)


def loaded(module: str) -> Iterator[str]:
    """Yield the modules of ``fedsrv`` that a module loads with itself."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    path = path if path.is_file() else path.with_suffix("") / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedsrv"):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                place = ROOT / str(name).replace(".", "/")
                if place.with_suffix(".py").is_file() or place.is_dir():
                    yield str(name)


def test_a_coordinator_loads_the_list_and_no_part_that_is_off():
    seen, due = set[str](), ["fedsrv.coordinator", "fedsrv.parts"]
    while due:
        if (module := due.pop()) not in seen:
            seen.add(module)
            due += loaded(module)
    held = {m for m in seen if m.startswith(("fedsrv.parts.", "fedplugins."))}
    assert held == set()


def test_the_kernel_imports_no_part():
    found = {
        path.name: node.module
        for path in sorted(Path(ROOT / "fedsrv" / "engine").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedsrv.parts")
    }
    assert found == {}
