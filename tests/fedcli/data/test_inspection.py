"""``fedcli check`` on what fedtide wrote itself: scenarios that share examples, pooled data."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.data.store.findings import SHARING, inspect
from fedcli.data.store.partition_writer import Layout
from fedmodels.config.scenario import Drawn, ReplayTable
from fedmodels.console.rows import Checked
from fedmodels.facts.resolution import experiment_of

QUIET = Console(quiet=True)
SHARED = [
    {"kind": "drawn", "examples": 250, "test_examples": 20},
    {"kind": "replay_gradual", "parts": 4, "images_per_part": 20},
    {"kind": "replay_circulating", "parts": 4, "images_per_part": 20},
    {"kind": "replay_heterogeneous"},
]


def check(root: Path) -> tuple[bool, str]:
    text = io.StringIO()
    return inspect(root, Console(file=text, width=200)), text.getvalue()


def written(root: Path, scenario: dict[str, object], layout: Layout, *, gather: bool) -> Path:
    tables = {"data": {"name": "digits"}, "scenario": scenario, "schedule": {"clients": 8}}
    e = experiment_of({**tables, "net": {"name": "mlp"}, "method": {"name": "fedavg"}})
    given = (e.data, e.scenario, e.schedule.clients, e.seed, root, QUIET)
    run_partition(*given, gather=gather, layout=layout)
    return root


@pytest.mark.parametrize("scenario", SHARED, ids=lambda table: table["kind"])
def test_clients_that_share_examples_by_their_scenario_are_well(tmp_path, scenario):
    well, text = check(written(tmp_path / "data", scenario, Layout.DIRECTORIES, gather=False))
    assert well, text
    assert "nothing wrong with 8" in text


def test_what_clients_hold_is_printed_as_json(tmp_path, capsys):
    root = written(tmp_path / "data", SHARED[0], Layout.DIRECTORIES, gather=False)
    (root / "3" / "client.json").write_text("{}", "utf-8")
    assert not inspect(root, QUIET, as_json=True)
    out = capsys.readouterr().out
    found = json.loads(out)
    Checked.model_validate_json(out, strict=True)
    assert [one["client"] for one in found["clients"]] == list("0124567")
    first, shape = found["clients"][0], found["clients"][0]["input_shape"]
    assert first["train"] > first["classes"] >= first["classes_trained"] > 0
    assert all(isinstance(size, int) for size in shape)
    assert first["lowest"] < first["highest"]
    assert len(found["wrong"]) == 1
    assert found["wrong"][0].startswith("client 3: ")


def test_the_kinds_that_share_are_known():
    kinds = [one.model_fields["kind"].annotation for one in (Drawn, *ReplayTable.__subclasses__())]
    assert {kind.__args__[0] for kind in kinds} == set(SHARING) == {s["kind"] for s in SHARED}


def test_clients_may_share_examples_by_a_function_of_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def deal(given):\n    return [[range(100)] for _ in given.tasks]\n")
    root = written(tmp_path / "data", {"kind": f"{file}:deal"}, Layout.DIRECTORIES, gather=False)
    well, text = check(root)
    assert well, text


def test_clients_of_other_scenarios_share_nothing(tmp_path):
    root = written(tmp_path / "data", {"kind": "iid"}, Layout.DIRECTORIES, gather=False)
    np.save(root / "1/task-0/train_x.npy", np.load(root / "0/task-0/train_x.npy"))
    well, text = check(root)
    assert not well
    assert "of its training examples are also at client 0" in text


@pytest.mark.parametrize(
    ("layout", "scenario"),
    [(Layout.DIRECTORIES, {"kind": "iid", "tasks": 2}), (Layout.STORE, SHARED[0])],
)
def test_a_pooled_partition_is_well(tmp_path, layout, scenario):
    well, text = check(written(tmp_path / "data", scenario, layout, gather=True))
    assert well, text
    assert "note: all training examples are at client 0" in text


def test_a_pooled_partition_without_its_examples_is_wrong(tmp_path):
    root = written(tmp_path / "data", {"kind": "iid"}, Layout.DIRECTORIES, gather=True)
    for name in ("train_x.npy", "train_y.npy"):
        path = root / "0" / "task-0" / name
        np.save(path, np.load(path)[:0])
    facts = json.loads((root / "0/client.json").read_text())
    facts["tasks"][0]["train"] = [0] * 10
    (root / "0/client.json").write_text(json.dumps(facts))
    well, text = check(root)
    assert not well
    assert "wrong: client 0: there is no example to train on" in text
    assert "client 1:" not in text


def test_a_client_with_one_example_holds_data(tmp_path):
    root = written(tmp_path / "data", {"kind": "drawn", "examples": 1, "test_examples": 0},
                   Layout.DIRECTORIES, gather=False)  # fmt: skip
    well, text = check(root)
    assert well, text
    assert "all inputs are the same" not in text


def test_a_global_test_set_of_another_problem_is_wrong(tmp_path):
    root = written(tmp_path / "data", {"kind": "iid"}, Layout.DIRECTORIES, gather=False)
    place = root / "global-test"
    facts = json.loads((place / "problem.json").read_text())
    facts |= {"input_shape": [1, 2, 2]}
    (place / "problem.json").write_text(json.dumps(facts))
    np.save(place / "x.npy", np.load(place / "x.npy")[:, :, :2, :2])
    well, text = check(root)
    assert not well
    assert f"wrong: {place} is of another problem" in text
