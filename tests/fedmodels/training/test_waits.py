"""On a GPU nothing waits for it within a step, and every tensor lies where it is used.

The card of these tests is a fake (``tests/fake_card.py``). A run of few steps waits as often as one
of many steps: what waits once a training or once a test set is allowed, what waits at each step is
not. Bits are those of the processor, as its kernels calculate for the fake.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream
from fedmodels.host.devices import to_device
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets import make_net
from fedmodels.nets.split import weights_of
from fedmodels.numerics.secrecy import Secret
from fedmodels.techniques import aggregation_weights
from fedmodels.techniques.generator_training import Lesson
from fedmodels.techniques.generators import Family
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext, Position
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.scoring import score
from fedpb.codec import merged
from fedtide.testing.case import bytes_of, states_of
from tests.conftest import method_of, server_context
from tests.fake_card import CARD, card
from tests.fedmodels.methods.test_conformance import CASES, experiment_for

FEW, MANY = 64, 17
"""Batch sizes with one step and with two steps of an epoch."""
OTHERS = ("gldp", "pfedgrp")
"""Methods with a variant that trains in another way."""
EACH = [case for case in CASES if not case[1] or case[0] in OTHERS]
FAST = {"generator_epochs": 1, "n_check": 8, "generator_width": 2}
SHORT = {"gldp": {"t": 1, "s": 1}, "pfedgrp": FAST, "fedavg-replay": FAST, "pfedgraph-replay": FAST}
"""Hyper-parameters that make a training short beside those of the conformance suite."""
SEEN = torch.arange(10) < 7
CPU = torch.device("cpu")


def context_on(device, experiment, root, client, task):
    """Return the context in which a client trains on a task."""
    data = ClientData(root / str(client))
    run = RunFacts(experiment, data.problem)
    keeps = method_of(experiment).trains_on == "history"
    stream = TaskStream(data, device, keep_history=keeps)
    stream.open(task)
    net = run.make_net().to(device).pack()
    at = Position(task, 0, task)
    return ClientContext(run, client, at, net, stream, device, secret=lambda: Secret(bytes(32)))


def two_tasks(device, experiment, root, clients=(0,)):
    """Train and score clients on two tasks; return the bytes of all states and all counts."""
    method, state, own, found = method_of(experiment), None, {}, []
    for task in (0, 1):
        uploads = {}
        for client in clients:
            ctx = context_on(device, experiment, root, client, task)
            state = state or init_server(method, ctx.run)
            server = replace(server_context(ctx.run, task, clients), at=ctx.at, before=state)
            common, personal = broadcast(method, server, state)
            payload = merged({"common": common, "personal": personal.get(client, Bundle())})
            before = own.get(client) or init_client(method, ctx.run, client)
            done = train_locally(method, ctx, payload, before)
            ctx.view, own[client], uploads[client] = "after_local", done.state, done.upload
            test = {"test": ctx.stream.test(task)}
            counts = score(method, ctx, payload, done.state, test, SEEN)
            told = {rule: (vars(c)["loss_sum"], c.correct.tolist()) for rule, c in counts.items()}
            found.append((bytes_of(done.upload, done.state), told, ctx.metrics))
        state, _ = reduce(method, server, state, as_uploads(method, uploads))
        found.append(states_of(state))
    return found


def short(case, size):
    """Return a short training of a method with batches of this size."""
    name, switches = case
    return experiment_for(
        (name, {**SHORT.get(name, {}), **switches}),
        training={"batch_size": size, "augment": "turn-flip"},
        evaluate={"batch_size": size, "class_masks": True},
    )


def waits_of(case, root, size):
    """Train and score with batches of this size on the card; return who waited."""
    experiment = short(case, size)
    with card() as found:
        there = two_tasks(CARD, experiment, root)
    if size == MANY:
        assert there == two_tasks(CPU, experiment, root)
    return found.waits


EACH_METHOD = pytest.mark.parametrize(
    "case", EACH, ids=["-".join([name, *map(str, switches.values())]) for name, switches in EACH]
)


@EACH_METHOD
def test_no_step_waits(case, digits):
    few, many = (waits_of(case, digits, size) for size in (FEW, MANY))
    assert many - few == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@EACH_METHOD
def test_no_step_waits_for_a_gpu(case, digits):
    """As CUDA itself counts, beside the stand-in's own rules."""
    few, many = (synchronisations(case, digits, size) for size in (FEW, MANY))
    assert many <= few


