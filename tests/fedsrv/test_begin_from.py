"""A run that begins with the models of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.tensors.archive import load_named, save_named
from fedmodels.tensors.bundle import Bundle, Problem, state_digest
from fedmodels.training.initial_weights import pin_weights
from fedmodels.training.run import RunFacts
from fedsrv.trained.begin_from import begun
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies
from tests.runs import killed


@pytest.fixture(scope="module")
def before(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that has ended."""
    run = tmp_path_factory.mktemp("runs") / "before"
    run_in_process(tiny_experiment(), digits, run, facts=True)
    return run


def beginning(before: Path, out: Path, **tables: Any) -> Experiment:
    """Return an experiment of another method that begins from a run."""
    net = {**tiny_experiment().net.options(), "name": "mlp", "begin_from": str(before)}
    return pin_weights(begun(tiny_experiment(net=net, method="fedprox", **tables), out))


def test_a_run_begins_with_the_weights_of_another_one_and_says_so(digits, before, tmp_path):
    """A resume keeps them, also where the other run has gone on or is elsewhere."""
    out = tmp_path / "new"
    experiment = beginning(before, out)
    weights = RunFacts(experiment, Problem((1, 8, 8), 10)).initial_weights
    last = before / "server" / "state-00000003.safetensors"
    model = load_named(last)[0]["common"].weights
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[key], tensor) for key, tensor in model.items())
    killed(experiment, digits, out, before=Dies(5), facts=True)
    shutil.copy(last, last.with_name("state-00000009.safetensors"))  # it went on
    again = beginning(before, out)
    assert again == experiment
    with pytest.raises(ConfigError, match=r"other'?, but .*new started with .*: a run keeps its"):
        beginning(tmp_path / "other", out)
    run_in_process(again, digits, out, resume=True)
    record = records_of(out)[0]
    assert record["began_from"]["sha256"] == state_digest([("", Bundle(weights))])
    assert record["began_from"]["interaction"] == 3
    assert all("began_from" not in r for r in records_of(out)[1:])


@pytest.mark.needs("operations")
def test_weights_are_found_where_the_earlier_run_has_moved_and_in_its_backup(
    digits, before, tmp_path
):
    """The digest says that they are the same ones."""
    old, moved, out = tmp_path / "old", tmp_path / "moved", tmp_path / "new"
    shutil.copytree(before, old)
    killed(beginning(old, out), digits, out, before=Dies(1), facts=True)
    from fedplugins.operations.backup import backup

    backup(old, moved)
    shutil.rmtree(old)
    summary = run_in_process(beginning(moved, out), digits, out, resume=True)
    assert summary["rounds"]


def test_a_model_that_was_replaced_or_never_committed_is_refused(before, tmp_path):
    run = Path(shutil.copytree(before, tmp_path / "before"))
    last = run / "server" / "state-00000003.safetensors"
    later = Path(shutil.copy(last, last.with_name("state-00000004.safetensors")))
    weights_of = beginning(run, tmp_path / "a").net.weights
    assert Path(str(weights_of)).name == "begin-00000003.safetensors"
    later.replace(last.with_name("state-00000003.safetensors"))
    bundles, header = load_named(last)
    weights = {key: -tensor for key, tensor in bundles["common"].weights.items()}
    save_named(last, {**bundles, "common": Bundle(weights=weights)}, header)
    with pytest.raises(ConfigError, match=r"begin_from: .* is not the state that the run wrote"):
        beginning(run, tmp_path / "b")


def test_what_does_not_fit_is_refused_in_a_line(digits, before, tmp_path):
    with pytest.raises(ConfigError, match=r"begin_from: .*nowhere holds no committed state"):
        beginning(tmp_path / "nowhere", tmp_path / "new")
    other = beginning(before, tmp_path / "new")
    wide = other.model_copy(update={"net": other.net.model_copy(update={"hidden": [9]})})
    with pytest.raises(ConfigError, match=r"tensor 'base/.*' of .* is .*; the net has"):
        run_in_process(wide, digits, tmp_path / "wide")
    said = json.loads((before / "data.json").read_text())
    (before / "data.json").write_text(json.dumps({**said, "classes": said["classes"][::-1]}))
    turned = beginning(before, tmp_path / "turned")
    with pytest.raises(ConfigError, match=r"list \[data\] classes in that order"):
        run_in_process(turned, digits, tmp_path / "turned")


def test_new_classes_get_rows_behind_those_that_were_there(before, tmp_path):
    experiment = beginning(before, tmp_path / "new")
    ten, twelve = (RunFacts(experiment, Problem((1, 8, 8), n)).initial_weights for n in (10, 12))
    fresh = RunFacts(tiny_experiment(method="fedprox"), Problem((1, 8, 8), 12)).initial_weights
    for key in (key for key in ten if key.startswith("head/")):
        assert torch.equal(twelve[key][:10], ten[key])
        assert torch.equal(twelve[key][10:], fresh[key][10:])
