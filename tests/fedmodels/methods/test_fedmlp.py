"""FedMLP by hand, and what its paper promises."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

import fedmodels.methods
from fedcli.data.cuts.long_tail import long_tail_counts
from fedmodels.errors import ConfigError
from fedmodels.methods import make, settings_of
from fedmodels.methods.fedavg import FedAvg
from fedmodels.methods.fedmlp import Levels
from fedmodels.numerics.clustering import cluster, nearest
from fedmodels.numerics.distances import divergence, smooth_l1
from fedmodels.numerics.prototypes import ByClass
from fedmodels.parts.growth_by_method import forgotten
from fedmodels.techniques.levels import (
    CLUSTER,
    MINORITY,
    class_counts,
    grown_levels,
    minority_by_counts,
    minority_classes,
)
from fedmodels.tensors.archive import load_named
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.asked import local_view
from fedmodels.training.contexts import START, Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, evaluation
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process, transported
from tests.conftest import context_of, digest_of, method_of, payload_of, records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import NORMED

OFF = {"loss_p": False, "loss_i": False, "loss_s": False}

PLAIN = SimpleNamespace(criterion=torch.nn.functional.cross_entropy)
"""What a loss reads of its context."""


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(**vectors):
    """Return prototypes by class: ``rows(c3=[1.0, 2.0])``; three examples behind each."""
    return {int(k[1:]): (torch.tensor(v), 3) for k, v in vectors.items()}


def table(classes, width, found):
    return ByClass.of(Prototypes.of(found, width), classes, width, torch.device("cpu"))


def levels(*, g=None, p=None, minority=(), memory=None, o=None, classes=4, width=2):
    """Return what losses refer to; ``p`` is P[a(k)] by class."""
    semantic = table(classes, width, p or {})
    rare = torch.zeros(classes, dtype=torch.bool)
    rare[list(minority)] = True
    return Levels(
        table(classes, width, g or {}),
        ByClass(semantic.vectors, rare & semantic.known),
        table(classes, width, memory or {}),
        torch.tensor(o) if o else torch.zeros(0, width),
    )


def server(classes=10, width=16, interaction=0, task=0, **switches):
    """Return a method, and the context of its server half on a net of this width."""
    experiment = tiny_experiment(
        method={"name": "fedmlp", **switches}, net={"name": "mlp", "hidden": [width]}
    )
    run = RunFacts(experiment, Problem((1, 8, 8), classes))
    return method_of(experiment), ServerContext(run, Position(interaction, 0, task), (0, 1))


def upload(ctx, found):
    """Return an upload with these class prototypes, {class: (vector, count)}."""
    base = {k: w for k, w in ctx.run.initial_weights.items() if k.startswith("base/")}
    prototypes = {"class": Prototypes.of(found, ctx.run.width)}
    return Bundle(base, prototypes, scalars={"num_examples": 5.0})


def interact(method, ctx, state, found):
    """Take one interaction's prototypes, {client: {class: (vector, count)}}, into the state."""
    uploads = {c: upload(ctx, rows) for c, rows in found.items()}
    return method.finish(
        ctx, method.aggregate(ctx, state, as_uploads(method, uploads)), as_uploads(method, uploads)
    )[0]


def minority_of(state, classes=10):
    bits = np.unpackbits(state.common.weights[MINORITY].numpy())[:classes]
    return np.flatnonzero(bits).tolist()


# --- the three distances --------------------------------------------------------------------------


def test_smooth_l1():
    """r = (.5, 2, 0): terms .125, 1.5, 0."""
    z, g = torch.tensor([[0.5, 2.0, -1.0]]), torch.tensor([[0.0, 0.0, -1.0]])
    assert float(smooth_l1(z, g)) == pytest.approx(0.541667, abs=1e-6)


