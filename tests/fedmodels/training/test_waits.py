"""On a GPU nothing waits for it within a step, and every tensor lies where it is used.

The card of these tests is a fake (``tests/fake_card.py``). A run of few steps waits as often as one
of many steps: what waits once a training or once a test set is allowed, what waits at each step is
not. Bits are those of the processor, as its kernels calculate for the fake.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream
from fedmodels.devices import to_device
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.hooks import as_uploads, broadcast, init_client, init_server, reduce
from fedmodels.training.loop import score, train_locally
from fedmodels.training.position import Position
from fedmodels.training.run import RunFacts
from fedpb.codec import merged
from fedtide.testing.case import bytes_of, states_of
from tests.conftest import method_of, server_context
from tests.fake_card import CARD, card
from tests.fedmodels.methods.test_conformance import CASES, experiment_for

FEW, MANY = 64, 12
"""Batch sizes with one step and with three steps of an epoch."""
OTHERS = ("gldp", "pfedgrp")
"""Methods with a variant that trains in another way."""
EACH = [case for case in CASES if not case[1] or case[0] in OTHERS]
FAST = {"generator_epochs": 1, "n_check": 8, "generator_width": 2}
SHORT = {"gldp": {"t": 1, "s": 1}, "pfedgrp": FAST, "fedavg-replay": FAST, "pfedgraph-replay": FAST}
"""Hyper-parameters that make a training short beside those of the conformance suite."""
SEEN = torch.arange(10) < 7


def context_on(device, experiment, root, task):
    """Return the context in which client 0 trains on a task."""
    data = ClientData(root / "0")
    run = RunFacts(experiment, data.problem)
    keeps = method_of(experiment).trains_on == "history"
    stream = TaskStream(data, device, keep_history=keeps)
    stream.open(task)
    net = run.make_net().to(device).pack()
    return ClientContext(run, 0, Position(task, 0, task), net, stream, device)


def two_tasks(device, experiment, root):
    """Train and score client 0 on two tasks; return the bytes of all states and all counts."""
    method, state, own, found = method_of(experiment), None, None, []
    for task in (0, 1):
        ctx = context_on(device, experiment, root, task)
        state = state or init_server(method, ctx.run)
        own = own or init_client(method, ctx.run, 0)
        server = replace(server_context(ctx.run, task, (0,)), at=ctx.at, before=state)
        common, personal = broadcast(method, server, state)
        payload = merged({"common": common, "personal": personal.get(0, Bundle())})
        done = train_locally(method, ctx, payload, own)
        ctx.view, own = "after_local", done.state
        counts = score(method, ctx, payload, own, {"test": ctx.stream.test(task)}, SEEN)
        state, _ = reduce(method, server, state, as_uploads(method, {0: done.upload}))
        told = {rule: (vars(c)["loss_sum"], c.correct.tolist()) for rule, c in counts.items()}
        found.append((bytes_of(done.upload, own), states_of(state), told, ctx.metrics))
    return found


def waits_of(case, root, size):
    """Train and score with batches of this size on the card; return who waited, and all bytes."""
    name, switches = case
    experiment = experiment_for(
        (name, {**SHORT.get(name, {}), **switches}),
        training={"batch_size": size, "augment": "turn-flip"},
        evaluate={"batch_size": size, "class_masks": True},
    )
    with card() as found:
        there = two_tasks(CARD, experiment, root)
    if size == MANY:
        assert there == two_tasks(torch.device("cpu"), experiment, root)
    return found.waits


@pytest.mark.parametrize(
    "case", EACH, ids=["-".join([name, *map(str, switches.values())]) for name, switches in EACH]
)
def test_no_step_waits(case, digits):
    few, many = (waits_of(case, digits, size) for size in (FEW, MANY))
    assert many - few == {}


def test_the_card_sees_who_waits(digits, monkeypatch):
    """A method that reads something in each of two further steps on each of two tasks is found."""
    monkeypatch.setattr(FedAvg, "after_step", lambda self, ctx, batch, refs: batch.y.cpu())
    few, many = (waits_of(("fedavg", {}), digits, size) for size in (FEW, MANY))
    assert [*(many - few).values()] == [4]


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


def test_tensors_of_two_devices_do_not_mix():
    with card(), pytest.raises(RuntimeError, match=r"mul: a tensor of the processor \(2,\)"):
        torch.ones(2, device=CARD) * torch.ones(2)
