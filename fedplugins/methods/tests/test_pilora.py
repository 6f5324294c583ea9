"""PILoRA: the loss, the server's weights, blocks that stay, a loop of plain torch, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.nets.adapters import add_adapters
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START
from fedmodels.training.hooks import as_uploads, init_server, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedpb.codec import merged
from fedplugins.methods.pilora import bias_of, distances
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import server_context
from tests.conftest import (
    context_of,
    linear_context,
    method_of,
    payload_of,
    tiny_experiment,
)
from tests.fedmodels.methods.test_conformance import ADAPTED
from tests.runs import dies, ends_as, killed

A, B = "base/1.down.weight", "base/1.up.weight"
P, BIAS = "head/weight", "head/bias"


def experiment(net=ADAPTED, training=None, **tables):
    return tiny_experiment(method="pilora", net=net, training=training or {}, **tables)


def two_blocks(task):
    """Return a context whose net is one adapter of two blocks of rank 1 and two prototypes.

    A is (1, 2) and (3, -4), prototypes are (0, 0) and (0, 4).
    """
    base = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    add_adapters(base, 2)
    net = SplitNet(base, nn.Linear(2, 2), 2)
    load_weights(net, {A: torch.tensor([[1.0, 2.0], [3.0, -4.0]])}, strict=False)
    load_weights(net, {P: torch.tensor([[0.0, 0.0], [0.0, 4.0]])}, strict=False)
    ctx = linear_context(experiment(), [[0.0, 0.0]], [0])
    ctx.net, ctx.at = net, replace(START, task=task)
    return ctx


def test_the_loss_by_hand():
    """The embedding (3, 0) is 3 from prototype 0 and 5 from prototype 1, over the root of 2.

    l_dce is ln(1 + e^(-2 / sqrt 2)), and l_pl 3 / sqrt 2. In the second task A is (3, -4), whose
    numbers sum to 7, and it has 3 - 8 = -5 in common with (1, 2); in the first the sum is 3.
    """
    z, y = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
    fields = {"rank": 1, "pl": 0.1, "l1": 0.01, "ort": 0.5}
    dce, pl = math.log1p(math.exp(-(2**0.5))), 3 / 2**0.5
    for task, rest in ((0, 0.01 * 3), (1, 0.01 * 7 + 0.5 * 5)):
        ctx, method = two_blocks(task), make("pilora", **fields)
        refs = method.prepare(ctx, Bundle(), Bundle())
        loss = method.loss(ctx, Batch(z, y, torch.zeros(1).long()), Output(z, z), refs)
        assert loss.item() == pytest.approx(dce + 0.1 * pl + rest, abs=1e-6)
        loss.backward()
        grads = {key: p.grad for key, p in ctx.net.parameters_by_key().items()}
        assert not grads[A][1 - task].any()  # not even by what blocks have in common
        # of l1 the signs of A, and of what is in common minus the earlier block
        wanted = [0.01, 0.01] if task == 0 else [0.01 - 0.5, -0.01 - 0.5 * 2]
        assert grads[A][task].tolist() == pytest.approx(wanted, abs=1e-6)


def test_weights_of_the_clients_prototypes_by_hand():
    """Class means are (0, 0) and (4, 0). The clients' prototypes (0, 0), (0, 3), (6, 0) are 4, 8
    and 8 from both together: 1/4, 1/8 and 1/8 become 1, 0 and 0, over .2 they are 5, 0 and 0."""
    sent = torch.tensor([[0.0, 0.0], [0.0, 3.0], [6.0, 0.0]])
    shown = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    w = 1 / (math.exp(5) + 2)
    found = make("pilora").reweighted(sent, shown)
    assert found.tolist() == pytest.approx([6 * w, 3 * w], abs=1e-6)
    alike = make("pilora").reweighted(sent[1:].flip(0), shown)
    assert alike.tolist() == pytest.approx([3.0, 1.5])  # who is equally far weighs alike
    exact = make("pilora").reweighted(sent[:2], shown[:1])  # nothing is nearer than 0
    assert torch.isfinite(exact).all()


def test_the_head_chooses_the_nearest_prototype():
    draw = torch.Generator().manual_seed(0)
    z, p = torch.randn(50, 4, generator=draw), torch.randn(6, 4, generator=draw)
    logits = z @ p.T + bias_of(p)
    assert torch.equal(logits.argmax(1), distances(z, p).argmin(1))


def interact(method, run, state, digits, task, made):
    """Return the state after a round of two clients on a task, and what they sent."""
    ctx = replace(
        server_context(run, task, (0, 1)), at=replace(START, interaction=task, task=task),
        labels={0: (0, 1), 1: (1, 2)},
    )  # fmt: skip
    common, own = method.broadcast(ctx, state)
    sent = {}
    for client in (0, 1):
        here = context_of(made, digits, client, task, task)
        payload = merged({"common": common, "personal": own[client]})
        sent[client] = train_locally(method, here, payload, Bundle()).upload
    return reduce(method, ctx, state, as_uploads(method, sent))[0], sent


DECAY = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "tables",
    [
        {"training": DECAY},
        {"training": {"momentum": 0.9}, "server_optimizer": {"name": "fedavgm", "lr": 1.0}},
    ],
    ids=["adam", "momentum at both"],
)
def test_earlier_blocks_keep_their_bits_in_a_later_task(digits, tables):
    made = experiment(**tables)
    method, run = method_of(made), RunFacts(made, Problem((1, 8, 8), 10))
    first = init_server(method, run)
    one, _ = interact(method, run, first, digits, 0, made)
    two, sent = interact(method, run, one, digits, 1, made)
    w0, w1, w2 = (state.common.weights for state in (first, one, two))
    assert not torch.equal(w1[A][:4], w0[A][:4])
    assert torch.equal(w1[A][4:], w0[A][4:])
    assert w1[B][:, :4].any()
    assert not w1[B][:, 4:].any()
    for upload in (*(each.weights for each in sent.values()), w2):
        assert torch.equal(upload[A][:4], w1[A][:4])
        assert torch.equal(upload[B][:, :4], w1[B][:, :4])
        assert upload[B][:, 4:].any()
        torch.testing.assert_close(upload[BIAS], bias_of(upload[P]))


def test_only_prototypes_of_classes_that_clients_hold_move(digits):
    made = experiment(training=DECAY)
    method, run = method_of(made), RunFacts(made, Problem((1, 8, 8), 10))
    first = init_server(method, run)
    one, sent = interact(method, run, first, digits, 0, made)
    shown = sorted({k for each in sent.values() for k in each.prototypes["class"].labels.tolist()})
    moved = (one.common.weights[P] != first.common.weights[P]).any(1).nonzero().flatten().tolist()
    assert moved == shown
    assert 0 < len(shown) < 10
    mine = sent[0].prototypes["class"].labels.tolist()
    changed = (sent[0].weights[P] != first.common.weights[P]).any(1).nonzero().flatten().tolist()
    assert changed == sorted({*mine, 0, 1, 2})  # its own, and those that others hold


def test_a_forged_block_of_an_earlier_task_moves_nothing(digits):
    made = experiment()
    method, run = method_of(made), RunFacts(made, Problem((1, 8, 8), 10))
    state, sent = interact(method, run, init_server(method, run), digits, 0, made)
    forged = replace(sent[0], weights={**sent[0].weights, A: sent[0].weights[A] + 9.0})
    ctx = replace(server_context(run, 1, (0, 1)), at=replace(START, interaction=1, task=1))
    after, _ = reduce(method, ctx, state, as_uploads(method, {0: forged, 1: sent[1]}))
    assert torch.equal(after.common.weights[A][:4], state.common.weights[A][:4])


def test_a_forged_prototype_stops_no_training(digits):
    """Its rows are as large as a coordinator takes, and their squares are larger than that."""
    made = experiment()
    method, run = method_of(made), RunFacts(made, Problem((1, 8, 8), 10))
    first = init_server(method, run)
    _, sent = interact(method, run, first, digits, 0, made)
    rows, means = torch.full((10, 16), 9e5), sent[0].prototypes["class"]
    forged = replace(
        sent[0],
        weights={**sent[0].weights, P: rows},
        prototypes={"class": replace(means, vectors=torch.full_like(means.vectors, 9e5))},
    )
    ctx = server_context(run, 0, (0, 1))
    after, _ = reduce(method, ctx, first, as_uploads(method, {0: forged, 1: sent[1]}))
    assert after.common.weights[P].max() > 8e5
    _, sent = interact(method, run, after, digits, 1, made)
    assert sent[1].weights[BIAS].min() == -1e6


def test_class_means_of_who_has_no_example_are_not_read(digits):
    made = experiment()
    method, run = method_of(made), RunFacts(made, Problem((1, 8, 8), 10))
    first = init_server(method, run)
    _, sent = interact(method, run, first, digits, 0, made)
    idle = replace(sent[0], scalars={"num_examples": 0.0})
    ctx = server_context(run, 0, (0, 1))
    after, _ = reduce(method, ctx, first, as_uploads(method, {0: idle, 1: sent[1]}))
    alone, _ = reduce(method, ctx, first, as_uploads(method, {1: sent[1]}))
    assert all(torch.equal(after.common.weights[k], t) for k, t in alone.common.weights.items())
    nobody, _ = reduce(method, ctx, first, as_uploads(method, {0: idle}))
    assert nobody is first


def test_a_step_is_that_of_plain_torch(digits):
    """One step of SGD in the second task, with a net of plain tensors: B A as a sum over tasks."""
    made = experiment(training={"batch_size": 1000, "lr": 0.1})
    ctx = context_of(made, digits, 0, 1)
    draw = torch.Generator().manual_seed(3)
    start = {k: 0.3 * torch.randn(t.shape, generator=draw) for k, t in weights_of(ctx.net).items()}
    fixed = {k: t.clone() for k, t in ctx.net.frozen_tensors().items()}
    payload, state = payload_of(made, ctx)
    found = train_locally(method_of(made), ctx, replace(payload, weights=start), state).upload
    x, y = ctx.stream.train(1)
    a, b = [start[A][:4], start[A][4:].clone()], [start[B][:, :4], start[B][:, 4:].clone()]
    p = start[P].clone()
    trained = [a[1].requires_grad_(), b[1].requires_grad_(), p.requires_grad_()]
    flat = x.flatten(1)
    h = flat @ fixed["base/1.layer.weight"].T + fixed["base/1.layer.bias"]
    z = (h + sum(flat @ a[i].T @ b[i].T for i in (0, 1))).relu()
    far = torch.stack([(z - row).square().mean(1).sqrt() for row in p], 1)
    loss = cross_entropy(-far, y) + 0.001 * far[range(len(y)), y].mean()
    loss = loss + 0.01 * a[1].abs().sum() + 0.5 * (a[0] @ a[1].T).abs().sum()
    loss.backward()
    with torch.no_grad():
        a1, b1, rows = (t - 0.1 * t.grad for t in trained)
    told = payload.histogram.round > 0
    told[y.unique()] = True
    wanted = {
        A: torch.cat([a[0], a1]), B: torch.cat([b[0], b1], 1),
        P: torch.where(told[:, None], rows, start[P]),
    }  # fmt: skip
    for key, tensor in wanted.items():
        torch.testing.assert_close(found.weights[key], tensor, rtol=1e-6, atol=1e-6)


def test_a_run_that_dies_in_its_second_task_ends_alike(digits, tmp_path):
    made = experiment(schedule={"rounds": 1, "clients": 2, "order": "tasks_outer"})
    whole = run_in_process(made, digits, tmp_path / "whole")
    killed(made, digits, tmp_path / "killed", before=dies(interaction=1))
    ends_as(whole, made, digits, tmp_path / "killed")


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"net": {**ADAPTED, "adapters": 0}}, "of rank 4 for each of 2 tasks, and the net has "
         "none such: set .net. adapters = 8, without adapter_a"),
        ({"net": {**ADAPTED, "adapters": 7}}, "and the smallest one's rank is 7: set"),
        ({"schedule": {"open": True, "order": "tasks_outer"}}, "leave out open in"),
        ({"scenario": {"kind": "natural"}}, "let .scenario. say tasks"),
        ({"scenario": None}, "let .scenario. say tasks"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_gets_a_line(tables, line):
    made = experiment(**tables)
    with pytest.raises(ConfigError, match=line):
        init_server(method_of(made), RunFacts(made, Problem((1, 8, 8), 10)))