def test_divergence():
    """p = softmax(1, 0, 0), q = softmax(0, 2, 0); the gradient is p (log p/q - KL)."""
    z, c = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 2.0, 0.0]])
    found = make("fedmlp").divergence(z, c)
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(0.840334, abs=1e-6)
    expected = torch.tensor([[0.488412, -0.456148, -0.032265]])
    torch.testing.assert_close(z.grad, expected, atol=1e-6, rtol=0)
    reverse = make("fedmlp", kl_dir="c_z").divergence(z.detach(), c)
    assert float(reverse) == pytest.approx(0.779365, abs=1e-6)


def test_the_divergence_of_normalised_embeddings_vanishes_with_their_width():
    width = 128  # of cnn5
    z = torch.nn.functional.one_hot(torch.tensor([3]), width).float()
    farthest = make("fedmlp", kl_norm="l2_softmax").divergence(50 * z, -z).item()
    # p is e on one coordinate and 1 on the others, q its inverse there
    p, q = math.e / (math.e + width - 1), 1 / (1 + math.e * (width - 1))
    rest = (1 - p) * math.log((1 - p) / (1 - q))
    assert farthest == pytest.approx(p * math.log(p / q) + rest, rel=1e-3)
    assert farthest < 3.1 / width
    assert make("fedmlp").divergence(50 * z, -50 * z).item() > 50


@pytest.mark.parametrize("direction", ["z_c", "c_z"])
def test_divergence_of_normalised_embeddings(direction):
    z, c = drawn(3, 4), drawn(3, 4, seed=1)
    both = make("fedmlp", kl_norm="l2_softmax", kl_dir=direction, tau=0.5)
    unit = [t / t.norm(dim=1, keepdim=True) for t in (z, c)]
    one, other = unit if direction == "z_c" else reversed(unit)
    torch.testing.assert_close(both.divergence(5 * z, c), divergence(one, other, 0.5))
    torch.testing.assert_close(divergence(2 * z, 2 * c, 2.0), divergence(z, c, 1.0))


def test_prototype_loss_counts_known_classes_only():
    """z_0 at (.5, 2) of class 1 with G[1] = 0: (.125 + 1.5) / 2, over a batch of two."""
    refs = levels(g=rows(c1=[0.0, 0.0]))
    z, y = torch.tensor([[0.5, 2.0], [9.0, 9.0]]), torch.tensor([1, 2])
    assert float(make("fedmlp").prototype_loss(z, y, refs)) == pytest.approx(0.8125 / 2)
    at_prototype = make("fedmlp").prototype_loss(torch.zeros(1, 2), torch.tensor([1]), refs)
    assert float(at_prototype) == 0


def test_new_class_begins_at_the_nearest_semantic_prototype():
    """(1, 1) is 1.41 from (0, 0) and 2.24 from (3, 2); (4, 1) is 4.12 and 1.41 from them."""
    assert nearest(torch.ones(1, 2), torch.tensor([[0.0, 0.0], [3.0, 3.0]])).tolist() == [0]
    refs = levels(memory=rows(c0=[0.0, 5.0]), o=[[0.0, 0.0], [3.0, 2.0]])
    z, y = torch.tensor([[1.0, 1.0], [4.0, 1.0], [4.0, 1.0]]), torch.tensor([3, 3, 0])
    targets = torch.tensor([[0.0, 0.0], [3.0, 2.0], [0.0, 5.0]])  # class 0 is remembered
    expected = divergence(z, targets, 1.0).mean()
    torch.testing.assert_close(make("fedmlp").inter_task_loss(z, y, refs), expected)


def test_inter_task_loss_is_zero_for_equal_distributions_only():
    refs = levels(memory=rows(c0=[1.0, 2.0]), o=[[1.0, 2.0]])
    loss = make("fedmlp").inter_task_loss
    same = torch.tensor([[4.0, 5.0]])  # the same softmax as (1, 2)
    assert float(loss(same, torch.tensor([0]), refs)) == pytest.approx(0, abs=1e-7)
    assert float(loss(same + torch.tensor([0.0, 1.0]), torch.tensor([0]), refs)) > 0.01
    # In a client's first task nothing is remembered.
    assert float(loss(same, torch.tensor([1]), levels())) == 0


