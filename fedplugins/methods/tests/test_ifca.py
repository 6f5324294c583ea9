"""IFCA: the choice of a model, its mean, and what the models have in common."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedmodels.config.reduction import Reduction
from fedmodels.errors import ConfigError, PayloadError, TooFewClients
from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.reductions.rule import rule_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.roles import of_role
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import START, Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from tests.conftest import (
    OneTask,
    context_of,
    linear_context,
    method_of,
    payload_of,
    server_context,
    tiny_experiment,
)

HEAD = "head/weight"
NEVER = Bundle(scalars={"model": 0.0, "task": -1.0})
"""The private state of a client that has not trained."""
ONE_STEP = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}


def ifca(training=None, **fields):
    return tiny_experiment(method={"name": "ifca", **fields}, training=training or {})


def reduced(experiment, state, uploads):
    run = RunFacts(experiment, Problem((1,), 2))
    run.__dict__["forms"] = {HEAD: torch.zeros(2, 1)}
    method = method_of(experiment)
    ctx = ServerContext(run, START, tuple(uploads))
    return reduce(method, ctx, state, as_uploads(method, uploads))


def test_two_clusters_by_hand():
    """All matrices are a multiple a of (1, -1): theta_0 has a = 1, theta_1 has a = -1; lr is 1.

    Client 0 has x = 1, y = 0: losses ln(1 + e^-2) and ln(1 + e^2), so it takes theta_0; its step is
    a = 1 + q with q = 1 - sigmoid(2) = .1192029. Client 1 has x = 1, y = 1: theta_1, a = -(1 + q).
    Client 2 has x = 2, y = 1 three times: theta_1, a = -(1 + 2 r) with r = 1 - sigmoid(4) =
    .0179862. Theta_1 = -(1.1192029 + 1.0359724) / 2 = -1.0775877 where clients count alike, and
    -(1.1192029 + 3 * 1.0359724) / 4 = -1.0567800 by examples.
    """
    ray = torch.tensor([[1.0], [-1.0]])
    payload = Bundle({f"model0/{HEAD}": ray, f"model1/{HEAD}": -ray})
    experiment, uploads, taken = ifca(ONE_STEP), {}, []
    for client, (x, y) in enumerate([([[1.0]], [0]), ([[1.0]], [1]), ([[2.0]] * 3, [1] * 3)]):
        ctx = linear_context(experiment, x, y, client)
        result = train_locally(method_of(experiment), ctx, payload, NEVER)
        uploads[client] = result.upload
        taken.append(result.state.scalars["model"])
    assert taken == [0, 1, 1]
    assert [list(upload.weights) for upload in uploads.values()] == [
        [f"model{j}/{HEAD}"] for j in (0, 1, 1)
    ]
    state, metrics = reduced(experiment, ServerState(payload), uploads)
    found = [state.common.weights[f"model{j}/{HEAD}"][0].item() for j in (0, 1)]
    assert found == pytest.approx([1.1192029, -1.0775877], abs=1e-6)
    assert metrics == {"models_trained": 1.0}
    state, _ = reduced(ifca(ONE_STEP, weighting="examples"), ServerState(payload), uploads)
    assert state.common.weights[f"model1/{HEAD}"][0].item() == pytest.approx(-1.05678, abs=1e-6)
    uploads[0].scalars["num_examples"] = 0.0
    for _ in range(2):  # nobody trained theta_0: it stays
        state, metrics = reduced(experiment, ServerState(payload), uploads)
        assert torch.equal(state.common.weights[f"model0/{HEAD}"], ray)
        assert metrics == {"models_trained": 0.5}
        uploads.pop(0, None)


def test_one_model_is_fedavg(digits):
    found = []
    for experiment in (ifca(models=1), tiny_experiment(method={"weighting": "uniform"})):
        ctx = context_of(experiment, digits)
        result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        found.append((result.upload.weights, result.loss))
    (mine, loss), (theirs, expected) = found
    assert loss == expected
    assert all(torch.equal(mine[f"model0/{key}"], tensor) for key, tensor in theirs.items())


def test_common_layers_have_the_mean_of_all_clients(digits):
    """With common = ("base/",) a model is its head; heads have means by model, the base one."""
    experiment = ifca(common=["base/"])
    method, uploads = method_of(experiment), {}
    ctx = context_of(experiment, digits)
    state = method.init_server(ctx.run)
    heads = {k for k in state.common.weights if k.startswith("model")}
    assert heads == {f"model{j}/head/{part}" for j in (0, 1) for part in ("weight", "bias")}
    for client, role in ((0, "model0"), (1, "model1"), (2, "model1")):
        weights = of_role(state.common.weights, "base") | of_role(state.common.weights, role)
        moved = {key: torch.full_like(t, client) for key, t in weights.items()}
        uploads[client] = Bundle(moved, scalars={"num_examples": 1.0})
    server = server_context(ctx.run, 0, (0, 1, 2))
    after, _ = reduce(method, server, state, as_uploads(method, uploads))
    values = {k.split("/")[0]: t.unique().tolist() for k, t in after.common.weights.items()}
    assert values == {"base": [1.0], "model0": [0.0], "model1": [1.5]}


@pytest.mark.parametrize(
    ("common", "line"),
    [
        (["base/", "bse/"], "no weight of the net begins with 'bse/'"),
        (["base/", "head/"], "there is only one model"),
    ],
)
def test_what_is_common_is_a_part_of_the_net(digits, common, line):
    experiment = ifca(common=common)
    with pytest.raises(ConfigError, match=line):
        method_of(experiment).init_server(context_of(experiment, digits).run)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (lambda w: {**w, **{k.replace("1", "0", 1): t for k, t in w.items()}}, "this one holds 2"),
        (lambda w: {}, "this one holds 0"),
        (lambda w: dict([*w.items()][1:]), "is missing"),
    ],
)
def test_an_upload_is_one_whole_model(digits, changed, line):
    experiment = ifca()
    ctx = context_of(experiment, digits)
    method = method_of(experiment)
    state = method.init_server(ctx.run)
    own = {k: t for k, t in state.common.weights.items() if k.startswith("model1/")}
    upload = Bundle(changed(own), scalars={"num_examples": 0.0})
    with pytest.raises(PayloadError, match=line):
        method.aggregate(server_context(ctx.run, 0, (0,)), state, as_uploads(method, {0: upload}))


def test_a_task_that_was_not_trained_on_says_nothing_of_the_model():
    """Predictions on a new task come before its labels are looked at; in training they are."""
    ray = torch.tensor([[1.0], [-1.0]])
    payload = Bundle({f"model0/{HEAD}": ray, f"model1/{HEAD}": -ray})
    method, state = make("ifca"), Bundle(scalars={"model": 0.0, "task": 0.0})
    ctx = replace(linear_context(ifca(), [[1.0]], [1]), at=Position(1, 1, 1))

    def loaded(view):
        here = replace(ctx, view=view, made={})
        method.load(here, payload, state)
        return weights_of(here.net)[HEAD][0].item()

    assert loaded("after_downlink") == 1.0
    assert loaded("") == -1.0
    state = NEVER  # nothing else tells which model is to be scored
    assert loaded("after_downlink") == -1.0
    ctx.stream = OneTask([], [])  # without examples nothing tells
    assert loaded("") == 1.0


def choice(view: str, state: Bundle, *multiples: float) -> int:
    """Return which model a client loads on its first task: each a multiple of (1, -1); y is 1."""
    weights = [torch.tensor([[a], [-a]]) for a in multiples]
    payload = Bundle({f"model{j}/{HEAD}": w for j, w in enumerate(weights)})
    ctx = linear_context(ifca(models=len(weights)), [[1.0]], [1])
    ctx = replace(ctx, view=view, made={})
    make("ifca", models=len(weights)).load(ctx, payload, state)
    held = weights_of(ctx.net)[HEAD]
    (found,) = [j for j, w in enumerate(weights) if torch.allclose(held, w, equal_nan=True)]
    return found


@pytest.mark.parametrize("broken", [0, 1])
def test_a_model_that_diverged_is_nobodys(broken):
    """Its loss is NaN, and the least for argmin."""
    multiples = [-1.0, -1.0]
    multiples[broken] = float("nan")
    assert choice("", NEVER, *multiples) == 1 - broken


@pytest.mark.parametrize("view", ["after_local", "after_downlink"])
def test_a_client_is_scored_with_the_model_that_fits_its_task_now(view):
    """It trained model 0 on this task; the means moved since, and model 1 has the least loss."""
    assert choice(view, Bundle(scalars={"model": 0.0, "task": 0.0}), 1.0, -1.0) == 1
    assert choice(view, Bundle(scalars={"model": 1.0, "task": 0.0}), -1.0, 1.0) == 0


def test_a_rule_holds_within_each_group():
    """Krum with one attacker needs five uploads: a smaller group is left out; all small: raises."""
    rule = rule_of(Reduction(reduce="median"))
    sent = {c: Bundle({"w": torch.tensor([float(c)])}) for c in range(4)}
    uploads = Uploads(sent, lambda upload: 1.0, "each", rule=rule)
    found = uploads.means({"a": {c: sent[c].weights for c in (0, 1, 3)}, "b": {2: sent[2].weights}})
    assert {key: mean["w"].item() for key, mean in found.items()} == {"a": 1.0, "b": 2.0}
    assert uploads.was_asked
    krum = rule_of(Reduction(reduce="krum", attackers=1))
    uploads = Uploads(sent, lambda upload: 1.0, "each", rule=krum)
    many = {c: Bundle({"w": torch.tensor([float(c)])}).weights for c in range(6)}
    every = Uploads(dict.fromkeys(many, sent[0]), lambda upload: 1.0, "each", rule=krum)
    assert [*every.means({"a": {c: many[c] for c in range(5)}, "b": {5: many[5]}})] == ["a"]
    with pytest.raises(TooFewClients, match="krum"):
        uploads.means({"a": {0: sent[0].weights}})


def test_groups_share_what_counts():
    counts = {0: 1.0, 1: 3.0, 2: 4.0, 3: 0.0}
    sent = {c: Bundle({"w": torch.tensor([float(c)])}, scalars={"n": n}) for c, n in counts.items()}
    uploads = Uploads(sent, lambda upload: upload.scalars["n"], "each")
    groups = {"a": {0: sent[0].weights, 1: sent[1].weights}, "b": {2: sent[2].weights}}
    found = uploads.means({**groups, "c": {3: sent[3].weights}})
    assert {key: mean["w"].item() for key, mean in found.items()} == {"a": 0.75, "b": 2.0}
    assert uploads.share_of_each() == {0: 0.125, 1: 0.375, 2: 0.5}


def test_a_server_optimizer_takes_no_step_with_a_model_that_nobody_trained():
    """Its moments stay as well: Adam's would go on moving it."""
    ray = torch.tensor([[1.0], [-1.0]])
    weights = {f"model0/{HEAD}": ray, f"model1/{HEAD}": -ray}
    moments = {f"{kind}/{key}": torch.ones(2, 1) for key in weights for kind in ("m", "v")}
    experiment = tiny_experiment(
        method={"name": "ifca"}, server_optimizer={"name": "fedadam", "lr": 0.1}
    )
    run = RunFacts(experiment, Problem((1,), 2))
    run.__dict__.update(forms={HEAD: torch.zeros(2, 1)}, parameters=(HEAD,))
    upload = Bundle({f"model1/{HEAD}": ray}, scalars={"num_examples": 1.0})
    method, before = make("ifca"), ServerState(Bundle(weights), optimizer=Bundle(moments))
    after, _ = reduce(
        method, ServerContext(run, START, (0,)), before, as_uploads(method, {0: upload})
    )
    assert torch.equal(after.common.weights[f"model0/{HEAD}"], ray)
    assert not torch.equal(after.common.weights[f"model1/{HEAD}"], -ray)
    for kind in ("m", "v"):
        assert torch.equal(after.optimizer.weights[f"{kind}/model0/{HEAD}"], torch.ones(2, 1))
