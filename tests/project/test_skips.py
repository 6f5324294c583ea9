"""No test is skipped everywhere: what a test may lack is there where some target runs it."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from yaml import safe_load

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {"Crypto": "pycryptodome"}
"""Of modules that are named otherwise."""
ORACLES = {
    "byzfl",
    "dp-accounting",
    "opacus",
    "pot",
    "pycryptodome",
    "scikit-learn",
    "torchmetrics",
}
"""What results are compared with."""
MAY_LACK = ("importorskip", "find_spec")
"""Functions that a test asks for a module with."""
ON_A_CARD = "tests/integration/test_gpu.py"


def named(requirements: list[str]) -> set[str]:
    """Return the names of distributions, as pip writes them."""
    found = (re.match(r"[\w.-]+", line) for line in requirements)
    return {match[0].lower().replace("_", "-") for match in found if match}


def lacking() -> Iterator[tuple[str, str, str]]:
    """Yield each file of tests, a module it may be skipped for, and the distribution of that."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        if not any(name in text for name in MAY_LACK):
            continue  # to parse all files takes seconds, in each process of pytest
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            is_skip = call.func.attr in MAY_LACK
            if is_skip and call.args and isinstance(call.args[0], ast.Constant):
                module = call.args[0].value.partition(".")[0]
                if (ROOT / module).is_dir():
                    continue  # a room of the project's own, that may have been removed
                known = DISTRIBUTIONS.get(module, module).lower().replace("_", "-")
                known = {"ot": "pot", "opentelemetry": "opentelemetry-sdk"}.get(known, known)
                yield str(path.relative_to(ROOT)), module, known


ALWAYS = named([*PROJECT["dependencies"], *EXTRAS["dev"]])
LACKING = sorted(set(lacking()))


def test_oracles_are_installed_where_the_tests_run():
    assert ORACLES <= ALWAYS


@pytest.mark.parametrize("module", sorted({m for _, m, known in LACKING if known in ALWAYS}))
def test_nothing_is_skipped_for_want_of_what_make_setup_installs(module):
    assert importlib.util.find_spec(module), "make setup"


def test_what_else_tests_need_is_installed_beside_the_target_that_runs_them():
    jobs = safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    lines = [s["run"] for s in jobs["beside"]["steps"] if "pip install" in s.get("run", "")]
    extras = {name for line in lines for part in re.findall(r"\.\[(.*?)\]", line)
              for name in part.split(",")}  # fmt: skip
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    recipes = re.findall(r"^test-(?:beside|flower):.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    recipe = " ".join(recipes)
    words = [*" ".join(lines).split(), *recipe.split()]
    there = named([r for name in extras for r in EXTRAS[name]] + words)
    run = {
        str(path.relative_to(ROOT))
        for word in re.findall(r"tests/[\w/.*]+", recipe)
        for place in ROOT.glob(word)
        for path in (place.rglob("test_*.py") if place.is_dir() else [place])
    }
    rest = {one for one in LACKING if one[2] not in ALWAYS and one[0] != ON_A_CARD}
    assert not [one for one in sorted(rest) if one[2] not in there], "installed nowhere"
    assert not [one for one in sorted(rest) if one[0] not in run], "make test-beside lacks it"