def test_semantic_loss_touches_minority_examples_only():
    refs = levels(g=rows(c0=[0.0, 0.0], c1=[1.0, 1.0]), p=rows(c0=[5.0, 5.0], c1=[5.0, 5.0]),
                  minority=[1])  # fmt: skip
    y, gradients = torch.tensor([0, 1, 0]), []
    for alpha in (0.0, 1.0):
        z = drawn(3, 2).requires_grad_(True)
        out = SimpleNamespace(features=z, logits=z @ drawn(2, 4, seed=1))
        batch = SimpleNamespace(y=y)
        make("fedmlp", alpha=alpha).loss(PLAIN, batch, out, refs).backward()
        gradients.append(z.grad)
    assert torch.equal(gradients[0][[0, 2]], gradients[1][[0, 2]])
    assert not torch.equal(gradients[0][1], gradients[1][1])


def test_semantic_loss_is_a_mean_over_minority_examples():
    """Distances 1.5 and .5 (class 1), 2.5 (class 2), among four examples; class 0 is none of J."""
    p = rows(c0=[0.0, 0.0], c1=[0.0, 0.0], c2=[0.0, 0.0])
    refs = levels(p=p, minority=[1, 2])
    z = torch.tensor([[9.0, 9.0], [2.0, 2.0], [1.0, 1.0], [3.0, 3.0]])
    y = torch.tensor([0, 1, 1, 2])
    assert float(make("fedmlp").semantic_loss(z, y, refs)) == pytest.approx(4.5 / 3)
    assert float(make("fedmlp").semantic_loss(z[:1], y[:1], refs)) == 0


@pytest.mark.parametrize("on", list(itertools.product((True, False), repeat=3)))
def test_loss_is_the_sum_of_what_is_on(on):
    """The eight rows of the paper's Table 3."""
    switches = dict(zip(("loss_p", "loss_i", "loss_s"), on, strict=True))
    method = make("fedmlp", alpha=0.5, **switches)
    refs = levels(g=rows(c0=[0.0, 0.0], c1=[1.0, 1.0]), p=rows(c0=[5.0, 5.0], c1=[5.0, 5.0]),
                  minority=[1], memory=rows(c0=[1.0, 0.0]), o=[[0.0, 2.0]])  # fmt: skip
    z, y, logits = drawn(3, 2), torch.tensor([0, 1, 0]), drawn(3, 4, seed=1)
    out, batch = SimpleNamespace(features=z, logits=logits), SimpleNamespace(y=y)
    terms = (
        method.prototype_loss(z, y, refs),
        method.inter_task_loss(z, y, refs),
        0.5 * method.semantic_loss(z, y, refs),
    )
    assert all(float(t) > 0 for t in terms)
    expected = torch.nn.functional.cross_entropy(logits, y) + sum(
        t for t, is_on in zip(terms, on, strict=True) if is_on
    )
    torch.testing.assert_close(method.loss(PLAIN, batch, out, refs), expected)


def test_first_interaction_is_cross_entropy_alone(digits):
    """Nothing is known yet: the same bits as without any regulariser."""
    uploads = []
    for switches in ({}, OFF):
        experiment = tiny_experiment(method={"name": "fedmlp", **switches})
        ctx = context_of(experiment, digits)
        done = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        uploads.append(done.upload)
    assert all(torch.equal(uploads[1].weights[k], w) for k, w in uploads[0].weights.items())


# --- prototypes on the server ---------------------------------------------------------------------


def test_global_prototype_is_the_unweighted_mean():
    """(1, 2), (3, 4), (5, 0) -> (3, 2), whatever the counts and the order."""
    method, ctx = server(width=2)
    found = {
        c: {4: (torch.tensor(v), 1 + 9 * c)} for c, v in enumerate(([1.0, 2], [3.0, 4], [5.0, 0]))
    }
    for order in itertools.permutations(range(3)):
        uploads = {c: upload(ctx, found[c]) for c in order}
        state = method.aggregate(ctx, method.init_server(ctx.run), as_uploads(method, uploads))
        assert state.common.prototypes["class"].vectors.tolist() == [[3.0, 2.0]]
        assert state.common.prototypes["class"].labels.tolist() == [4]


