"""Captured steps have the bits of steps taken operator by operator, and say why one is none.

A tape stands for CUDA graphs (``tests/fake_graphs.py``), on the processor or on its stand-in for a
GPU (``tests/fake_card.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import ClassVar

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext, Position
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.step_graphs import graphs_on
from fedmodels.training.steps import RECORDERS, steps_of, tell_of_own_steps
from fedpb.codec import merged
from fedtide.testing.case import bytes_of, states_of
from tests.conftest import context_of, method_of, server_context
from tests.fake_card import CARD, card
from tests.fake_graphs import TapeRecorder
from tests.fedmodels.methods.test_conformance import experiment_for

CPU = torch.device("cpu")
TAPE = "tests.fake_graphs:TapeRecorder"


@pytest.fixture
def graphs(monkeypatch):
    """Returns the graphs of a device; a tape records on the processor and on the card."""
    monkeypatch.setitem(RECORDERS, "cpu", TAPE)
    monkeypatch.setitem(RECORDERS, CARD.type, TAPE)
    monkeypatch.setattr("fedmodels.training.optimizer.is_gpu", lambda device: True)
    graphs_on.cache_clear()
    yield graphs_on
    graphs_on.cache_clear()


def experiment_of(case, capture="auto", net=None, **training):
    name, switches = case
    table = {
        "batch_size": 12, "momentum": 0.5, "weight_decay": 0.01, "lr": 0.05, "local_epochs": 2,
        "capture": capture, **training,
    }  # fmt: skip
    return experiment_for((name, switches), training=table, **({"net": net} if net else {}))


def two_tasks(experiment, root, device=CPU, method=None):
    """Train two clients in turn on two tasks, in one net; return the bytes of all that came out."""
    run = RunFacts(experiment, ClientData(root / "0").problem)
    method, net = method or method_of(experiment), run.make_net().to(device).pack()
    state, own, found = init_server(method, run), {}, []
    for task in (0, 1):
        uploads, at = {}, Position(task, 0, task)
        server = replace(server_context(run, task, (0, 1)), at=at, before=state)
        common, personal = broadcast(method, server, state)
        for client in (0, 1):
            stream = TaskStream(ClientData(root / str(client)), device)
            stream.open(task)
            ctx, ticks = ClientContext(run, client, at, net, stream, device), []
            ctx.tick = partial(_keep, ticks)
            payload = merged({"common": common, "personal": personal.get(client, Bundle())})
            before = own.get(client) or init_client(method, run, client)
            done = train_locally(method, ctx, payload, before)
            own[client], uploads[client] = done.state, done.upload
            found.append((bytes_of(done.upload, done.state), done.loss, ctx.metrics, ctx.asked))
            *places, losses = zip(*ticks, strict=True)
            found.append((places, torch.stack(losses).tolist()))
        state, _ = reduce(method, server, state, as_uploads(method, uploads))
        found.append(states_of(state))
    return found


def _keep(ticks, *tick):
    ticks.append(tick)


SHORT = {"generator_epochs": 1, "n_check": 8, "generator_width": 2}
CASES = {
    "fedavg": ("fedavg", {}),
    "fedrep": ("fedrep", {}),
    "fedbn": ("fedbn", {}),
    "fedntd": ("fedntd", {}),
    "fedmlp": ("fedmlp", {}),
    "scaffold": ("scaffold", {}),
    "pfedme": ("pfedme", {"inner_steps": 2}),
    "ditto": ("ditto", {}),
    "apfl": ("apfl", {}),
    "apfl-step": ("apfl", {"alpha_every": "step", "mix": "logits"}),
    "gldp": ("gldp", {"t": 2, "s": 2}),
    "gldp-epoch": ("gldp", {"t": 3, "s": 1, "heads": "round", "own_moves": "epoch"}),
    "mfcl": ("mfcl", {}),
    "pilora": ("pilora", {}),
    "pfedgrp-soft": ("pfedgrp", {**SHORT, "replay_labels": "soft"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_captured_steps_have_the_bits_of_eager_ones(case, graphs, digits):
    eager = two_tasks(experiment_of(case, "off"), digits)
    assert not graphs.cache_info().currsize
    assert two_tasks(experiment_of(case), digits) == eager
    made = graphs(CPU)
    assert made.recorder.replays > made.recorder.records > 0
    assert not made.told


STOCK = {
    "adam": {
        "optimizer": "adam",
        "momentum": 0.0,
        "clip_norm": 0.5,
        "optimizer_options": {"amsgrad": True},
    },
    "schedule": {"lr_schedule": {"kind": "cosine", "over": "epochs"}, "augment": "turn-flip"},
    "weights": {"loss": "focal", "class_weights": "balanced"},
}
"""Tables that change the stock loop."""


@pytest.mark.parametrize("training", STOCK.values(), ids=STOCK)
def test_captured_steps_follow_the_run_s_table(training, graphs, digits):
    """Rates change between epochs, and each client has weights of classes of its own."""
    eager = two_tasks(experiment_of(("fedavg", {}), "off", **training), digits)
    assert two_tasks(experiment_of(("fedavg", {}), **training), digits) == eager
    assert graphs(CPU).recorder.replays
    assert not graphs(CPU).told


def test_a_net_that_draws_draws_the_same(graphs, digits):
    """Layers with dropout draw from torch's own generator, which a graph goes on from."""
    net = {"name": "vit-tiny", "mlp_ratio": 1, "blocks": 1, "dropout": 0.5}
    experiment = partial(experiment_of, ("fedavg", {}), net=net)
    assert two_tasks(experiment("auto"), digits) == two_tasks(experiment("off"), digits)
    assert graphs(CPU).recorder.replays


