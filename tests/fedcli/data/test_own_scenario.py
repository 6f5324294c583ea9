"""A scenario of a user's file: what it may return, and that its file cannot change unseen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedcli.data.cuts.partition import partition
from fedmodels.config.origin import differences
from fedmodels.config.scenario import OwnScenario
from fedmodels.config.sent import without_places
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.resolution import experiment_of, received_experiment
from fedtide.inprocess import launch_in_process
from tests.conftest import tiny_experiment

LABELS = np.repeat(np.arange(4), 4)
TEST = np.repeat(np.arange(4), 2)


def written(place: Path, body: str, head: str = "def deal(given, width=2):") -> str:
    """Write a file with a function; return its name in a config."""
    file = place / "mine.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    file.write_text(f"import numpy as np\n\n{head}\n{lines}\n", encoding="utf-8")
    return f"{file}:deal"


def cut(kind: str, clients: int = 2, groups: np.ndarray | None = None, **keys: object):
    """Deal sixteen training and eight test examples of four classes out."""
    scenario = OwnScenario(kind=kind, **keys)
    return partition(scenario, LABELS, TEST, 4, clients, seed=0, groups=groups)


def test_the_example_slides_over_the_classes():
    file = Path(__file__).parents[3] / "examples/extend/sliding.py"
    made = cut(f"{file}:deal", tasks=2, width=2)
    held = [
        [np.bincount(LABELS[task.train], minlength=4).tolist() for task in tasks]
        for tasks in made.clients
    ]
    # client 0: classes 0, 1, then 1, 2; client 1: 2, 3, then 3, 0. Each class has two holders.
    assert held == [[[2, 2, 0, 0], [0, 2, 2, 0]], [[0, 0, 2, 2], [2, 0, 0, 2]]]
    tested = [np.bincount(TEST[task.test], minlength=4).tolist() for task in made.clients[1]]
    assert tested == [[0, 0, 1, 1], [1, 0, 0, 1]]


def test_pairs_of_indices_are_taken_as_they_are_and_the_tail_is_cut_before(tmp_path):
    groups = np.r_[np.arange(16), np.arange(100, 108)]
    kind = written(
        tmp_path,
        "assert [*given.groups[:4]] == [0, 1, 2, 3] and given.groups[-1] == 107\n"
        "assert (given.groups[: len(given.train)] // 4 == given.train).all()\n"
        "half = np.flatnonzero(given.train == 0)\n"
        "return [[(half[:2], [0])], [(half[2:], [1, 2])]]",
    )
    first, second = cut(kind, groups=groups, gamma=0.25).clients
    assert (first[0].train.tolist(), first[0].test.tolist()) == ([0, 1], [0])
    assert (second[0].train.tolist(), second[0].test.tolist()) == ([2, 3], [1, 2])


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return [[[0]]]", "returned [1] tasks of its clients; [schedule] clients and [scenario] "),
        ("return [[[0]], [[1], [2]]]", "returned [1, 2] tasks of its clients"),
        ("return [[[0]], [[16]]]", "client 1, task 0, training: there is no example 16; indices "),
        ("return [[[0]], [[-1]]]", "there is no example -1"),
        ("return [[([0], [8])], [([1], [0])]]", "client 0, task 0, test: there is no example 8"),
        ("return [[[0, 0]], [[1]]]", "client 0, task 0, training: an example is there twice"),
        ("return [[[0.5]], [[1]]]", "float64 (1,) are no indices of examples"),
        ("return [[[[0]]], [[1]]]", "int64 (1, 1) are no indices"),
        ("return [[([0], [1])], [[1]]]", "each task is indices, or each a pair"),
        ("return [[([0],)], [([1],)]]", "each task is indices, or each a pair"),
        ("return [[[]], [[1]]]", "client 0 would have no training example in task 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_out_is_refused_by_name(tmp_path, body, line):
    with pytest.raises(ConfigError) as told:
        cut(written(tmp_path, body))
    assert line in str(told.value)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return 3", "mine.py:deal failed: TypeError"),
        ("given.train[:] = 0", "mine.py:deal failed: ValueError: assignment destination is read-o"),
        ("raise ValueError('no way')", "mine.py:deal failed: ValueError: no way"),
        ("return [[[[0], [1, 2]]], [[3]]]", "training failed: ValueError"),
    ],
)
def test_a_function_that_fails_is_told_in_a_line(tmp_path, body, line):
    with pytest.raises(DataError) as told:
        cut(written(tmp_path, body))
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def test_its_keys_are_those_of_the_function(tmp_path):
    kind = written(tmp_path, "return [[np.flatnonzero(given.train == c)] for c in range(width)]")
    assert len(cut(kind, width=2).clients) == 2
    with pytest.raises(ConfigError, match=r"called with a CutInput and breadth: .* 'breadth'"):
        cut(kind, breadth=2)
    with pytest.raises(ConfigError, match=r"defines no 'deals'. Did you mean 'deal'\?"):
        cut(kind.replace(":deal", ":deals"))


def test_a_run_deals_by_it_and_an_edited_file_is_refused(tmp_path):
    body = "return [[np.flatnonzero(given.train % 3 == c)] for c in (0, 1, 2)]"
    kind = written(tmp_path, body)
    tables = tiny_experiment(method="fedavg", net={"name": "mlp"}).to_dict()
    tables |= {"scenario": {"kind": kind}, "data": {"name": "digits", "max_per_class": 4}}
    given = experiment_of(tables)
    launch_in_process(given, tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_bytes())["metrics"]
    sent = without_places(given.to_dict())
    assert sent["scenario"]["kind"] == "mine.py:deal"
    assert received_experiment(sent, "server", ()).scenario == given.scenario.model_copy(
        update={"kind": "mine.py:deal"}  # a client runs no scenario, and needs no such file
    )
    Path(kind.rpartition(":")[0]).unlink()
    made = json.loads((tmp_path / "run/data/partition.json").read_bytes())["config"]
    assert differences(experiment_of(tables), made) == []  # the data are dealt out already
    elsewhere = experiment_of(tables | {"scenario": {"kind": "other.py:deal"}})
    assert differences(elsewhere, made)[0].startswith('scenario.kind = "other.py:deal" in the con')
    written(tmp_path, body.replace("(0, 1, 2)", "(1, 0, 2)"))
    assert differences(experiment_of(tables), made)[0].startswith("scenario.code_sha256 = ")
    with pytest.raises(ConfigError, match=r"mine\.py has changed since this run started"):
        experiment_of(given.to_dict())
    with pytest.raises(DataError, match=r"another partition \(scenario.code_sha256 was"):
        launch_in_process(experiment_of(tables), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("mine.py", "A custom one is named by its file: 'mine.py:Name'"),
        ("missing.py:deal", "cannot read missing.py"),
    ],
)
def test_a_name_without_a_file_or_function_is_refused(tmp_path, kind, line):
    tables = tiny_experiment(method="fedavg", net={"name": "mlp"}).to_dict()
    tables |= {"scenario": {"kind": kind}, "data": {"name": "digits"}}
    with pytest.raises(ConfigError) as told:
        launch_in_process(experiment_of(tables), tmp_path / "run")
    assert line in str(told.value)
