"""AF-FCL: what each of its losses comes to, who is told what, and its limits."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedmodels.errors import PayloadError
from fedmodels.methods import make
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.numerics.distances import distillation
from fedmodels.numerics.randomness import generator
from fedmodels.tensors.bundle import Bundle, Histogram
from fedmodels.tensors.roles import part_of, under, without
from fedmodels.training.hooks import as_uploads, evaluation
from fedmodels.training.loop import batches, train_locally
from fedmodels.training.stepped import Batch, Output
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.baselines import af_fcl as module
from fedplugins.baselines.af_fcl import AfFclReferences, Predecessor, credibility
from fedplugins.baselines.flow import Flow, is_order
from fedtide.inprocess import run_in_process
from tests.conftest import (
    context_of,
    linear_context,
    method_of,
    payload_of,
    server_context,
    tiny_experiment,
)
from tests.runs import dies, ends_as, killed

ADAM = {"batch_size": 16, "lr": 1e-3, "optimizer": "adam"}


def experiment_for(**switches):
    training = switches.pop("training", {"batch_size": 16, "lr": 0.05})
    schedule = switches.pop("schedule", {})
    method = {"name": "af-fcl", "flow_hidden": 8, **switches}
    return tiny_experiment(method=method, training=training, schedule=schedule)


def told(now, before=()):
    counts = torch.zeros(2, 10, dtype=torch.int32)
    counts[0, list(now)] = 1
    counts[1, [*now, *before]] = 1
    counts[1, list(set(now) & set(before))] = 2
    return Histogram(*counts)


def trained(experiment, root, history=(0,), now=range(10), before=(), **places):
    """Train one client on tasks one after another, alone; return the results and contexts."""
    method, out, payload, state = method_of(experiment), [], None, Bundle()
    for number, task in enumerate(history):
        ctx = context_of(experiment, root, task=task, interaction=number, **places)
        if payload is None:
            payload = payload_of(experiment, ctx)[0]
        payload = Bundle(weights=payload.weights, histogram=told(now, before))
        result = train_locally(method, ctx, payload, state)
        out.append((ctx, payload, result))
        orders = {k: t for k, t in payload.weights.items() if is_order(k)}
        payload, state = Bundle(weights={**result.upload.weights, **orders}), result.state
    return out


# --- losses ---------------------------------------------------------------------------------------


def test_credibility_in_numpy():
    """Class 1 has one real point and class 2 none: their drawn points get the other number."""
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(5, 3)), np.array([0, 0, 0, 1, 3])
    drawn, labels = rng.normal(size=(6, 3)), np.array([0, 1, 2, 0, 0, 3])
    mean, var = z[:3].mean(0), z[:3].var(0)
    density = np.exp(-((drawn - mean) ** 2) / (2 * var)) / np.sqrt(2 * np.pi * var)
    expected = np.where(labels == 0, density.mean(1), 0.07)
    given = map(torch.from_numpy, (z, y, drawn, labels))
    found = credibility(*given, torch.tensor(0.07).double())
    np.testing.assert_allclose(found.numpy(), expected)


def test_a_class_without_spread_has_a_finite_density():
    """Variance 0 counts as 0.01: at the mean, the density is 1 / sqrt(0.02 pi) = 3.989423."""
    z, y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    w = credibility(z, y, z[:1], y[:1], torch.tensor(0.0))
    assert w.item() == pytest.approx(3.989423, rel=1e-5)


def test_distillation_by_hand():
    """At T = 2 logits (2 ln 3, 0) are (3/4, 1/4): KL to (1/2, 1/2) is 3/4 ln 3/2 + 1/4 ln 1/2."""
    teacher, student = torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2)
    assert distillation(teacher, student, 2.0).item() == pytest.approx(0.130812, abs=1e-6)
    assert distillation(student, student, 2.0).item() == 0


def test_drawn_loss_by_hand():
    """Logits 0 cost ln 2 each; w (.5, .1) has mean .3, and p = .3, theta = .1 weigh it by .37:
    .37 * .3 * ln 2 = .076939. Teacher as above: + .2 * .1 * .130812 = .002616. Half of it all."""
    method = make("af-fcl", k_flow=0.5, theta=0.1)
    logits, y = torch.zeros(2, 2), torch.tensor([0, 1])
    w, p = torch.tensor([0.5, 0.1]), torch.tensor(0.3)
    assert method.drawn_loss(logits, y, w, p, None).item() == pytest.approx(0.038470, abs=1e-6)
    teacher = torch.tensor([[2 * math.log(3), 0.0]] * 2)
    assert method.drawn_loss(logits, y, w, p, teacher).item() == pytest.approx(0.039778, abs=1e-6)


def frozen_by(ctx, classes=(0, 1)):
    flow = Flow(ctx.net.width, 2, 8).requires_grad_(False)
    return Predecessor(ctx.net.copy().requires_grad_(False).eval(), flow, torch.tensor(classes))


def references(flow, last, draw, adams):
    both = torch.arange(2)
    return AfFclReferences(flow, both, both, last, {}, {}, draw, adams)


def test_loss_by_hand():
    """The predecessor's embedding of x = (1, 0) is x, its logits are 0. Ours is (3, 0), with
    logits (2 ln 3, 0): CE(y = 0) = ln(1 + 1/9) = .105361; mean square 2; KL of (1/2, 1/2) to
    (3/4, 1/4) = ln 2/3 / 2 + ln 2 / 2 = .143841; together + .2 * (.5 * 2 + .1 * .143841)."""
    ctx = linear_context(experiment_for(), [[1.0, 0.0]], [0])
    refs = references(Flow(2, 2, 8), frozen_by(ctx), generator(0), {})
    x, y = ctx.stream.train(0)
    out = Output(torch.tensor([[3.0, 0.0]]), torch.tensor([[2 * math.log(3), 0.0]]))
    method = make("af-fcl")
    batch = Batch(x, y, torch.arange(1), taught=method.taught(ctx, x, refs))
    assert method.loss(ctx, batch, out, refs).item() == pytest.approx(0.308238, abs=1e-6)
    refs.last = None
    assert method.loss(ctx, batch, out, refs).item() == pytest.approx(0.105361, abs=1e-6)


def test_the_flow_rehearses_what_its_predecessor_draws(monkeypatch):
    """-log p(h|y) + .4 (-log p(u|y')), u and y' drawn anew from the same generator here."""
    ctx = linear_context(experiment_for(), [[1.0, 0.0]], [0])
    flow, last = Flow(2, 2, 8), frozen_by(ctx, (1,))
    refs = references(flow, last, generator(7), {"flow": None})
    steps = []
    monkeypatch.setattr(module, "descend", lambda loss, optimizer: steps.append(loss.item()))
    h, y = torch.randn(4, 2, generator=generator(1)), torch.tensor([0, 1, 1, 0])
    make("af-fcl", k_last=0.4)._train_flow(ctx, h, y, refs)
    draw = generator(7)
    torch.randint(1, (4,), generator=draw)
    u, _ = last.flow.sample(torch.ones(4, dtype=torch.int64), draw)
    expected = -flow.log_density(h, y).mean()
    expected = expected - 0.4 * flow.log_density(u, torch.ones(4, dtype=torch.int64)).mean()
    assert steps == [pytest.approx(expected.item())]


@pytest.mark.parametrize(("preset", "where"), [("paper", "noise"), ("released", "embeddings")])
def test_where_gaussians_are_evaluated(preset, where, digits, monkeypatch):
    seen = []

    def spy(z, y, drawn, labels, otherwise):
        seen.append(drawn)
        return torch.ones(len(labels))

    monkeypatch.setattr(module, "credibility", spy)
    samples, plain = [], Flow.sample
    monkeypatch.setattr(Flow, "sample", lambda *a: samples.append(plain(*a)) or samples[-1])
    trained(experiment_for(preset=preset), digits)
    assert len(seen) == len(samples) > 0
    for drawn, (u, noise) in zip(seen, samples, strict=True):
        assert torch.equal(drawn, noise if where == "noise" else u)


# --- what trains ----------------------------------------------------------------------------------


def prepared(experiment, root):
    method, ctx = method_of(experiment), context_of(experiment, root)
    payload, state = payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    nets = {"head": ctx.net.head, "flow": refs.flow}
    refs.adams = {k: torch.optim.Adam(n.parameters(), 0.1) for k, n in nets.items()}
    return method, ctx, refs


@pytest.mark.parametrize("role", ["head/", "flow/"])
def test_each_step_moves_its_part_alone(role, digits):
    method, ctx, refs = prepared(experiment_for(), digits)
    x, y = ctx.stream.train(0)
    h = ctx.net.features(x).detach()

    def all_of():
        flow = {k: t.clone() for k, t in under("flow", refs.flow.state_dict()).items()}
        return {**weights_of(ctx.net), **flow}

    before = all_of()
    if role == "head/":
        method._train_head(ctx, h, Batch(x, y, torch.arange(len(y))), refs)
    else:
        method._train_flow(ctx, h, y, refs)
    moved = {k for k, t in all_of().items() if not torch.equal(t, before[k])}
    assert moved
    assert all(key.startswith(role) for key in moved)
    assert not any(is_order(key) for key in moved)


def test_the_flow_trains_in_the_first_batches(digits, monkeypatch):
    counts, plain = [], module.descend
    monkeypatch.setattr(module, "descend", lambda loss, o: counts.append(o) or plain(loss, o))
    ctx, _, _ = trained(experiment_for(flow_steps=2, k_flow=0), digits)[0]
    steps = math.ceil(len(ctx.stream.train(0)[1]) / 16)
    assert len(counts) == steps + 2
    assert len(set(map(id, counts[:4]))) == 2  # flow, net, flow, net
    assert counts[0] is counts[2] is not counts[1]


def test_a_teacher_does_not_move(digits):
    _, second = trained(experiment_for(), digits, (0, 1), before=range(10))
    last, received = part_of(second[2].state.weights, "last"), second[1].weights
    assert last.keys() == received.keys()
    assert all(torch.equal(last[key], tensor) for key, tensor in received.items())


# --- tasks ----------------------------------------------------------------------------------------


def test_the_predecessor_changes_with_the_task(digits):
    """Tasks 0, 0, 1, 1: none, none, what was received when task 1 began, and the same again."""
    done = trained(experiment_for(), digits, (0, 0, 1, 1), before=(3,))
    states = [result.state.weights for _, _, result in done]
    assert not part_of(states[0], "last")
    assert not part_of(states[1], "last")
    expected = done[2][1].weights
    for state in states[2:]:
        last = part_of(state, "last")
        assert last.keys() == expected.keys()
        assert all(torch.equal(last[k], t) for k, t in expected.items())
        assert state["before"].nonzero().flatten().tolist() == [3]


def test_who_first_trains_on_a_later_task_is_held_to_the_model_it_received(digits):
    """Rounds chose others on task 0. Within task 1 the predecessor stays; nobody has one on 0."""
    done = trained(experiment_for(), digits, (1, 1), before=(3,))
    for _, _, result in done:
        last = part_of(result.state.weights, "last")
        expected = done[0][1].weights
        assert last.keys() == expected.keys()
        assert all(torch.equal(last[k], t) for k, t in expected.items())


def test_only_announced_labels_are_drawn(digits, monkeypatch):
    """From the flow: those announced up to now, and one's own. From its predecessor: those that
    somebody had trained on before one's task began."""
    drawn, plain = [], Flow.sample
    monkeypatch.setattr(Flow, "sample", lambda f, y, n: drawn.append((f, y)) or plain(f, y, n))
    experiment = experiment_for(training={"batch_size": 8, "lr": 0.05, "local_epochs": 5})
    own = set[int]()
    for task in (0, 1):
        own |= set(context_of(experiment, digits, task=task).stream.train(task)[1].tolist())
    some, *others = sorted(set(range(10)) - own)
    trained(experiment, digits, (0, 1), now=(some,), before=others)
    labels = {"rehearsed": set(), "replayed": set()}
    for flow, y in drawn:
        frozen = not next(flow.parameters()).requires_grad
        labels["rehearsed" if frozen else "replayed"] |= set(y.tolist())
    assert others
    assert labels["rehearsed"] == set(others)
    assert labels["replayed"] == set(range(10))


def test_labels_of_nobody_are_not_drawn(digits):
    method, ctx = method_of(experiment_for()), context_of(experiment_for(), digits)
    payload, state = payload_of(experiment_for(), ctx)
    own = set(ctx.stream.train(0)[1].tolist())
    a, b, *_ = sorted(set(range(10)) - own)
    for now, before in [((), ()), ((a,), ()), ((a,), (a, b))]:
        one = Bundle(weights=payload.weights, histogram=told(now, before))
        seen = method.prepare(ctx, one, state).seen.tolist()
        assert set(seen) == own | set(now) | set(before)


# --- the wire -------------------------------------------------------------------------------------


def test_orders_are_the_servers(digits, tmp_path):
    """They come with every broadcast, never go up, and are the same for all after four rounds."""
    experiment, out = experiment_for(), tmp_path / "out"
    (ctx, payload, result), *_ = trained(experiment, digits)
    method = method_of(experiment)
    first = method.init_server(ctx.run)
    orders = {k: t for k, t in first.own.weights.items() if is_order(k)}
    assert len(orders) == 4
    assert all(torch.equal(payload.weights[k], t) for k, t in orders.items())
    assert not any(map(is_order, result.upload.weights))
    run_in_process(experiment, digits, out)
    served = method.aggregate(
        server_context(ctx.run, 0, (0,)), first, as_uploads(method, {0: result.upload})
    )
    assert all(torch.equal(served.own.weights[k], t) for k, t in orders.items())
    assert served.own.weights.keys() == first.own.weights.keys()


def test_a_payload_without_a_flow_or_with_a_false_order(digits):
    experiment = experiment_for()
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    with pytest.raises(PayloadError, match="sent no flow"):
        method.prepare(ctx, Bundle(weights=without(payload.weights, "flow")), state)
    wrong = {**payload.weights, "flow/order1": torch.zeros(16, dtype=torch.int64)}
    with pytest.raises(PayloadError, match="'flow/order1' is no permutation"):
        method.prepare(ctx, Bundle(weights=wrong, histogram=payload.histogram), state)


def test_the_flow_is_not_sent_to_score(digits):
    experiment = experiment_for()
    method, ctx = method_of(experiment), context_of(experiment, digits)
    server = server_context(ctx.run, 0, (0, 1))
    state = method.init_server(ctx.run)
    common, personal = method.broadcast(server, state)
    scored, none = evaluation(method, server, state)
    assert scored is common  # the same object: its encoding is shared
    assert not none
    assert personal[0] is personal[1]
    assert all(key.startswith(("base/", "head/")) for key in common.weights)
    assert all(key.startswith("flow/") for key in personal[0].weights)


def test_both_nets_are_averaged_by_examples(digits):
    """3 and 1 examples weigh 3/4 and 1/4, in the flow as in the classifier."""
    experiment = experiment_for()
    method, ctx = method_of(experiment), context_of(experiment, digits)
    state = method.init_server(ctx.run)
    plain = {k: t for k, t in state.own.weights.items() if not is_order(k)}
    both = {**state.common.weights, **plain}
    uploads = {
        c: Bundle(
            weights={k: torch.full_like(t, value) for k, t in both.items()},
            scalars={"num_examples": n},
        )
        for c, value, n in [(0, 1.0, 3.0), (1, 5.0, 1.0)]
    }
    after = method.aggregate(server_context(ctx.run, 0, (0, 1)), state, as_uploads(method, uploads))
    for key in both:
        held = after.own if key.startswith("flow/") else after.common
        assert torch.equal(held.weights[key], torch.full_like(both[key], 2.0))
    assert after.own.histogram.total.tolist() == [2] * 10


# --- limits ---------------------------------------------------------------------------------------


def test_without_its_terms_it_is_fedavg(digits, tmp_path):
    """With SGD, a whole run of three clients and two tasks agrees in every figure."""
    off = {"k_flow": 0.0, "k_kd": 0.0, "k_last": 0.3}
    mine = run_in_process(experiment_for(**off), digits, tmp_path / "mine")
    theirs = run_in_process(tiny_experiment(), digits, tmp_path / "theirs")
    for key in ("loss", "a_glo", "a_loc"):
        assert mine["metrics"][key] == theirs["metrics"][key]


def test_without_its_terms_adams_moments_are_all_that_is_kept(digits):
    """One client, two tasks: bit for bit a net trained by one Adam whose net is never renewed."""
    experiment = experiment_for(training=ADAM, k_flow=0, k_kd=0)
    done = trained(experiment, digits, (0, 0, 1))
    net = done[0][0].run.make_net()
    load_weights(net, without(done[0][1].weights, "flow"))
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    adam.param_groups[0]["weight_decay"] = experiment.training.weight_decay
    for ctx, _, result in done:
        x, y = ctx.stream.train(ctx.task)
        net.train()
        for index in batches(len(y), net, experiment.training, ctx.generator("order")):
            adam.zero_grad()
            cross_entropy(net(x[index]), y[index]).backward()
            adam.step()
        for key, tensor in weights_of(net).items():
            assert torch.equal(result.upload.weights[key], tensor), key


@pytest.mark.parametrize(
    "switch",
    [
        {"k_kd": 0.0},
        {"k_last": 0.0},
        {"k_flow": 0.0},
        {"theta": 0.9},
        {"kd_features": 0.0},
        {"kd_logits": 0.0},
        {"preset": "released"},
    ],
    ids=str,
)
def test_every_switch_matters(switch, digits):
    """Two tasks of one client: something of what it uploads differs."""
    one, other = (
        trained(experiment_for(**s), digits, (0, 1), before=(1, 8))[1][2] for s in ({}, switch)
    )
    assert any(not torch.equal(other.upload.weights[k], t) for k, t in one.upload.weights.items())


def test_a_run_interrupted_anywhere_ends_in_the_same_state(digits, tmp_path):
    experiment = experiment_for(training=ADAM, schedule={"rounds": 1})
    whole, out = run_in_process(experiment, digits, tmp_path / "whole"), tmp_path / "broken"
    at = {"kind": rpc.ORDER_KIND_TRAIN, "interaction": 1, "client_id": "1"}
    killed(experiment, digits, out, before=dies(**at))
    ends_as(whole, experiment, digits, out)