# --- what is no graph -----------------------------------------------------------------------------

FOREIGN = torch.ones(())


@dataclass(frozen=True, kw_only=True)
class Reads(FedAvg):
    """Looks at a value in each step."""

    def after_step(self, ctx, batch, refs):
        assert batch.y.sum().item() >= 0


class AsksForTheEpoch(FedAvg):
    """Has another loss in the second epoch."""

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) * (2 if ctx.epoch else 1)


class Draws(FedAvg):
    """Draws from a generator of its own."""

    def prepare(self, ctx, payload, state):
        return ctx.generator("method")

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) * torch.rand((), generator=refs)


class KeepsATensor(FedAvg):
    """Has a tensor that nobody knows of."""

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) * FOREIGN


@dataclass
class Count:
    steps: int = 0


class Counts(FedAvg):
    """Counts its steps in Python."""

    def prepare(self, ctx, payload, state):
        return Count()

    def loss(self, ctx, batch, out, refs):
        refs.steps += 1
        return super().loss(ctx, batch, out, refs) / refs.steps


class Calls(FedAvg):
    """Calls a function of its references."""

    def prepare(self, ctx, payload, state):
        return [lambda loss: 2 * loss]

    def loss(self, ctx, batch, out, refs):
        return refs[0](super().loss(ctx, batch, out, refs))


@dataclass(frozen=True, kw_only=True)
class Alternates(FedAvg):
    """Keeps something itself."""

    seen: list = field(default_factory=list)

    def loss(self, ctx, batch, out, refs):
        self.seen.append(0)
        return super().loss(ctx, batch, out, refs) * (1 + len(self.seen) % 2)


class GetsOlder(FedAvg):
    """Has steps that differ, from one to the next."""

    def load(self, ctx, payload, state):
        self.steps[:] = [count(1)]
        super().load(ctx, payload, state)

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) / next(self.steps[0])

    steps: ClassVar = []