def synchronisations(case, root, size):
    """Return how often CUDA says that the processor waited for it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")  # the mode itself warns once that it is a prototype
        torch.cuda.set_sync_debug_mode("warn")
        try:
            two_tasks(torch.device("cuda:0"), short(case, size), root)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in found)


def test_the_card_sees_who_waits(digits, monkeypatch):
    """A method that reads something in a further step on each of two tasks is found."""
    monkeypatch.setattr(FedAvg, "after_step", lambda self, ctx, batch, refs: batch.y.cpu())
    few, many = (waits_of(("fedavg", {}), digits, size) for size in (FEW, MANY))
    assert [*(many - few).values()] == [2]


def test_copies_of_the_loop_are_queued():
    """Pageable memory, or a copy that is not told to be quiet, would wait."""
    with card() as found:
        x = to_device(torch.arange(3.0), CARD)
        assert not found.waits
        assert x.device == CARD
        assert x.tolist() == [0, 1, 2]
        torch.arange(3.0).to(CARD, non_blocking=True)
        torch.arange(3.0).pin_memory().to(CARD)
    assert sum(found.waits.values()) == 3  # the list as well
    assert to_device(x, CARD) is x
    cpu = torch.arange(3)
    assert to_device(cpu, "cpu") is cpu


def test_a_number_by_an_index_waits_and_a_fill_does_not():
    """Torch makes the number a tensor of the processor, and copies it for an index of integers."""
    with card() as found:
        x, index = torch.zeros(3, device=CARD), to_device(torch.tensor([0, 2]), CARD)
        x[index] = 1
        assert [*found.waits.values()] == [1]
        x.index_fill_(0, index, 2.0)
        x[x > 1] = 3
        x[1] = 4
        x[index] = x[index] + 1
        assert [*found.waits.values()] == [1]
    with card():
        assert x.tolist() == [4, 4, 4]


def test_tensors_of_two_devices_do_not_mix():
    with card(), pytest.raises(RuntimeError, match=r"mul: a tensor of the processor \(2,\)"):
        torch.ones(2, device=CARD) * torch.ones(2)


class InThisThread:
    """A pool of the thread that has the card."""

    def __init__(self, threads):
        assert threads == 1

    def __enter__(self):
        return self

    def __exit__(self, *why):
        pass

    map = staticmethod(map)


SERVERS = [
    ("fedmodels.techniques.aggregation_weights", ("pfedgrp", {"w_device": "auto"})),
    ("fedplugins.baselines.fedcil", ("fedcil", {"device": "auto"})),
    ("fedmodels.techniques.server_memory", ("mfcl", {"server_device": "auto"})),
    ("fedmodels.techniques.server_memory", ("target", {"server_device": "auto"})),
    ("fedmodels.numerics.neighbour_clustering", ("fedali", {"kmeans_solver": "torch"})),
]


@pytest.mark.parametrize(("module", "case"), SERVERS, ids=[case[0] for _, case in SERVERS])
def test_a_coordinator_calculates_on_a_card(module, case, digits, monkeypatch):
    """Two clients stay on the processor; the states are those of a coordinator without a card."""
    experiment = experiment_for((case[0], {**SHORT.get(case[0], {}), **case[1]}))
    asked = []
    monkeypatch.setattr(f"{module}.device_of", lambda text: asked.append(text) or CARD)
    monkeypatch.setattr(aggregation_weights, "ThreadPoolExecutor", InThisThread)
    with card():
        there = two_tasks(CPU, experiment, digits, clients=(0, 1))
    assert "auto" in asked
    monkeypatch.undo()
    assert there == two_tasks(CPU, experiment, digits, clients=(0, 1))


def search_on(device, size):
    """Return the weights that a search finds for two models, with batches of this size."""
    nets = [make_net("mlp", num_classes=3, input_shape=(4,)) for _ in range(3)]
    draw = torch.Generator().manual_seed(0)
    for net in nets:
        for tensor in net.tensors().values():
            tensor.data.normal_(generator=draw)
    x, y = torch.randn(24, 4, generator=draw), torch.arange(24) % 3
    search = aggregation_weights.LearnedWeights(w_epochs=2, w_batch=size)
    mixer = aggregation_weights.Mixer(nets[2].to(device), [weights_of(net) for net in nets[:2]])
    return aggregation_weights.find_weights(mixer, (x.to(device), y.to(device)), 0, search, 7)


def test_no_step_of_a_search_for_weights_waits():
    waits = []
    for size in (24, 4):
        with card() as found:
            there = search_on(CARD, size)
        waits.append(found.waits)
    here = search_on(CPU, 4)
    assert waits[1] - waits[0] == {}
    assert there.w.tolist() == here.w.tolist() != [0.5, 0.5]
    assert there.loss == here.loss


def generators_on(device, arch, epochs):
    """Return generators after a training of so many epochs, each of one step.

    GANs of two clients' classes train as one; diffusion models train one by one, so one is enough.
    """
    width = 16 if arch == "ddpm" else 2
    family = Family(input_shape=(1, 8, 8), arch=arch, width=width, epochs=epochs, batch_size=8)
    limits, lessons = (torch.zeros(1), torch.ones(1)), []
    for seed in (0,) if arch == "ddpm" else (0, 1):
        draw = torch.Generator().manual_seed(seed)
        images = 2 * torch.rand(8, 1, 8, 8, generator=draw) - 1
        lessons.append(Lesson(family.fresh(seed, limits), images.to(device), 7 + seed))
    return family.trained(lessons)


@pytest.mark.parametrize("arch", ["wgan", "dcgan", "ddpm"])
def test_no_step_of_a_generator_waits(arch):
    waits = []
    for epochs in (1, 2):
        with card() as found:
            there = generators_on(CARD, arch, epochs)
        waits.append(found.waits)
    assert waits[1] - waits[0] == {}
    for one, other in zip(there, generators_on(CPU, arch, 2), strict=True):
        assert all(torch.equal(one[key], tensor) for key, tensor in other.items())


HIDES = {
    "level": "example", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 0.5,
    "allow": ["announced", "examples", "loss"],
}  # fmt: skip
STOCK = {
    "hidden examples": {"privacy": HIDES},
    "focal": {"training": {"loss": "focal", "class_weights": "balanced", "clip_norm": 1.0}},
    "adam": {"training": {"optimizer": "adam", "augment": "crop-flip"}},
}
"""Tables that change the stock loop."""


@pytest.mark.parametrize("tables", STOCK.values(), ids=STOCK)
def test_the_stock_loop_has_the_bits_of_the_processor(tables, digits):
    experiment = experiment_for(("fedavg", {}), **tables)
    with card():
        there = two_tasks(CARD, experiment, digits)
    assert there == two_tasks(CPU, experiment, digits)