def test_unreported_classes_stay():
    method, ctx = server()
    first = interact(
        method,
        ctx,
        method.init_server(ctx.run),
        {0: {2: (drawn(16), 1), 7: (drawn(16, seed=1), 1)}},
    )
    second = interact(method, ctx, first, {1: {7: (drawn(16, seed=2), 1)}})
    g = second.common.prototypes["class"]
    assert g.labels.tolist() == [2, 7]
    assert torch.equal(g.vectors[0], drawn(16))
    assert torch.equal(g.vectors[1], drawn(16, seed=2))  # overwritten: no running mean


def test_semantic_prototypes_of_four_points():
    """{0, 1, 10, 11}, v = 2: centres .5 and 10.5, members together."""
    method, ctx = server(width=2, v=2)
    found = {k: (torch.tensor([float(x), 0.0]), 1) for k, x in enumerate((0, 1, 10, 11))}
    state = interact(method, ctx, method.init_server(ctx.run), {0: found})
    p, a = state.common.prototypes["semantic"].vectors, state.common.weights[CLUSTER].tolist()
    assert sorted(p[:, 0].tolist()) == [0.5, 10.5]
    assert a[0] == a[1] != a[2] == a[3]
    assert p[a[0], 0] == 0.5


@pytest.mark.parametrize(("v", "known"), [(0, 9), (4, 3), (9, 9), (2, 9), (5, 1)])
def test_every_known_class_has_one_cluster(v, known):
    method, ctx = server(v=v)
    found = {k + 1: (drawn(16, seed=k), 1) for k in range(known)}
    state = interact(method, ctx, method.init_server(ctx.run), {0: found})
    g, p = state.common.prototypes["class"].vectors, state.common.prototypes["semantic"].vectors
    a = state.common.weights[CLUSTER].long()
    assert len(a) == len(g) == known
    assert len(p) == min(v or 4, known)  # the root of 10, rounded up
    for centre, row in enumerate(p):
        torch.testing.assert_close(row, g[a == centre].mean(0))
    if len(p) == known:  # a permutation of G
        assert sorted(a.tolist()) == list(range(known))
        torch.testing.assert_close(p[a], g)


def test_minority_is_the_lower_half():
    """gamma = .5 on CIFAR-10: 5000 … 2500, 36,223 in all; J = {5, …, 9}; gamma = .05: 17,023."""
    counts = long_tail_counts(5000, 10, 0.5)
    assert int(counts.sum()) == 36223
    assert minority_classes(counts) == [5, 6, 7, 8, 9]
    method, ctx = server()
    found = {k: (drawn(16, seed=k), int(n)) for k, n in enumerate(counts)}
    state = interact(method, ctx, method.init_server(ctx.run), {0: found})
    assert minority_of(state) == [5, 6, 7, 8, 9]
    tail = long_tail_counts(5000, 10, 0.05)
    assert (int(tail.sum()), int(tail[-1])) == (17023, 250)


def test_a_revisited_task_counts_once():
    """Clients come back to a task in every round; other tasks and clients add up."""
    method, ctx = server()
    found = {0: {0: (drawn(16), 30), 1: (drawn(16), 20)}, 1: {1: (drawn(16), 25)}}
    state = interact(method, ctx, method.init_server(ctx.run), found)
    assert minority_of(state) == [0]  # 30 against 45
    for _ in range(3):
        state = interact(method, replace(ctx, at=Position(1, 0, 0)), state, found)
    assert sorted(state.own.weights) == ["counts/0/0", "counts/1/0"]
    assert minority_of(state) == [0]
    later = {0: {0: (drawn(16), 16)}}
    state = interact(method, replace(ctx, at=Position(2, 0, 1)), state, later)
    assert minority_of(state) == [1]  # 46 against 45