REFUSED = {
    Reads: "_local_scalar_dense waits for a value",
    AsksForTheEpoch: "it asks for ctx.epoch",
    Draws: "rand draws from a generator of its own",
    KeepsATensor: "it reads a tensor that neither net nor batch nor references hold",
    Counts: "it changes what Python holds",
    Calls: "its loss refers to a function",
    Alternates: "it changes what Python holds",
    GetsOlder: "its steps differ from one to the next",
}


@pytest.mark.parametrize(("kind", "why"), REFUSED.items(), ids=lambda k: getattr(k, "__name__", ""))
def test_a_step_that_is_no_graph_is_taken_as_ever(kind, why, graphs, digits, caplog):
    caplog.set_level("INFO", "fedmodels")
    case = ("fedavg", {})
    eager = two_tasks(experiment_of(case, "off"), digits, method=kind())
    assert two_tasks(experiment_of(case), digits, method=kind()) == eager
    assert graphs(CPU).recorder.replays == 0
    line = f"steps of fedavg are taken operator by operator, as {why}"
    assert [record.message for record in caplog.records] == [line]


@pytest.mark.parametrize("name", ["af-fcl", "fedcil"])
def test_a_method_with_a_loop_of_its_own_is_named(name, graphs, digits):
    experiment = experiment_of((name, {}), local_epochs=1)
    two_tasks(experiment, digits)
    assert graphs(CPU).told == {(name, "its method has a loop of its own")}


def test_steps_that_hide_examples_are_named(graphs, digits):
    ctx = context_of(experiment_of(("fedavg", {})), digits)
    ctx.hidden = object()
    tell_of_own_steps(FedAvg(), ctx)
    assert graphs(CPU).told == {("fedavg", "gradients are bounded example by example")}
    graphs(CPU).told.clear()
    tell_of_own_steps(
        FedAvg(), replace(ctx, run=context_of(experiment_of(("fedavg", {}), "off"), digits).run)
    )
    ctx.hidden = None
    steps_of(FedAvg(), ctx, FedAvg().phases(ctx)[0], None)
    tell_of_own_steps(FedAvg(), ctx)
    assert not graphs(CPU).told


def test_other_optimisers_take_their_steps_as_ever(graphs, digits):
    training = {"optimizer": "rmsprop", "momentum": 0.0}
    eager = two_tasks(experiment_of(("fedavg", {}), "off", **training), digits)
    assert two_tasks(experiment_of(("fedavg", {}), **training), digits) == eager
    assert {why for _, why in graphs(CPU).told} == {"RMSprop begins with a state of its own"}


def test_a_recording_that_fails_leaves_no_trace(graphs, digits, monkeypatch):
    """Whatever a library says of a graph: the training goes on with equal bits."""
    recorded = TapeRecorder.recorded

    def fails(self, step):
        recorded(self, step)
        raise RuntimeError("no graph today\nat all")

    monkeypatch.setattr(TapeRecorder, "recorded", fails)
    eager = two_tasks(experiment_of(("fedrep", {}), "off"), digits)
    assert two_tasks(experiment_of(("fedrep", {})), digits) == eager
    assert graphs(CPU).recorder.records
    assert graphs(CPU).told == {("fedrep", "no graph today")}


def test_what_is_elsewhere_is_no_part_of_a_step(graphs, digits):
    """On a card a step that calculates on the processor is no graph; a replay waits for nothing."""
    found, waits = [], []
    for epochs in (2, 6):
        experiment = experiment_of(("fedavg", {}), local_epochs=epochs)
        with card() as there:
            found.append(two_tasks(experiment, digits, CARD))
        waits.append(there.waits)
    assert graphs(CARD).recorder.replays
    assert waits[1] - waits[0] == {}


def test_a_process_keeps_a_number_of_graphs(graphs, monkeypatch):
    monkeypatch.setattr("fedmodels.training.step_graphs.MOST", 2)
    made, kept = [], graphs(CPU)
    for key in (1, 2, 1, 3, 1, 2):
        kept.slot(key, lambda key=key: made.append(key))
    assert made == [1, 2, 3, 2]
