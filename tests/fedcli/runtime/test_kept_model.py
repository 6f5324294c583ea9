"""The model that ``a_loc`` scores is the one that a client keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedcli.data.store.client_data import ClientData
from fedcli.runtime.state import StateDirectory
from fedmodels.methods import make
from fedmodels.nets.trained import TrainedModel
from fedmodels.tensors.archive import PERSONAL
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.asked import local_view
from fedmodels.training.contexts import ServerState
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.round_parts import RoundParts
from fedtide.inprocess import run_in_process
from tests.fedmodels.methods.test_conformance import experiment_for


def last_rows(run: Path) -> dict[str, Any]:
    """Return what the record says of every client after the last interaction."""
    lines = (run / "rounds.jsonl").read_text().splitlines()
    rows: dict[str, Any] = json.loads(lines[-1])["clients"]
    return rows


def accuracy(model: TrainedModel, data: ClientData) -> float:
    """Return the accuracy on a client's own test data of all its tasks."""
    right = total = 0
    for task in range(data.num_tasks):
        x, y = data.arrays(task, "test")
        right += int((model.predict(x) == y).sum())
        total += len(y)
    return right / total


@pytest.mark.parametrize("name", ["fedavg", "fedper", "pfedgrp", "fedali"])
def test_the_stored_model_scores_as_the_record_says(name, digits, tmp_path):
    experiment = experiment_for((name, {}), schedule={"rounds": 1})
    run_in_process(experiment, digits, tmp_path / "run")
    view = local_view(make(name, **experiment.method.hyper_parameters()))
    scored = 0
    for client, row in last_rows(tmp_path / "run").items():
        views = row.get("views", {})
        found = TrainedModel.load(tmp_path / "run" / "clients" / client / PERSONAL)
        if view in views:  # else the client did not train in the last interaction
            assert found.facts.view == view
            data = ClientData(digits / client)
            assert accuracy(found, data) == pytest.approx(views[view]["accuracy"])
            scored += 1
    assert scored


def test_a_client_that_was_drawn_earlier_keeps_what_was_scored_then(digits, tmp_path):
    experiment = experiment_for(("fedavg", {}), schedule={"rounds": 3, "per_round": 1})
    run_in_process(experiment, digits, tmp_path / "run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    last = {client: r for r in map(json.loads, lines) for client in r["cohort"]}
    assert len({r["round"] for r in last.values()}) > 1, "all clients were drawn last together"
    for client, record in last.items():
        file = tmp_path / "run" / "clients" / str(client) / PERSONAL
        facts = TrainedModel.load(file).facts
        assert (facts.view, facts.round) == ("after_local", record["round"])


@pytest.mark.parametrize("name", ["fedavg", "fedper", "pfedgraph"])
def test_of_a_population_those_that_trained_store_a_model(name, digits, tmp_path, monkeypatch):
    """Those that did not count with their initial state, as if they had been asked."""
    experiment = experiment_for((name, {}), schedule={"rounds": 1, "per_round": 1})

    def run(place: str) -> tuple[str, set[str]]:
        found = run_in_process(experiment, digits, tmp_path / place)
        assert "clients_missing" not in found
        stored = {path.parent.name for path in (tmp_path / place).glob(f"clients/*/{PERSONAL}")}
        return found["state_sha256"], stored

    def everybody(parts: RoundParts, state: ServerState) -> dict[str, Any]:
        trained = parts.commits.last_trained
        parts.commits.last_trained = dict.fromkeys(parts.plan.profiles, -1) | trained
        return finish(parts, state)

    digest, stored = run("run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert stored == {str(c) for line in lines for c in json.loads(line)["cohort"]}
    assert len(stored) < 3
    finish = RoundParts.finish
    monkeypatch.setattr(RoundParts, "finish", everybody)
    assert run("all") == (digest, {"0", "1", "2"})


@pytest.mark.parametrize(("name", "files"), [("creff", 1), ("fedavg", 1), ("fedper", 3)])
def test_a_model_that_is_everybodys_is_one_file(name, files, digits, tmp_path):
    def forget_the_scored(order: rpc.Order) -> None:
        if order.kind == rpc.ORDER_KIND_FINISH:
            for kept in (tmp_path / "run" / "clients" / order.client_id).glob("scored-*"):
                kept.unlink()

    experiment = experiment_for((name, {}), schedule={"rounds": 1})
    run_in_process(experiment, digits, tmp_path / "run", before=forget_the_scored)
    models = list((tmp_path / "run").glob(f"clients/*/{PERSONAL}"))
    assert len(models) == 3
    assert len({path.stat().st_ino for path in models}) == files


def test_a_kept_model_that_is_damaged_leaves_the_one_after_the_downlink(digits, tmp_path, caplog):
    def damage(order: rpc.Order) -> None:
        if order.kind == rpc.ORDER_KIND_FINISH and order.client_id == "0":
            for kept in (tmp_path / "run" / "clients" / "0").glob("scored-*"):
                kept.write_bytes(b"cut")

    experiment = experiment_for(("fedavg", {}), schedule={"rounds": 1})
    run_in_process(experiment, digits, tmp_path / "run", before=damage)
    views = [
        TrainedModel.load(tmp_path / "run" / "clients" / client / PERSONAL).facts.view
        for client in ("0", "1")
    ]
    assert views == ["after_downlink", "after_local"]
    assert "the model after the downlink is stored instead" in caplog.text


def test_older_models_go_and_the_last_that_counts_stays(tmp_path):
    states = StateDirectory(tmp_path)
    for interaction, base in ((0, -1), (1, 0), (2, 0), (3, 2)):
        states.keep_scored(interaction, base, Bundle(), {"model": str(interaction)})
    assert [states.scored(k) is not None for k in range(-1, 5)] == [
        False, False, False, True, True, False,
    ]  # fmt: skip