def test_nobody_is_a_minority_among_equals():
    found = {0: {k: (drawn(16, seed=k), 5) for k in range(4)}}
    method, ctx = server()
    state = interact(method, ctx, method.init_server(ctx.run), found)
    assert minority_of(state) == []


# --- the wire -------------------------------------------------------------------------------------


def test_bytes_of_ten_classes_and_four_clusters():
    """ResNet-18's width: 10 (8 + 4 d) + 4 v d = 28,752 B down and a bit a class; 20,560 B up."""
    method, ctx = server(width=512, v=4)
    found = {k: (drawn(512, seed=k), 9) for k in range(10)}
    state = interact(method, ctx, method.init_server(ctx.run), {0: found})
    common, personal = method.broadcast(ctx, state)
    assert not personal
    base = {k: w for k, w in common.weights.items() if k.startswith("base/")}
    mask = common.weights[MINORITY].nbytes
    assert mask == 2
    assert common.num_bytes() - Bundle(weights=base).num_bytes() - mask == 28752
    assert upload(ctx, found).num_bytes() - Bundle(weights=base).num_bytes() - 8 == 20560
    assert transported(common, method.payload_spec(ctx.run)[0]).num_bytes() == common.num_bytes()


@pytest.mark.parametrize("net", ["cnn5", "resnet18"])
def test_bytes_of_the_extractor(net):
    shape = (1, 28, 28) if net == "cnn5" else (3, 32, 32)
    run = RunFacts(tiny_experiment(method="fedmlp", net=net), Problem(shape, 10))
    shared = Bundle(weights=make("fedmlp").shared(run, run.initial_weights))
    assert shared.num_bytes() == {"cnn5": 2_570_240, "resnet18": 44_713_888}[net]


def test_no_head_leaves_the_client(digits):
    experiment = tiny_experiment(method="fedmlp")
    ctx = context_of(experiment, digits)
    sent = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)).upload
    assert not [k for k in sent.by_key() if "head/" in k]
    present = ctx.stream.train(0)[1].unique().tolist()
    assert sent.prototypes["class"].labels.tolist() == present
    assert Bundle(prototypes=sent.prototypes).num_bytes() == len(present) * (8 + 4 * 16)
    assert sent.num_evaluation_bytes() == 0


def test_heads_for_the_global_score_are_counted_apart(digits, tmp_path):
    """4 (d K + K) bytes up beside the method's own; the mean comes down to whoever scores."""
    shas = []
    for on in (False, True):
        out = tmp_path / str(on)
        experiment = tiny_experiment(method={"name": "fedmlp", "eval_upload_head": on})
        summary = run_in_process(experiment, digits, out, evaluator=True)
        lines = records_of(out)
        assert ("a_glo" in summary["metrics"]) == on
        assert "a_loc" in summary["metrics"]
        shas.append([line["bytes"]["per_client"]["0"]["up"] for line in lines])
        extra = [line["bytes"]["per_client"]["0"].get("eval_up", 0) for line in lines]
        assert set(extra) == {4 * (16 * 10 + 10) if on else 0}
    assert shas[0] == shas[1]


def test_global_model_has_the_mean_of_the_heads(digits):
    experiment = tiny_experiment(method={"name": "fedmlp", "eval_upload_head": True})
    method, sent = method_of(experiment), {}
    for client in (0, 1):
        ctx = context_of(experiment, digits, client)
        sent[client] = train_locally(method, ctx, *payload_of(experiment, ctx)).upload
    at = ServerContext(ctx.run, START, (0, 1))
    state = method.finish(
        at,
        method.aggregate(at, method.init_server(ctx.run), as_uploads(method, sent)),
        as_uploads(method, sent),
    )[0]
    common, personal = evaluation(method, at, state)
    assert sorted(personal, key=str) == [0, 1, 2, "evaluator"]
    part = personal["evaluator"]
    method.load(
        replace(ctx, view="global"),
        Bundle({**common.weights, **part.weights}, common.prototypes),
        Bundle(),
    )
    mean = (sent[0].weights["eval/head/weight"] + sent[1].weights["eval/head/weight"]) / 2
    torch.testing.assert_close(ctx.net.head.weight.detach(), mean)
    assert not [k for k in common.weights if k.startswith(("eval/", "head/"))]
    own = method.init_client(ctx.run, 0)
    method.load(ctx, Bundle({**common.weights, **part.weights}, common.prototypes), own)
    assert torch.equal(ctx.net.head.weight, own.weights["head/weight"])


