"""Pages say what the code does: examples parse, generated pages are current, timeouts are true."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedmodels.config.recipe import recipe_of
from fedmodels.errors import ConfigError
from fedmodels.facts.data_description import ClientFile
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import file_of, make, names
from fedmodels.tensors.bundle import Problem
from fedmodels.training.compression import Compression
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedsrv.engine.availability import is_there, read_availability
from fedsrv.parts.buffered_rounds import check_asynchronous
from tests.conftest import script_of

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEAST = {
    "net": {"name": "mlp"},
    "method": {"name": "fedavg"},
    "scenario": {"kind": "iid"},
    "schedule": {"clients": 10},
}
"""What a fragment of a config is completed with."""
OURS = set(filter(file_of, names()))
CONSTANT = re.compile(r"^_?[A-Z][A-Z_]*_M?S$")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return every block of code in a language, with its page."""
    block = re.compile(rf"^```{language}(?: [^\n]*)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(page.name, text) for page in PAGES for text in block.findall(page.read_text())]


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_a_block_of_toml_is_a_config(page, text):
    content = tomllib.loads(text)
    if text.startswith("columns."):
        recipe_of(content, page)
    elif not {"methods", "search"} & content.keys():  # the tables of a study
        experiment_of({**LEAST, **content}, page)


def test_blocks_of_toml_were_found():
    assert {"tutorial-images.md", "tutorial-sensors.md", "data.md"} <= {
        p for p, _ in blocks("toml")
    }
    with pytest.raises(ConfigError):
        experiment_of({**LEAST, "data": {"nme": "digits"}})


def test_python_of_the_pages_compiles():
    found = blocks("python")
    assert {"README.md", "data.md", "tutorial-images.md"} <= {page for page, _ in found}
    for page, text in found:
        compile(text, page, "exec")


def test_the_least_description_is_one():
    ((page, text),) = blocks("json")
    assert page == "data.md"
    assert ClientFile.model_validate_json(text).num_classes == 3


def test_the_trace_says_what_the_page_says(tmp_path):
    page = (ROOT / "docs" / "populations.md").read_text()
    (trace,) = re.findall(
        r"^```\n(client,from,until\n.*?)^```$", page, flags=re.DOTALL | re.MULTILINE
    )
    (tmp_path / "there.csv").write_text(trace)
    schedule = {"clients": 3, "availability": str(tmp_path / "there.csv")}
    found = read_availability(experiment_of({**LEAST, "schedule": schedule}))
    there = [t for t in range(40) if is_there(found, 0, t)]
    assert there == [*range(10), *range(20, 30)]
    assert is_there(found, 2, 1_000)


def test_the_chart_knows_the_keys_of_the_page():
    ((_, text),) = blocks("yaml")
    known = (ROOT / "deploy" / "helm" / "values.yaml").read_text()
    keys = re.findall(r"(\w+): ", text)
    assert {"name", "clients", "dataClaim", "tlsSecret"} == set(keys)
    assert all(f"{key}:" in known for key in keys)


def named(page: str, begins: str) -> set[str]:
    """Return the methods that a page names in the sentence that begins so."""
    text = " ".join((ROOT / "docs" / page).read_text().split())
    sentence = text[text.index(begins) :].partition(". ")[0]
    return set(re.findall(r"`([\w-]+)`", sentence)) & OURS


def accepting(check: Callable[[Method, RunFacts], object], **tables: object) -> set[str]:
    """Return the methods that a check lets pass in a run with these tables."""
    found = set()
    for name in OURS:
        nets: dict[str, object] = {
            "fedali": {"name": "hart", "alp": True}, "pilora": {"name": "mlp", "adapters": 8},
        }  # fmt: skip
        net = nets.get(name, {"name": "digits-cnn", "norm": "batch"})
        run = experiment_of({**LEAST, "net": net, "method": {"name": name}, **tables})
        shape = (128, 6) if name == "fedali" else (1, 28, 28)
        try:
            check(make(name), RunFacts(run, Problem(shape, 10)))
        except ConfigError:
            continue
        found.add(name)
    return found


def test_the_methods_of_asynchronous_rounds_are_those_that_the_page_names():
    schedule = {"clients": 3, "order": "asynchronous", "buffer": 2}
    told = named("asynchronous.md", "Methods whose server averages")
    assert accepting(check_asynchronous, schedule=schedule) == told | {"centralized"}


def test_the_methods_without_compression_are_those_that_the_page_names():
    found = accepting(Compression.of, compression={"up": "int8", "down": "int8"})
    assert OURS - found == named("compression.md", "Methods without such parameters")


def test_the_methods_that_tell_clients_of_classes_are_those_that_the_page_names():
    """A payload's histogram counts the clients of a cohort that hold each class."""

    def tells_no_classes(method: Method, run: RunFacts) -> None:
        for spec in method.payload_spec(run):
            if any(key.startswith("histogram/") for key in (*spec.required, *spec.optional)):
                raise ConfigError("it tells of the cohort's classes")

    told = named("differential-privacy.md", "`af-fcl`, `fedcil`, ")
    assert OURS - accepting(tells_no_classes) == told


def generated(name: str) -> str:
    """Return a page of the reference, as its script writes it."""
    page: str = script_of(name).page()
    return page


@pytest.mark.needs
def test_the_page_of_what_leaves_has_every_message():
    """The golden traces look at its tables of methods: they run every method anyway."""
    script = script_of("privacy")
    page = (ROOT / "docs" / "privacy.md").read_text()
    assert page == script.page(script.uploads_on(page)), "make docs writes it"
    assert {*script.fields_on(page)} == {script.label_of(case) for case in script.CASES}


@pytest.mark.needs
@pytest.mark.parametrize("name", ["commands", "configuration", "monitoring", "schema", "times"])
def test_a_generated_page_is_current(name):
    assert (ROOT / "docs" / f"{name}.md").read_text() == generated(name), "make docs writes it"


@pytest.mark.parametrize("name", ["commands", "configuration", "schema"])
def test_every_row_of_a_generated_page_has_a_meaning(name):
    page = generated(name)
    assert len(re.findall(r"^\| .*\|$", page, flags=re.MULTILINE)) > 50
    assert re.findall(r"^\| .*\|\s+\|$", page, flags=re.MULTILINE) == []


def test_the_schema_has_every_message():
    told = set(re.findall(r"^### (\w+)$", generated("schema"), flags=re.MULTILINE))
    files = (ROOT / "proto" / "fedpb" / "v1").glob("*.proto")
    named = r"^(?:message|enum|service) (\w+)"
    assert told == {n for f in files for n in re.findall(named, f.read_text(), flags=re.MULTILINE)}


def test_make_docs_writes_each_page_that_says_so():
    """It left the page of combinations as it was."""
    (loop,) = re.findall(r"for page in (.*?); do", (ROOT / "Makefile").read_text())
    says_so = {page.stem for page in PAGES if "`make docs` updates it" in one_line(page)}
    assert says_so
    assert says_so <= {*loop.split()}


def one_line(page: Path) -> str:
    """Return a page's text without its ends of lines."""
    return " ".join(page.read_text().split())


@pytest.mark.needs
def test_the_page_of_combinations_is_current():
    """Of fedtide's methods, every sixth: some try generators at several numbers of classes."""
    script, page = script_of("combinations"), (ROOT / "docs" / "combinations.md").read_text()
    assert page.startswith("\n".join(script.sections())), "make docs writes it"
    rows = [line for line in page.splitlines() if line.startswith("| ") and "methods/" in line]
    ours = [name for name in script.names() if name in OURS]  # other tests install plugins
    assert set(map(script.row_of, ours[::6])) <= {*rows}
    assert len(rows) > 20


@pytest.mark.needs
def test_limits_on_pages_are_those_of_the_table():
    found = dict(script_of("limits").pages())
    assert len(found) >= 8
    for page, text in found.items():
        assert page.read_text("utf-8") == text, "make docs writes it"


@pytest.mark.parametrize(
    "package", ["proto/fedpb", "models/fedmodels", "fedsrv", "fedcli", "fedtide"]
)
def test_all_times_stand_in_one_table(package):
    """And nowhere else, so that one factor reaches them; gaps in recordings are no times."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        text = path.read_text()
        if path.name == "times.py" or not re.search(r"_M?S\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found |= {(path.stem, node.id)} if CONSTANT.match(node.id) else set()
    assert found <= {("hhar", "MAX_GAP_MS")}


def test_each_time_says_what_it_decides():
    script = script_of("times")
    assert len([*script.rows(True)]) > 30
    assert len([*script.rows(False)]) > 30
