"""Runs on a GPU: every method and net, every layout, a crash, and memory.

``make test-gpu`` runs them on ``cuda:0``. ``FEDTIDE_GPU_TESTS_ON=cpu`` runs the same code on the
processor, where it shows that the tests themselves are in order.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedmodels.facts.resolution import experiment_of
from fedmodels.host.devices import device_of
from fedmodels.methods import make
from fedmodels.nets import make_net, net_names
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Problem, state_digest
from fedmodels.training.contexts import START, ClientContext
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import digits_in
from tests.conftest import OneTask, records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import CASES, experiment_for
from tests.integration.conftest import tables
from tests.integration.harness import environment, reached, summary_of, write_config
from tests.runs import assert_same

DEVICE = os.environ.get("FEDTIDE_GPU_TESTS_ON", "cuda:0")
ON_GPU = DEVICE.startswith("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ON_GPU and not torch.cuda.is_available(),
        reason="needs CUDA; FEDTIDE_GPU_TESTS_ON=cpu runs them on the processor",
    ),
]

SERVER_PARTS: list[tuple[str, dict[str, Any]]] = [
    ("pfedgrp", {"w_device": "auto"}),
    ("fedcil", {"device": "auto"}),
    ("mfcl", {"server_device": "auto"}),
    ("target", {"server_device": "auto"}),
    ("fedali", {"kmeans_solver": "torch"}),
]
"""Methods whose server half uses a GPU as well, where that is asked for."""
ALL = [*CASES, *SERVER_PARTS]
IDS = ["-".join([name, *map(str, switches.values())]) for name, switches in ALL]
IMAGES, WIDE = (1, 28, 28), (3, 32, 32)
NETS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "acgan": (WIDE, {}),
    "cnn5": (IMAGES, {}),
    "digits-cnn": (IMAGES, {"norm": "batch"}),
    "hart": ((128, 6), {"alp": True, "prototypes": [16] * 6}),
    "mlp": (IMAGES, {}),
    "resnet18": (WIDE, {}),
    "resnet18-imagenet": ((3, 64, 64), {}),
    "resnet20": (IMAGES, {}),
    "resnet20-b": (IMAGES, {}),
    "timm": (WIDE, {"model": "resnet10t", "adapters": 2}),
    "torchvision": (WIDE, {"model": "mobilenet_v3_small", "adapters": 2}),
    "vit-tiny": (WIDE, {"alp": True, "blocks": 2, "prototypes": [16, 8]}),
}
"""Inputs and options of each net."""


@pytest.fixture
def used() -> Iterator[None]:
    """Check that a test allocates memory of the GPU, where it runs on one."""
    if not ON_GPU:
        yield
        return
    before = taken_so_far()
    yield
    assert taken_so_far() > before, "nothing was done on the GPU"


def taken_so_far() -> int:
    """Return the bytes that this process ever took of the GPU; before its first use there are none.

    A graph's replay moves no peak, but what it is given does.
    """
    found: int = torch.cuda.memory_stats().get("allocated_bytes.all.allocated", 0)
    return found


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_every_method_twice_is_the_same_run(case, digits, tmp_path, used):
    experiment = experiment_for(case, schedule={"rounds": 1})
    if experiment.method.pools_data:
        digits = digits_in(tmp_path / "pooled", gather=True)
    one, other = (
        run_in_process(experiment, digits, tmp_path / name, device=DEVICE) for name in "ab"
    )
    assert_same(one, other)
    losses = [record["metrics"].get("loss", 0.0) for record in records_of(tmp_path / "a")]
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", net_names())
def test_every_net_twice_takes_the_same_steps(name, used):
    if name == "timm":
        pytest.importorskip("timm", reason="needs timm: pip install 'fedtide[timm]'")
    shape, options = NETS[name]
    method = "fedali" if "alp" in options else "fedavg"
    experiment = tiny_experiment(
        method=method,
        net={"name": name, **options},
        training={"local_epochs": 1, "batch_size": 4, "lr": 0.01},
    )
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, *shape, generator=draw), torch.arange(8) % 4

    def taken() -> dict[str, torch.Tensor]:
        device = device_of(DEVICE)
        run = RunFacts(experiment, Problem(shape, 4))
        stream = OneTask(x.numpy(), y.numpy())
        stream.x, stream.y = x.to(device), y.to(device)
        ctx = ClientContext(run, 0, START, run.make_net().to(device).pack(), stream, device)
        made = make(method)
        before = made.init_server(run).common
        after = train_locally(made, ctx, before, Bundle()).upload.weights
        assert any(not torch.equal(after[key], t) for key, t in before.weights.items())
        return dict(after)

    one, other = taken(), taken()
    assert all(
        torch.isfinite(tensor).all() for tensor in one.values() if tensor.is_floating_point()
    )
    assert state_digest([("weights", Bundle(one))]) == state_digest([("weights", Bundle(other))])


def test_weights_come_and_go_through_pinned_blocks(used):
    """A payload that has arrived, a net that takes it, and the upload behind that."""
    device = device_of(DEVICE)
    nets = [make_net("resnet20", num_classes=4, input_shape=IMAGES) for _ in "ab"]
    one, other = (net.to(device).pack() for net in nets)
    sent = weights_of(one)
    load_weights(other, sent)
    back = weights_of(other)
    live = other.tensors()
    for key, tensor in one.tensors().items():
        assert live[key].device == tensor.device == device
        assert torch.equal(live[key], tensor)
        assert torch.equal(sent[key], tensor.cpu())
        assert torch.equal(back[key], tensor.cpu())
    assert sent.block.is_pinned() == back.block.is_pinned() == ON_GPU


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.loopback
@pytest.mark.parametrize("method", ["fedavg", "gldp", "pfedgrp"])
def test_every_layout_is_the_same_run(method, loopback, digits):
    """In one process, as a process for each client, and as two that share the three clients."""
    experiment = experiment_for((method, {}), schedule={"rounds": 1})
    for name, hosts in (("apart", ("0", "1", "2")), ("shared", ("0-2:2", "1"))):
        run = loopback(experiment, name, partition=digits)
        run.device = DEVICE
        assert_same(run.run(*hosts), run.alone)


@pytest.mark.loopback
def test_a_launch_is_the_same_run(tmp_path):
    """The launcher finds the GPUs by itself, and its forks can use them."""
    experiment, out = experiment_of(tables("fedavg")), tmp_path / "run"
    config = write_config(tmp_path / "config.toml", experiment)
    device = "auto" if ON_GPU else DEVICE
    command = ["-m", "fedsrv", "launch", str(config), "--out", str(out), "--device", device]
    ended = subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    evaluator = (out / "data" / "global-test").is_dir()
    alone = run_in_process(
        experiment, out / "data", tmp_path / "alone", device=DEVICE, evaluator=evaluator
    )
    assert_same(summary_of(out), alone)


# --- crashes and memory ---------------------------------------------------------------------------


@pytest.mark.loopback
def test_a_run_whose_processes_are_killed_ends_in_the_same_bits(loopback, steer):
    """A host dies in training, then the coordinator dies in its aggregation."""
    for point in ("train-1-2", "aggregate-3"):
        (steer / point).touch()
    run = loopback(tables("held", schedule={"rounds": 2, "clients": 3}))
    run.device = DEVICE
    server, hosts = run.serve(), {ids: run.join(ids) for ids in ("0-1", "2")}
    reached(steer / "train-1-2.reached")
    hosts["0-1"].kill()
    hosts["0-1"] = run.join("0-1")
    reached(steer / "aggregate-3.reached")
    server.kill()
    run.finish_as_alone(run.serve(), *hosts.values())


@pytest.mark.parametrize("method", ["fedavg", "fedali", "gldp", "pfedgrp"])
def test_memory_stays_flat(method, digits, tmp_path):
    """What is held before client 0 trains is the same in the third round of a task and its last."""
    held: dict[int, int] = {}

    def before(order: Any) -> None:
        if order.kind == rpc.ORDER_KIND_TRAIN and order.client_id == "0" and ON_GPU:
            torch.cuda.synchronize()
            held[order.interaction] = torch.cuda.memory_allocated()

    experiment = experiment_for((method, {}), schedule={"rounds": 6})
    run_in_process(experiment, digits, tmp_path / "run", device=DEVICE, before=before)
    if not ON_GPU:
        pytest.skip("the run went well; tensors of the processor are not counted")
    assert held[5] <= 1.02 * held[2], held
    assert held[11] <= 1.02 * held[8], held
