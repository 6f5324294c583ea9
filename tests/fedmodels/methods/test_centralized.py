import pytest
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.errors import DataError
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.loop import train_locally
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment


def centralized(data, **tables):
    return tiny_experiment(method={"name": "centralized", "data": data}, **tables)


@pytest.fixture(scope="module")
def one_task(tmp_path_factory):
    """A partition like ``digits``, of one task."""
    root = tmp_path_factory.mktemp("one-task") / "data"
    made = tiny_experiment(scenario={"tasks": 1})
    run_partition(made.data, made.scenario, 3, made.seed, root, Console(quiet=True))
    return root


def test_own_with_one_task_is_local(one_task, tmp_path):
    """Bit for bit: state, scores and bytes, which are none."""
    training = {"local_epochs": 2, "momentum": 0.5}
    tables = {"scenario": {"tasks": 1}, "training": training}
    own = run_in_process(centralized("own", **tables), one_task, tmp_path / "own")
    local = run_in_process(tiny_experiment(method="local", **tables), one_task, tmp_path / "local")
    assert own["state_sha256"] == local["state_sha256"]
    assert own["metrics"] == local["metrics"]
    assert own["bytes"]["down"] == own["bytes"]["up"] == 0


def test_own_history_grows(digits):
    """On task 1 a client trains on the data of task 0 and of task 1, in this order."""
    method = method_of(centralized("own"))
    first, second = (context_of(centralized("own"), digits, 1, task) for task in (0, 1))
    x0, y0 = first.stream.train(0)
    x1, y1 = second.stream.train(1)
    x, y = method.training_data(second, None)
    assert torch.equal(x, torch.cat([x0, x1]))
    assert torch.equal(y, torch.cat([y0, y1]))
    assert len(method.training_data(first, None)[1]) == len(y0)
    payload, state = payload_of(centralized("own"), second)
    assert train_locally(method, second, payload, state).num_examples == len(y0) + len(y1)


def test_others_see_no_history(digits):
    for experiment in (tiny_experiment(), tiny_experiment(method="local")):
        ctx = context_of(experiment, digits, 0, 1)
        with pytest.raises(DataError, match="out of reach"):
            ctx.stream.train_up_to(1)


def test_own_differs_from_local_with_two_tasks(digits, tmp_path):
    own = run_in_process(centralized("own"), digits, tmp_path / "own")
    local = run_in_process(tiny_experiment(method="local"), digits, tmp_path / "local")
    assert own["state_sha256"] != local["state_sha256"]


def test_pooled_trains_on_one_client_alone(digits, tmp_path):
    experiment = centralized("pooled")
    ctx = context_of(experiment, digits)
    method = method_of(experiment)
    assert method.views == ("global",)
    summary = run_in_process(experiment, digits, tmp_path / "out")
    size = Bundle(weights=ctx.run.initial_weights).num_bytes()
    assert summary["bytes"]["down"] == 2 * 2 * size, "two rounds, two tasks, one client"
    assert "a_glo" in summary["metrics"]
    assert "a_loc" not in summary["metrics"]


def test_pooled_is_fedavg_of_one_client(digits):
    """For one round of plain SGD; the upload is the same to the bit."""
    uploads = []
    for experiment in (centralized("pooled"), tiny_experiment(schedule={"clients": 1})):
        ctx = context_of(experiment, digits)
        result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        uploads.append(result.upload.by_key())
    assert uploads[0].keys() == uploads[1].keys()
    assert all(torch.equal(uploads[0][k], uploads[1][k]) for k in uploads[0])
