"""Flower clients in a fedtide run, and a fedtide method in rounds of Flower: the real package."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

import fedtide
from fedcli.data.store.commands import run_partition
from tests.conftest import tiny_experiment
from tests.fuzz.live import Live

pytest.importorskip("flwr", reason="needs Flower: pip install flwr")
pytestmark = pytest.mark.filterwarnings("ignore")  # Flower has its own
EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"


def module_of(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NET = EXAMPLES / "own-loop" / "net.py"


def trained(net, x, y):
    """Train as any script does; return the loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        loss = cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.fixture
def run():
    """A coordinator that waits for one client, with the net of the examples."""
    root = Path(tempfile.mkdtemp(prefix="live-"))  # a socket's path must be short
    e = tiny_experiment(
        net={"name": f"{NET}:Net"},
        schedule={"rounds": 2, "clients": 1},
        scenario={"kind": "iid", "tasks": 1},
    )
    run_partition(e.data, e.scenario, 1, e.seed, root / "data", Console(quiet=True))
    live = Live(e, root / "data", root)
    yield live
    live.close()
    shutil.rmtree(root)


def tasks_of(run):
    return fedtide.client(
        run.address, 0, run.data, state_dir=run.root / "own", give_up_after=20, code=[NET]
    )


def test_a_numpy_client_takes_part(run):
    from flwr.client import NumPyClient

    net, seen = module_of(NET).Net(), []

    class Client(NumPyClient):
        def __init__(self, data):
            self.x, self.y = data.tensors

        def fit(self, parameters, config):
            state = dict(zip(net.state_dict(), map(torch.as_tensor, parameters), strict=True))
            net.load_state_dict(state)
            seen.append(config["server_round"])
            loss = trained(net, self.x, self.y)
            return [t.numpy() for t in net.state_dict().values()], len(self.y), {"loss": loss}

    bridge = module_of(EXAMPLES / "flower" / "as_client.py")
    bridge.with_numpy_client(lambda task: Client(task.data), net, tasks_of(run))
    metrics = run.summary()["metrics"]
    assert seen == [1, 2]
    assert metrics["a_loc"] > 0.3
    assert 0 < metrics["loss"] < 2.3


def test_a_client_app_takes_part(run):
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app, net, seen = ClientApp(), module_of(NET).Net(), []

    @app.train()
    def train(message, context):
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = fedtide_data(run, context.node_config["task"])
        seen.append((message.content["config"]["server-round"], context.node_config["site"]))
        metrics = MetricRecord({"train_loss": trained(net, *data), "num-examples": len(data[1])})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    bridge = module_of(EXAMPLES / "flower" / "as_client.py")
    bridge.with_client_app(app, net, tasks_of(run), {"site": "north"})
    assert seen == [(1, "north"), (2, "north")]
    assert run.summary()["metrics"]["a_loc"] > 0.3


def fedtide_data(run, task):
    """Return a task's inputs and labels as an app would read them, from its own files."""
    from fedcli.data.store.client_data import ClientData
    from fedcli.data.store.stream import TaskStream

    stream = TaskStream(ClientData(run.data / "0"))
    stream.open(task)
    return stream.train(task)


def test_a_method_is_a_strategy(monkeypatch):
    """The median of three nodes' steps of 0, 1 and 90, in each of two rounds."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.grid import Grid
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):  # as a SuperLink sets them
        monkeypatch.setattr(TaskIdentity, name, 1)

    class InMemory(Grid):
        """Three nodes that answer at once: node n adds one number to all that it gets."""

        def get_node_ids(self):
            return [1, 2, 3]

        def send_and_receive(self, messages, *, timeout=None):
            return [self.answer(message) for message in messages]

        def answer(self, message):
            node = message.metadata.dst_node_id
            got = message.content["arrays"].to_torch_state_dict()
            by = {1: 0.0, 2: 1.0, 3: 90.0}[node]
            arrays = ArrayRecord({name: tensor + by for name, tensor in got.items()})
            metrics = MetricRecord({"num-examples": node, "train_loss": by})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

        set_run = run = create_message = push_messages = pull_messages = None

    median = EXAMPLES / "extend" / "median.py"
    config = {"net": {"name": f"{NET}:Net"}, "method": {"name": f"{median}:Median"}}
    half = fedtide.ServerHalf(config, (1, 8, 8), 10)
    strategy = module_of(EXAMPLES / "flower" / "as_strategy.py").ByMethod
    before = half.weights
    module_of(NET).Net().load_state_dict(before)  # the names of the module's own state dict
    result = strategy(half, fraction_evaluate=0.0).start(
        InMemory(), strategy.arrays_of(half), num_rounds=2
    )
    after = result.arrays.to_torch_state_dict()
    assert {name: round((after[name] - before[name]).mean().item(), 4) for name in before} == (
        dict.fromkeys(before, 2.0)
    )
    assert result.train_metrics_clientapp[2]["train_loss"] == pytest.approx(272 / 6)
