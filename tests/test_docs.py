"""Pages: what they link to and name is there; method pages tell fields and defaults."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest

import fedtide
from fedmodels.facts.config_file import parse_experiment
from fedmodels.methods import file_of, make, names, settings_of, variants_of
from fedmodels.methods.fedavg import FedAvg
from fedmodels.plugins import is_here
from fedplugins.presets.presets import text_of
from fedplugins.studies.plan import Sweep

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|proto|js))`")
WRITTEN_BY_READERS = {"my_method.py", "my_data.py", "NAME.py", "test_NAME.py"}
FOLDERS = (
    "fedsrv",
    "fedcli",
    "fedtide",
    "models",
    "proto",
    "fedplugins",
    "tests",
    "benchmarks",
    "examples",
)
SOURCES = [path.as_posix() for name in FOLDERS for path in (ROOT / name).rglob("*.*")]


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_links_lead_somewhere():
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page}: {link}"
            assert target.is_relative_to(ROOT), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
        assert set(named) <= targets, page


def test_code_that_a_page_names_is_there():
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        for name in CODE.findall(page.read_text()):
            if Path(name).name not in WRITTEN_BY_READERS:
                plugin = re.match(r"fedplugins/(\w+)/", name)
                is_gone = plugin is not None and not is_here(plugin[1])
                is_there = any(path.endswith(f"/{name}") for path in SOURCES)
                assert is_there or is_gone, f"{page}: {name}"


def test_what_belongs_to_an_item_is_indented_by_four():
    """The site's Markdown takes paragraphs and lists with less out of their item."""
    outside = re.compile(r"^ {1,3}(?:[-*]|\d+\.) .*|(?<=\n\n) {1,3}\S.*", flags=re.MULTILINE)
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert outside.findall(text) == [], page


def test_pages_were_found():
    names = {page.name for page in PAGES}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "glossary.md"} <= names


def test_each_decision_stands_once_with_its_context_and_what_was_tried():
    """A merge that keeps both sides would leave a moved decision inside another one."""
    place = ROOT / "docs" / "decisions"
    files = sorted(path for path in place.glob("*.md") if path.name != "README.md")
    texts = {path.name: path.read_text() for path in files}
    titles = [(name, text.partition("\n")[0].removeprefix("# ")) for name, text in texts.items()]
    index = (place / "README.md").read_text()
    rows = re.findall(r"^- \[(\d{3})\]\((.*)\): (.*)$", index, flags=re.MULTILINE)
    assert sorted((name, title) for _, name, title in rows) == titles
    assert all(name.startswith(f"{number}-") for number, name, _ in rows)
    assert len({number for number, *_ in rows}) == len(rows), "two decisions have one number"
    assert 40 < len(titles) == len({title for _, title in titles}) <= 60, (
        "merge what has one subject"
    )
    for name, text in texts.items():
        assert len(text.splitlines()) <= 30, f"{name} is long: a decision is read in a minute"
        assert not re.search(r"^##", text, flags=re.MULTILINE), f"{name} holds another decision"
        leads = re.findall(r"^\*\*([^*]+)\.\*\* ", text, flags=re.MULTILINE)
        assert leads in (LEADS, LEADS[:3]), name


LEADS = ["Context", "Decision", "Consequences", "Tried"]
"""How the paragraphs of a decision begin."""


def test_every_target_says_what_it_does():
    makefile = (ROOT / "Makefile").read_text()
    declared = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", makefile, flags=re.MULTILINE)
    assert declared is not None
    phony = set(declared[1].replace("\\", " ").split())
    assert set(re.findall(r"^([a-z-]+):.*##", makefile, flags=re.MULTILINE)) == phony


@pytest.mark.parametrize("name", names())
def test_every_method_has_a_page_that_names_its_fields(name):
    page = ROOT / "docs" / "methods" / f"{name}.md"
    assert page.exists()
    text = page.read_text()
    fields = {field.name for field in dataclasses.fields(FedAvg)}
    if name.endswith("-replay"):  # pFedGRP's page has the replay
        fields |= flat_settings("pfedgrp").keys()
    told = flat_settings(name)
    assert name not in READINGS or "`[method.reading]`" in text
    unnamed = {k for k in told.keys() - fields if f"`{k}" not in text and f"`…{k}" not in text}
    assert unnamed == set()


