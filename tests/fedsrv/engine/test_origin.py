"""Data that were dealt out otherwise than the config says are refused, and a line says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedcli.data.store.client_data import ClientData
from fedcli.runtime.answers import raise_if_final
from fedmodels.errors import ConfigError, DataError, PayloadError
from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.bundle import EVALUATOR
from fedsrv.engine.admission import MAX_TASKS, Admission, OtherPartition
from fedsrv.engine.summary import summarise
from fedsrv.launch.given_data import check_given_data, name_of
from fedsrv.parts.server_data import server_data_for
from fedsrv.transport.service import _CODES
from fedtide.inprocess import run_in_process
from tests.conftest import TABLES, tiny_experiment

OWN = {name: table for name, table in TABLES.items() if name not in ("data", "scenario")}
OTHERS = [
    ({"seed": 1}, "seed = 1 in the config, 0 there"),
    ({"data": {"name": "mnist"}}, 'data.name = "mnist" in the config, "digits" there'),
    ({"data": {"max_per_class": 30}}, "data.max_per_class = 30 in the config, 20 there"),
    ({"scenario": {"shards": 4}}, "scenario.shards = 4 in the config, 5 there"),
    ({"scenario": {"tasks": 1}}, "scenario.tasks = 1 in the config, 2 there"),
    ({"scenario": {"gamma": 0.1}}, "scenario.gamma = 0.1 in the config, 1.0 there"),
    ({"scenario": {"kind": "iid"}}, 'scenario.kind = "iid" in the config, "per_class_shards"'),
    ({"schedule": {"clients": 2}}, "schedule.clients = 2 in the config, 3 there"),
    ({"method": "centralized"}, "centralized trains only on client 0's"),
]


@pytest.mark.parametrize(("changes", "line"), OTHERS, ids=lambda value: str(value)[:40])
def test_another_partition_is_refused_at_the_start_and_at_the_door(changes, line, digits):
    experiment = tiny_experiment(**changes)
    with pytest.raises(ConfigError, match=line.replace("(", r"\(")) as refused:
        check_given_data(experiment, digits)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    admission = Admission.of(experiment, {})
    with pytest.raises(OtherPartition, match=line):
        admission.check(1, ClientData(digits / "1").announcement())


def test_the_same_partition_is_welcome(digits):
    experiment = tiny_experiment(
        data={"root": "elsewhere", "input_shape": [1, 8, 8], "num_classes": 10},
        schedule={"rounds": 9},
        method="gldp",
    )
    check_given_data(experiment, digits)
    Admission.of(experiment, {}).check(1, ClientData(digits / "1").announcement())


def test_the_evaluator_is_asked_too(digits):
    text = (digits / "global-test" / "problem.json").read_text()
    Admission.of(tiny_experiment(), {}).check(EVALUATOR, text)
    with pytest.raises(OtherPartition, match="the data of client evaluator is of another"):
        Admission.of(tiny_experiment(seed=1), {}).check(EVALUATOR, text)


def test_a_refused_client_ends_as_a_wrong_config_does():
    class Answer(Exception):
        def code(self):
            return next(code for kind, code in _CODES.items() if issubclass(OtherPartition, kind))

        def details(self):
            return "seed = 1 in the config, 0 there"

        def trailing_metadata(self):
            return ()

    with pytest.raises(ConfigError, match="client 1: seed = 1") as refused:
        raise_if_final("client 1", Answer())
    assert refused.value.exit_code == 2


def test_what_a_stranger_says_of_its_partition_is_bounded(digits):
    facts = json.loads(ClientData(digits / "1").announcement())
    long = {**facts["partition"], "seed": "x" * 10_000}
    with pytest.raises(OtherPartition) as refused:
        Admission.of(tiny_experiment(), {}).check(1, json.dumps({**facts, "partition": long}))
    assert len(str(refused.value)) < 400
    for wrong in ([], "x", 3):
        with pytest.raises(PayloadError, match=r"client\.json is malformed"):
            Admission.of(tiny_experiment(), {}).check(1, json.dumps({**facts, "partition": wrong}))


def test_pooled_training_refuses_clients_with_examples_of_their_own(digits):
    """Hand-made directories, of which nobody knows how they were dealt out."""
    facts = json.loads(ClientData(digits / "1").announcement()) | {"partition": None}
    admission = Admission.of(tiny_experiment(method="centralized"), {})
    admission.check(0, json.dumps(facts))
    with pytest.raises(OtherPartition, match="client 1 has its own training examples"):
        admission.check(1, json.dumps(facts))


def test_the_servers_examples_are_of_the_same_partition(tmp_path, digits):
    place = shutil.copytree(digits / "server", tmp_path / "server")
    facts = json.loads((digits / "0" / "client.json").read_text())
    facts.pop("tasks")
    (place / "problem.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"server is of another partition.*seed = 5"):
        server_data_for(tiny_experiment(method="fedic", seed=5), place)


def test_more_clients_than_directories(tmp_path, digits):
    experiment = tiny_experiment(schedule={"clients": 5})
    own = _hand_made(digits, tmp_path)
    with pytest.raises(ConfigError, match=r"no data of client 3, 4.*clients = 5: at most 3"):
        check_given_data(experiment, own)
    with pytest.raises(DataError, match="holds no client directory 0"):
        check_given_data(experiment, tmp_path / "nowhere")


def _hand_made(digits: Path, tmp_path: Path) -> Path:
    """Return directories that nobody dealt out."""
    root = tmp_path / "own"
    for client in range(3):
        shutil.copytree(digits / str(client), root / str(client))
        file = root / str(client) / "client.json"
        facts = json.loads(file.read_text()) | {"dataset": "wards"}
        del facts["partition"]
        file.write_text(json.dumps(facts))
    return root


def test_own_directories_need_no_data_and_no_scenario(tmp_path, digits):
    root, experiment = _hand_made(digits, tmp_path), experiment_of(OWN)
    assert experiment_of(experiment.to_dict()) == experiment
    check_given_data(experiment, root)
    check_given_data(experiment, digits)  # it says nothing that could differ
    assert name_of(experiment, root) == "wards"
    summary = run_in_process(experiment, root, tmp_path / "run")
    assert summary["data"] == "wards"
    with pytest.raises(ConfigError, match=r"the config has no \[data\]"):
        check_given_data(experiment, None)
    many = json.loads(ClientData(root / "1").announcement())
    many["tasks"] *= MAX_TASKS
    with pytest.raises(PayloadError, match="announces 20000 tasks"):
        Admission.of(experiment, {}).check(1, json.dumps(many))


def test_the_title_says_what_was_trained_on():
    """Not what the config calls it."""
    named = ["wards", "labs", "wards"]
    found = summarise([], tiny_experiment(), "after_local", "digest", lambda: [1], named)
    assert found["data"] == "wards and labs"


def test_a_client_announces_no_place(tmp_path, digits):
    """Descriptions of earlier versions did, and their runs go on."""
    shutil.copytree(digits / "1", tmp_path / "1")
    file = tmp_path / "1" / "client.json"
    facts = json.loads(file.read_text())
    facts["partition"]["data"]["name"] = "/srv/ann/wards/my_data.py:load"
    file.write_text(json.dumps(facts))
    told = ClientData(tmp_path / "1").announcement()
    before = json.loads(told)
    assert before["partition"]["data"]["name"] == "my_data.py:load"
    before["partition"] = facts["partition"]
    admission = Admission({1: json.dumps(before)})
    admission.check(1, told)
    facts = json.loads(told)
    facts["tasks"].pop()
    with pytest.raises(PayloadError, match="described other data when it first joined"):
        admission.check(1, json.dumps(facts))