# --- the client -----------------------------------------------------------------------------------


def visits(digits, switches, tasks):
    """Train client 0 on tasks in turn; return the states after each visit and the uploads."""
    experiment = tiny_experiment(method={"name": "fedmlp", **switches})
    method, states, uploads = method_of(experiment), [], []
    for number, task in enumerate(tasks):
        ctx = context_of(experiment, digits, 0, task, number)
        payload, state = payload_of(experiment, ctx)
        done = train_locally(method, ctx, payload, states[-1] if states else state)
        states.append(done.state)
        uploads.append(done.upload)
    return ctx, states, uploads


def test_memory_is_the_latest_vector_of_every_class(digits):
    ctx, states, uploads = visits(digits, {}, (0, 1, 0))
    memories = [s.prototypes["class"].rows() for s in states]
    sent = [u.prototypes["class"].rows() for u in uploads]
    assert memories[0].keys() < memories[1].keys() == memories[2].keys()  # never forgets a class
    for before, now, new in zip(memories, memories[1:], sent[1:], strict=False):
        for k, (vector, _) in now.items():
            assert torch.equal(vector, new[k][0] if k in new else before[k][0])
    x, y = ctx.stream.train(0)
    ctx.net.eval()
    z = ctx.net.features(x).detach()
    for k, (vector, count) in sent[2].items():
        torch.testing.assert_close(vector, z[y == k].mean(0))
        assert count == int((y == k).sum())


def test_losses_refer_to_what_was_remembered_and_received(digits):
    experiment = tiny_experiment(method={"name": "fedmlp", "v": 2})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    at = ServerContext(ctx.run, START, (0,))
    found = {k: (drawn(16, seed=k), n) for k, n in ((2, 50), (3, 40), (5, 10), (8, 1))}
    state = interact(method, at, method.init_server(ctx.run), {1: found})
    payload, _ = method.broadcast(at, state)
    memory = Prototypes.of({k: (drawn(16, seed=k + 50), 1) for k in (1, 4, 6, 7, 9)}, 16)
    refs = method.prepare(ctx, payload, Bundle(prototypes={"class": memory}))
    assert refs.global_class.known.nonzero()[:, 0].tolist() == [2, 3, 5, 8]
    assert torch.equal(refs.global_class.vectors[5], drawn(16, seed=5))
    assert refs.global_semantic.known.nonzero()[:, 0].tolist() == [5, 8]  # J
    a, p = payload.weights[CLUSTER].tolist(), payload.prototypes["semantic"].vectors
    assert torch.equal(refs.global_semantic.vectors[8], p[a[3]])
    assert refs.local_class.known.nonzero()[:, 0].tolist() == [1, 4, 6, 7, 9]
    expected = cluster(memory.vectors, 3, seed=0)[0]  # the root of 5, rounded up
    assert torch.equal(refs.local_semantic, expected)
    assert len(replace(method, u=1).prepare(ctx, payload, Bundle(prototypes={"class": memory}))
               .local_semantic) == 1  # fmt: skip


def test_unselected_clients_keep_their_memory(digits, tmp_path):
    """Byte for byte: one of three trains in each of four rounds."""
    experiment = tiny_experiment(
        method="fedmlp", schedule={"rounds": 4, "per_round": 1}, scenario={"tasks": 1}
    )
    seen = []

    def before(order):
        if order.kind == rpc.ORDER_KIND_TRAIN:
            files = sorted((tmp_path / "out" / "clients").glob("*/state-*.safetensors"))
            newest = {f.parent.name: f.read_bytes() for f in files}
            seen.append((order.client_id, newest))

    run_in_process(experiment, digits, tmp_path / "out", before=before)
    for (trains, states), (_, later) in itertools.pairwise(seen):
        assert all(later[c] == s for c, s in states.items() if c != trains)