def flat_settings(name: str) -> dict[str, object]:
    """Return the settings of a method with their defaults, its readings among them."""
    found = settings_of(make(name))
    readings = found.pop("reading", {})
    return {**found, **readings}


READINGS = [name for name in names() if (found := variants_of(name)) and found.readings]
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", flags=re.MULTILINE)
"""A row of a method's page: its fields, and their defaults."""


def told_defaults(page: str, known: Collection[str]) -> dict[str, str]:
    """Return the default that a page tells of each field: one for all of a row, or one for each."""
    told = {}
    for cell, text in ROW.findall(page):
        fields = re.findall(r"\w+", cell)
        if not set(fields) <= set(known):  # a row of figures
            continue
        text = text.replace("`", "").partition(" = ")[0].removesuffix(" each").strip()
        values = re.split(r", (?![^\[]*\])", text)
        told |= dict(zip(fields, values * (len(fields) // len(values)), strict=True))
    return told


def same_value(default: object, text: str) -> bool:
    """Tell whether a page's text means a default."""
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    if isinstance(default, tuple):
        default = list(default)
    return value == default and isinstance(value, bool) == isinstance(default, bool)


@pytest.mark.parametrize("name", names())
def test_a_page_tells_the_defaults_of_its_method(name):
    fields = flat_settings(name)
    told = told_defaults((ROOT / "docs" / "methods" / f"{name}.md").read_text(), fields)
    assert {k: v for k, v in told.items() if not same_value(fields[k], v)} == {}
    assert told or name == "local" or name.endswith("-replay")


def listed() -> dict[str, str]:
    """Return the rows of the table of methods, by the method's registered name."""
    text = (ROOT / "docs" / "methods" / "README.md").read_text()
    return dict(re.findall(r"^\| \[[^\]]+\]\(([\w-]+)\.md\)(.*)$", text, flags=re.MULTILINE))


def runs(name: str, preset: Path) -> bool:
    """Tell whether an example, or a row of a study, runs a method."""
    tables = tomllib.loads(preset.read_text())
    if "methods" in tables:
        return name in {row.split()[0] for row in tables["methods"].values()}
    return bool(tables["method"]["name"] == name)


def test_the_table_lists_every_method_once():
    text = (ROOT / "docs" / "methods" / "README.md").read_text()
    assert sorted(listed()) == sorted(filter(file_of, names()))  # other tests install one
    assert len(re.findall(r"^\| \[", text, flags=re.MULTILINE)) == len(listed())


def test_pages_count_the_methods():
    count = len(listed())
    for page in (ROOT / "README.md", ROOT / "docs" / "comparison.md"):
        assert f"| Methods included | {count}, personal and continual |" in page.read_text()
    assert f"methods (it includes {count})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", names())
def test_a_row_names_code_tests_and_presets_of_its_method(name):
    row = listed()[name]
    links = [(ROOT / "docs" / "methods" / link).resolve() for link in LINK.findall(row)]
    assert f"`{name}`" in row
    assert next(link for link in links if link.suffix == ".py") == file_of(name)
    assert any(link.name.startswith("test_") for link in links)
    presets = [link for link in links if link.suffix == ".toml"]
    assert presets or parse_experiment(text_of(name), name).method.name == name
    assert all(runs(name, preset) for preset in presets)


def test_the_page_of_python_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    files = ("runs", "open_runs", "own_loop", "server_half")
    shown = [ROOT / "fedtide" / f"{name}.py" for name in files]
    text = page + "".join(path.read_text() for path in shown)
    missing = [n for n in fedtide.__all__ if not re.search(rf"`{n}`|(def|class) {n}\b", text)]
    assert missing == ["TrainedModel"]  # fedtide.models has it, and stands there as a whole
    assert "::: fedtide.models" in page


def test_the_keys_of_a_sweep_are_on_a_page():
    section = (ROOT / "docs" / "results.md").read_text().partition("## The file of a sweep")[2]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == [*Sweep.model_fields]
