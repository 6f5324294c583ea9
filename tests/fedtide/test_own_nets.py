"""Runs in which clients have nets of their own: killed, lied to, resumed, and their models."""

import pytest
import torch

import fedtide
from fedmodels.errors import ClientFailed, ConfigError
from fedmodels.tensors.bundle import Prototypes
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage
from tests.runs import dies, ends_as, killed

NET = {
    "name": "mlp",
    "hidden": [64],
    "by_client": [{"name": "digits-cnn"}, {"name": "mlp", "hidden": [8, 64], "clients": [2]}],
}


@pytest.mark.parametrize("method", ["fedproto", {"name": "fedtgp", "server_epochs": 4}])
def test_a_killed_run_goes_on_to_the_same_bits(method, digits, tmp_path):
    experiment = tiny_experiment(method=method, net=NET)
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    killed(experiment, digits, tmp_path / "run", before=dies(interaction=2))
    ends_as(whole, experiment, digits, tmp_path / "run")
    assert "macs_per_example" not in whole["compute"]
    assert "figures_missing" not in whole


def test_each_client_ends_with_a_model_of_its_net(digits, tmp_path):
    out = tmp_path / "run"
    run_in_process(tiny_experiment(method="lg-fedavg", net=NET), digits, out)
    found = [fedtide.TrainedModel.load(out / "clients" / c / "personal.safetensors") for c in "012"]
    assert [one.facts.net for one in found] == ["mlp", "digits-cnn", "mlp"]
    assert [one.facts.options.get("hidden") for one in found] == [[64], None, [8, 64]]
    images = torch.zeros(3, 1, 8, 8)
    assert all(len(one.predict(images)) == 3 for one in found)
    heads = [one.net.tensors()["head/weight"] for one in found]
    assert heads[0].shape == heads[1].shape == heads[2].shape


def test_the_state_of_a_client_that_never_trained_is_that_of_its_net(digits, tmp_path):
    """One of three clients trains in each of two interactions; the net of another one differs."""
    schedule = {"rounds": 1, "per_round": 1}
    plain = {"name": "mlp", "hidden": [16]}
    run_in_process(
        tiny_experiment(method="local", net=plain, schedule=schedule), digits, tmp_path / "plain"
    )
    idle = min({0, 1, 2} - {c for r in records_of(tmp_path / "plain") for c in r["cohort"]})
    digests = set()
    for width in (4, 8):
        other = {"name": "mlp", "hidden": [width, 16], "clients": [idle]}
        net = {**plain, "by_client": [other]}
        experiment = tiny_experiment(method="local", net=net, schedule=schedule)
        found = run_in_process(experiment, digits, tmp_path / str(width))
        digests.add(found["state_sha256"])
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["gldp", "fedmlp"])
def test_a_robust_rule_takes_prototypes_that_travel_alone(name, digits, tmp_path):
    method = {"name": name, "share": "prototypes", **({"t": 1, "s": 1} if name == "gldp" else {})}
    experiment = tiny_experiment(
        method=method, net=NET, schedule={"rounds": 1}, server={"reduce": "median"}
    )
    assert run_in_process(experiment, digits, tmp_path)["state_sha256"]


def mixing():
    """Return an experiment that hides examples, where a client has a net that mixes them."""
    privacy = {
        "level": "example", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 0.5,
        "allow": ["announced", "examples", "loss", "scores"],
    }  # fmt: skip
    net = {**NET, "by_client": [{"name": "digits-cnn", "norm": "batch"}]}
    fixed = {"mean": [0.3], "std": [0.3]}
    return tiny_experiment(method="lg-fedavg", net=net, privacy=privacy, data=fixed)


def test_no_net_may_mix_examples_that_are_hidden(digits, tmp_path):
    with pytest.raises(ConfigError, match="batch normalisation mixes the examples"):
        run_in_process(mixing(), digits, tmp_path / "run")


def test_a_client_hides_its_examples_from_a_coordinator_that_looks_at_no_net(
    digits, tmp_path, monkeypatch
):
    place = "fedsrv.parts.example_privacy.check_hides_examples"
    monkeypatch.setattr(place, lambda method, run: None)
    with pytest.raises(ClientFailed, match=r"client 1 .* cannot be taken example by example"):
        run_in_process(mixing(), digits, tmp_path / "run")


def test_work_is_counted_by_net(digits, tmp_path):
    """By hand: 64 * 16 + 16 * 10 multiply-adds of one net, 64 * 8 + 8 * 16 + 16 * 10 of two."""
    net = {"name": "mlp", "hidden": [16], "by_client": [{"name": "mlp", "hidden": [8, 16]}]}
    found = run_in_process(tiny_experiment(method="fedproto", net=net), digits, tmp_path / "run")
    rows = [row for record in records_of(tmp_path / "run") for row in record["clients"].items()]
    macs = {"0": 1184, "1": 800, "2": 1184}
    expected = sum(3 * macs[client] * row["num_examples"] for client, row in rows)
    assert found["compute"]["training_macs"] == expected


def test_work_is_counted_beside_an_evaluator(digits, tmp_path):
    found = run_in_process(tiny_experiment(), digits, tmp_path / "run", evaluator=True)
    rows = [row for record in records_of(tmp_path / "run") for row in record["clients"].items()]
    expected = sum(3 * 1184 * row["num_examples"] for client, row in rows if client != "evaluator")
    assert "evaluator" in dict(rows)
    assert found["compute"]["training_macs"] == expected


def wide(client, order, answer):
    upload, report, failure = answer
    if order.kind == rpc.ORDER_KIND_TRAIN:
        upload.prototypes["class"] = Prototypes.of({3: (torch.ones(12), 2)}, 12)
    return upload, report, failure


def test_a_client_of_another_width_is_left_out_and_the_run_goes_on(digits, tmp_path):
    server = {"min_clients": 2, "deadline_s": 0.3}
    experiment = tiny_experiment(method="fedproto", net=NET, server=server)
    stage = Stage(experiment, digits, tmp_path / "run", wide, liars=(2,))
    assert stage.run()["state_sha256"]
    assert all(r["cohort"] == [0, 1] for r in records_of(tmp_path / "run"))
    assert any("prototypes/class/vectors" in refused.line for refused in stage.refused)


@pytest.mark.parametrize("more", [{}, {"open": True, "order": "tasks_outer"}])
def test_nets_of_two_widths_are_refused_before_a_run_begins(more, digits, tmp_path):
    net = {"name": "mlp", "by_client": [{"name": "mlp", "hidden": [12]}]}
    schedule = {"rounds": 1, "clients": 3, **more}
    experiment = tiny_experiment(method="fedproto", net=net, schedule=schedule)
    with pytest.raises(ConfigError, match="one width"):
        run_in_process(experiment, digits, tmp_path / "run")