def test_inference_by_prototype(digits):
    experiment = tiny_experiment(method="fedmlp")
    ctx = context_of(experiment, digits)
    x = ctx.stream.test(0)[0]
    z = ctx.net.features(x).detach()
    g = Prototypes.of({3: (z[0], 1), 6: (z[1], 1)}, 16)
    payload = Bundle(prototypes={"class": replace(g, counts=g.counts[:0])})
    first = {}
    for rule in ("classifier", "prototype"):
        found = make("fedmlp", inference=rule).predict(ctx, payload, Bundle(), x)
        first[rule] = make("fedmlp", inference=rule).rules[0]
        assert found["prototype"].argmax(1)[:2].tolist() == [3, 6]
        assert torch.equal(found["classifier"], ctx.net(x))
    assert first == {"classifier": "classifier", "prototype": "prototype"}


# --- what it becomes without its parts ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedExtractor(FedAvg):
    """The uniform mean of extractors; heads stay, nothing else happens."""

    name: ClassVar[str] = "shared-extractor"
    weighting: str = "uniform"

    @property
    def views(self):
        return ("after_local", "after_downlink")

    def shares(self, run, name):
        return name.startswith("base/")


def weights_after(out):
    """Return the final common weights, and every client's."""
    newest = max((out / "server").glob("state-*.safetensors"))
    found = {"server": load_named(newest)[0]["common"].weights}
    for place in sorted((out / "clients").iterdir()):
        files = sorted(place.glob("personal*.safetensors"))
        found[place.name] = load_named(files[-1])[0] if files else {}
    return found


def test_without_losses_it_is_the_mean_of_extractors(digits, tmp_path, monkeypatch):
    monkeypatch.setitem(fedmodels.methods._MODULES, "shared-extractor", "")
    monkeypatch.setitem(fedmodels.methods._CLASSES, "shared-extractor", SharedExtractor)
    for name, switches in (("shared-extractor", {}), ("fedmlp", OFF)):
        method, schedule = {"name": name, **switches}, {"rounds": 1}
        experiment = tiny_experiment(method=method, net=NORMED, schedule=schedule)
        run_in_process(experiment, digits, tmp_path / name)
    same_models(tmp_path / "shared-extractor", tmp_path / "fedmlp")


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_sharing_all_without_losses_is_fedavg(digits, tmp_path, weighting):
    for name, switches in (("fedavg", {}), ("fedmlp", {"share": "all", **OFF})):
        method = {"name": name, "weighting": weighting, **switches}
        run_in_process(tiny_experiment(method=method), digits, tmp_path / name)
    same_models(tmp_path / "fedavg", tmp_path / "fedmlp")


def test_losses_change_the_model(digits, tmp_path):
    for name in ("loss_p", "loss_i", "loss_s", "none"):
        switches = {k: k == name for k in OFF}
        experiment = tiny_experiment(method={"name": "fedmlp", **switches}, scenario={"gamma": 0.5})
        run_in_process(experiment, digits, tmp_path / name)
    without = weights_after(tmp_path / "none")["server"]
    for name in OFF:
        found = weights_after(tmp_path / name)["server"]
        assert not all(torch.equal(found[k], w) for k, w in without.items() if k[:5] == "base/")


def same_models(one, other):
    """Check that server and clients hold the same weights, bit for bit, where both have any."""
    a, b = weights_after(one), weights_after(other)
    for name, tensor in a["server"].items():
        assert torch.equal(b["server"][name], tensor), name
    personal = [
        {p.parent.name: digest_of(p) for p in (out / "clients").glob("*/personal*")}
        for out in (one, other)
    ]
    assert personal[0] == personal[1]
    assert len(personal[0]) == 3


