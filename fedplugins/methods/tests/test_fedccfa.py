"""FedCCFA: balanced heads, clusters by class, the alignment, and what a cluster's members get."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.prototypes import ByClass
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.contexts import START, Position, ServerContext
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.methods.fedccfa import Aligned, balanced_rows, clusters
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

HEAD = "head/weight"
RAY = torch.tensor([[1.0], [-1.0]])
ONE_STEP = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}


def ccfa(**fields):
    method = {"name": "fedccfa", "head_lr_factor": 1.0, "balanced_epochs": 1, **fields}
    return tiny_experiment(method=method, training=ONE_STEP)


def sent(head, balanced, protos, n=4.0):
    """Return an upload with a head (a, b) of two classes, a balanced one, and {class: (p, n)}."""
    columns = {HEAD: head, f"balanced/{HEAD}": balanced}
    weights = {key: torch.tensor([[float(v)] for v in rows]) for key, rows in columns.items()}
    rows = {k: (torch.tensor([float(p)]), count) for k, (p, count) in protos.items()}
    return Bundle(weights, {"class": Prototypes.of(rows, 1)}, scalars={"num_examples": n})


def served(experiment, uploads, cohort=None):
    run = RunFacts(experiment, Problem((1,), 2))
    run.__dict__["forms"] = run.__dict__["initial_weights"] = {HEAD: torch.zeros(2, 1)}
    run.__dict__["width"] = 1
    method, ctx = method_of(experiment), ServerContext(run, START, cohort or tuple(uploads))
    state = method.init_server(run)
    given = as_uploads(method, uploads)
    return method.finish(ctx, method.aggregate(ctx, state, given), given)


@pytest.mark.parametrize(
    ("averages", "row", "proto"), [("uniform", 3.0, 2.0), ("examples", 4.0, 2.5)]
)
def test_clusters_by_class_average_rows_and_prototypes_by_hand(averages, row, proto):
    """In one dimension cosines are 1 or -1. Of class 0 the balanced rows are 1, 2 and -1: clients 0
    and 1 are alike to 2 alike, so their distance is 0; that of 0 and 2 is |cos(0, 1) - cos(2, 1)| =
    2. Of class 1 they are 1, -1 and -1: clients 1 and 2 are near.

    Class 0 has heads 1 and 5, of 1 and 3 examples: 3, or (1 + 15) / 4 = 4; prototypes 1 and 3: 2,
    or (1 + 9) / 4 = 2.5. Client 2 has no class 0, and keeps its row 7 and no prototype. Of class 1
    clients 1 and 2 have heads 0 and 2 and 1 example each: 1.
    """
    uploads = {
        0: sent((1, 9), (1, 1), {0: (1, 1), 1: (4, 3)}),
        1: sent((5, 0), (2, -1), {0: (3, 3), 1: (5, 1)}),
        2: sent((7, 2), (-1, -1), {1: (7, 1)}),
    }
    state, metrics = served(ccfa(averages=averages), uploads)
    heads = {c: own.weights[HEAD].flatten().tolist() for c, own in state.clients.items()}
    assert heads == {0: [row, 9.0], 1: [row, 1.0], 2: [7.0, 1.0]}
    known = {
        c: dict(zip(held.labels.tolist(), held.vectors.flatten().tolist(), strict=True))
        for c, own in state.clients.items()
        if (held := own.prototypes["class"])
    }
    assert known == {0: {0: proto, 1: 4.0}, 1: {0: proto, 1: 6.0}, 2: {1: 6.0}}
    assert metrics == {"clusters": 2.0}
    assert all(len(own.prototypes["class"].counts) == 0 for own in state.clients.values())


def test_who_did_not_train_moves_nothing_and_absent_clients_keep_their_heads():
    uploads = {0: sent((1, 9), (1, 1), {0: (1, 1)}), 1: sent((5, 0), (1, 1), {}, n=0.0)}
    state, _ = served(ccfa(), uploads)
    assert {*state.clients} == {0}
    assert state.clients[0].weights[HEAD].flatten().tolist() == [1.0, 9.0]


def test_distances_count_chains():
    """cos of 0, 10, 20 and 90 degrees: chains of neighbours join 0 to 20, and 90 stays alone."""
    angles = np.deg2rad([0, 10, 20, 90])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    cos = vectors @ vectors.T
    near = abs(cos[0, 2] - cos[1, 2]) + abs(cos[0, 3] - cos[1, 3])  # of 0 and 1, over two others
    assert clusters(vectors, near / 2 + 0.02) == [[0, 1, 2], [3]]
    assert clusters(vectors, 1e-6) == [[0], [1], [2], [3]]
    assert clusters(vectors, 9.0) == [[0, 1, 2, 3]]
    assert clusters(vectors[:2], 9.0) == [[0], [1]]
    assert clusters(np.zeros((3, 2)), 0.1) == [[0, 1, 2]]


def test_a_balanced_draw_has_as_many_of_each_class_as_of_the_rarest_but_five_at_most():
    y = torch.tensor([0] * 30 + [1] * 3 + [4] * 9)
    drawn = balanced_rows(y, torch.Generator().manual_seed(0))
    assert torch.bincount(y[drawn]).tolist() == [3, 3, 0, 0, 3]
    drawn = balanced_rows(y[y != 1], torch.Generator().manual_seed(0))
    assert torch.bincount(y[y != 1][drawn]).tolist() == [5, 0, 0, 0, 5]
    assert len({*drawn.tolist()}) == 10


def test_a_clients_heads_and_prototypes_by_hand():
    """Examples x = 1 of class 0 and x = 2 of class 1, lr 1, and the received head is a (1, -1), a =
    1. From a = 0, the run's first head, the balanced one steps by the mean of -1/2 and 2 * 1/2: a =
    -.25. From a = 1 the head takes (s(2) - 1 + 2 s(4)) / 2 = .9224123 off: .0775877. The base
    multiplies by w = 1, and then takes (2 a 2 s(4 a) - 2 a (1 - s(2 a))) / 2 = .0537418 off; class
    means are w and 2 w.
    """
    experiment, base = ccfa(), nn.Linear(1, 1, bias=False)
    ctx = linear_context(experiment, [[1.0], [2.0]], [0, 1])
    ctx = replace(ctx, net=SplitNet(base, nn.Linear(1, 2, bias=False), 1))
    first = {"base/weight": torch.ones(1, 1), HEAD: torch.zeros(2, 1)}
    ctx.run.__dict__["initial_weights"] = first
    received = Bundle({**first, HEAD: RAY})
    result = train_locally(method_of(experiment), ctx, received, Bundle())
    weights = result.upload.weights
    assert weights[f"balanced/{HEAD}"].flatten().tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
    assert weights[HEAD].flatten().tolist() == pytest.approx([0.0775877, -0.0775877], abs=1e-6)
    means = {k: (v.item(), n) for k, (v, n) in result.upload.prototypes["class"].rows().items()}
    assert means == {0: (pytest.approx(0.9462582), 1), 1: (pytest.approx(1.8925164), 1)}


@pytest.mark.parametrize(("known", "pull"), [((True, True), 0.3132617), ((True, False), 0.0)])
def test_the_alignment_by_hand(known, pull):
    """Logits are 0, so the loss is ln 2 = .6931472 without alignment. The feature (1, 0) has the
    cosines 1 and 0 with the prototypes: at temperature 1 the cross-entropy is ln(1 + 1/e) =
    .3132617, and 0 where the other class has no prototype. It weighs the entropy ln 2 over gamma.
    """
    method = make("fedccfa", temperature=1.0, gamma=1.0)
    ctx = linear_context(ccfa(), [[1.0, 0.0]], [0])
    features = torch.tensor([[1.0, 0.0]], requires_grad=True)
    refs = Aligned(ByClass(torch.eye(2), torch.tensor(known)), math.log(2), {})
    batch = Batch(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([0]))
    loss = method.loss(ctx, batch, Output(features, torch.zeros(1, 2)), refs)
    assert loss.item() == pytest.approx(0.6931472 + 0.6931472 * pull, abs=1e-6)


@pytest.mark.parametrize(("at", "aligned"), [(19, False), (20, True)])
def test_alignment_begins_in_a_round_and_weighs_by_the_entropy_of_classes(at, aligned):
    experiment = ccfa(gamma=2.0)
    ctx = linear_context(experiment, [[1.0], [1.0], [2.0], [2.0]], [0, 0, 1, 1])
    ctx = replace(ctx, at=Position(at, at, 0))
    protos = {"class": Prototypes.of({1: (torch.tensor([3.0]), 1)}, 1)}
    refs = method_of(experiment).prepare(ctx, Bundle({HEAD: RAY}, protos), Bundle())
    assert refs.weight == pytest.approx(math.log(2) / 2)
    assert (refs.targets is not None) == aligned
    if aligned:
        assert refs.targets.known.tolist() == [False, True]
        assert refs.targets.vectors.tolist() == [[0.0], [3.0]]


def test_without_clusters_and_alignment_a_client_trains_as_with_fedrep(digits):
    found = []
    for method in (
        {"name": "fedccfa", "head_lr_factor": 1.0},
        {"name": "fedrep", "head_epochs": 1, "base_epochs": 2},
    ):
        experiment = tiny_experiment(method=method, training={"local_epochs": 2})
        ctx = context_of(experiment, digits)
        found.append(train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx)))
    mine, theirs = found
    assert mine.loss == theirs.loss
    for key, tensor in theirs.upload.weights.items():
        assert torch.equal(mine.upload.weights[key], tensor), key


def test_a_head_without_a_row_for_each_class_is_refused():
    run = RunFacts(ccfa(), Problem((1,), 3))
    run.__dict__["initial_weights"] = {"head/0.weight": torch.zeros(2, 1)}
    with pytest.raises(ConfigError, match="has no row for each of 3 classes"):
        make("fedccfa").init_server(run)


def test_a_client_without_examples_sends_the_first_balanced_head():
    experiment = ccfa(head_epochs=0)
    ctx = linear_context(experiment, [[1.0]], [0])
    ctx = replace(ctx, net=SplitNet(nn.Linear(1, 1, bias=False), ctx.net.head, 1))
    ctx.stream.x, ctx.stream.y = ctx.stream.x[:0], ctx.stream.y[:0]
    first = {"base/weight": torch.ones(1, 1), HEAD: 3 * RAY}
    ctx.run.__dict__["initial_weights"] = first
    result = train_locally(method_of(experiment), ctx, Bundle({**first, HEAD: RAY}), Bundle())
    assert torch.equal(result.upload.weights[f"balanced/{HEAD}"], 3 * RAY)
    assert result.upload.scalars["num_examples"] == 0