def test_experiment_keeps_its_switches():
    """The documented defaults; a wrong value is an error that names the key."""
    method = make("fedmlp")
    assert (method.alpha, method.tau, method.u, method.v) == (1, 1, 0, 0)
    assert settings_of(method)["reading"]["share"] == "extractor"
    assert method.views == ("after_local", "after_downlink")
    assert local_view(method) == "after_downlink"
    assert make("fedmlp", share="all").views == ("global", "after_local")
    for wrong in ({"tau": 0.0}, {"u": -1}, {"kl_dir": "zc"}):
        with pytest.raises(ConfigError, match="method"):
            make("fedmlp", **wrong)


def test_what_leaves_can_be_clipped_blurred_and_held_back(digits):
    """The memory of prototypes that stays is the same whatever leaves."""

    def result(**switches):
        experiment = tiny_experiment(method={"name": "fedmlp", **switches})
        ctx = context_of(experiment, digits, 0)
        return train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))

    plain = result()
    held = plain.state.prototypes["class"].rows()
    fewest = min(count for _, count in held.values())
    for switches in ({"clip_norm": 0.01}, {"noise_std": 0.1}, {"min_count": fewest + 1}):
        other = result(**switches)
        kept, sent = (b.prototypes["class"].rows() for b in (other.state, other.upload))
        assert all(torch.equal(kept[k][0], held[k][0]) for k in held)
        if "clip_norm" in switches:
            assert all(float(v.norm()) == pytest.approx(0.01) for v, _ in sent.values())
        elif "noise_std" in switches:
            assert not any(torch.equal(sent[k][0], held[k][0]) for k in held)
        else:
            assert sent.keys() == {k for k, (_, count) in held.items() if count > fewest}


# --- runs without a known end ---------------------------------------------------------------------


def counted(client, task, *counts):
    """Return an upload with examples of classes 0, 1, … and its context in an open run."""
    run = RunFacts(tiny_experiment(), Problem((1, 8, 8), len(counts)))
    rows = {k: (torch.zeros(1), n) for k, n in enumerate(counts) if n}
    upload = Bundle(prototypes={"class": Prototypes.of(rows, 1)})
    ctx = ServerContext(run, Position(0, 0, 5), (client,), tasks={client: task})
    return ctx, {client: upload}


def test_counts_of_earlier_tasks_are_one_sum_by_hand():
    """Client 7 reports (2, 1) on task 0, twice; (0, 4) on task 1; (1, 0) on task 3.

    Every task counts once: 2 + 0 and 1 + 4 of the earlier ones, then (1, 0). Client 8 has (9, 0).
    """
    own = {}
    reports = [(7, 0, 2, 1), (8, 0, 9, 0), (7, 0, 2, 1), (7, 1, 0, 4), (7, 3, 1, 0)]
    for client, task, *counts in reports:
        ctx, uploads = counted(client, task, *counts)
        own = class_counts(ctx, own, uploads)
        assert len([name for name in own if name.startswith("counts/7/")]) <= 2
    assert {name: found.tolist() for name, found in own.items()} == {
        "counts/7/earlier": [2, 5],
        "counts/7/3": [1, 0],
        "counts/8/0": [9, 0],
    }
    assert minority_by_counts(own) == [1]  # 5 of 17
    state = ServerState(Bundle(), Bundle(own), {7: Bundle()})
    found = forgotten(make("fedmlp"), state, {7})
    assert (found.own.weights.keys(), found.clients) == ({"counts/8/0"}, {})
    closed, uploads = counted(7, 0, 1, 1)
    kept = class_counts(replace(closed, tasks={}), own, uploads)  # a client may come back to a task
    assert kept.keys() == {*own, "counts/7/5"}


def test_the_ninth_class_takes_another_byte_of_the_minority():
    held = {MINORITY: torch.tensor([3], dtype=torch.uint8), "counts/7/0": torch.arange(8)}
    found = grown_levels({**held, "another": torch.zeros(8)}, 9)
    wanted = {MINORITY: [3, 0], "counts/7/0": [*range(8), 0]}
    assert {name: kept.tolist() for name, kept in found.items()} == wanted
