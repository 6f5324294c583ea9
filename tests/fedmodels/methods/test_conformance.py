"""What every registered method must do, whatever it computes."""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

from fedmodels.methods import make, method_class, names
from fedmodels.methods.bases.remembering import Remembering
from fedmodels.methods.bases.replay import Replaying
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.archive import load, load_named, save, save_named
from fedmodels.tensors.bundle import Bundle, Problem, check_finite, state_digest, tensor_bytes
from fedmodels.training.loop import train_locally
from fedmodels.training.method import Batch, Method, Output, Run
from fedpb import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process, transported
from tests.conftest import (
    TABLES,
    context_of,
    method_of,
    payload_of,
    server_context,
    tiny_experiment,
    write_server_data,
)

ALIGNED = {"name": "vit-tiny", "mlp_ratio": 1, "blocks": 2, "alp": True, "prototypes": [16, 8]}

NEEDS: dict[str, dict[str, object]] = {"fedali": {"net": ALIGNED}}
"""Tables a method cannot do without, by name: ``{"fedali": {"net": {"name": "hart", …}}}``."""

SMALL_GENERATORS = {"generator_width": 4, "generator_epochs": 5, "n_check": 16}
SMALL_MEMORY = {"latent": 16, "generator_width": 4}
SMALL: dict[str, dict[str, object]] = {
    "pfedgrp": {**SMALL_GENERATORS, "server_volume": 12, "w_epochs": 2},
    "fedavg-replay": SMALL_GENERATORS,
    "pfedgraph-replay": SMALL_GENERATORS,
    "creff": {"match_steps": 5, "crt_epochs": 2},
    "mfcl": {**SMALL_MEMORY, "generator_steps": 5, "generator_batch": 16, "synthetic_batch": 8},
    "target": {
        **SMALL_MEMORY,
        "batches": 2,
        "synthesis_batch": 16,
        "g_steps": 3,
        "kd_steps": 3,
        "num_images": 24,
        "kd": 1.0,
    },
    "fedic": {"fine_tuning_steps": 5, "calibration_steps": 5, "distillation_steps": 5},
    "af-fcl": {"flow_hidden": 8},
    "fedcil": {"iterations": 4, "md_iter": 3, "generator_width": 2, "replay_batch": 8},
}
"""Hyper-parameters that make a method fast enough for so many runs, by name."""

VARIANTS = [
    ("fedavg", {"weighting": "uniform"}),
    ("centralized", {"data": "own"}),
    ("fedmlp", {"share": "all", "proto_agg": "all_latest", "clustering": "finch"}),
    ("fedmlp", {"share": "shallow(1)", "eval_upload_head": True, "inference": "prototype"}),
    ("pfedgrp", {"generator_decouple": False, "replay_labels": "soft"}),
    ("target", {"sends": "generator", "renew": "round"}),
    ("fedali", {"wire_prototypes": "both", "keep_personal_prototypes": True}),
]
"""Switches that change what travels or who trains."""

CASES = [*((name, {}) for name in names()), *VARIANTS]
EVERY_CASE = pytest.mark.parametrize(
    "case", CASES, ids=["-".join([name, *map(str, switches.values())]) for name, switches in CASES]
)
EVERY_NAME = pytest.mark.parametrize("name", names())


def experiment_for(case, **overrides):
    name, switches = case
    method = {"name": name, **SMALL.get(name, {}), **switches}
    return tiny_experiment(method=method, **{**NEEDS.get(name, {}), **overrides})


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """The summary and directory of a case's whole run, made once."""
    done: dict[str, tuple[dict, Path]] = {}

    def run(case):
        key = repr(case)
        if key not in done:
            out = tmp_path_factory.mktemp("run") / "out"
            done[key] = run_in_process(experiment_for(case), digits, out), out
        return done[key]

    return run


def copy_of(*bundles):
    return [{key: bytes(tensor_bytes(t)) for key, t in b.flat().items()} for b in bundles]


def trained(case, root, clients=(0, 1)):
    """Return method, run, server state, and each client's result of one interaction."""
    experiment = experiment_for(case)
    method, results = method_of(experiment), {}
    for client in clients:
        ctx = context_of(experiment, root, client)
        results[client] = train_locally(method, ctx, *payload_of(experiment, ctx))
    return method, ctx.run, method.init_server(ctx.run), results


# --- what it is -----------------------------------------------------------------------------------


@EVERY_NAME
def test_hyper_parameters_survive_toml(name):
    method = make(name)
    text = tomli_w.dumps({"method": {"name": name, **method.hyper_parameters()}})
    table = tomllib.loads(text)["method"]
    assert make(table.pop("name"), **table) == method


@EVERY_NAME
def test_only_fedavg_is_inherited(name):
    cls = method_class(name)
    assert cls.__bases__ in ((FedAvg,), (Method,), (Replaying,), (Remembering,))
    assert cls.name == name
    assert cls.citation


@EVERY_CASE
def test_views_are_known(case):
    method = make(case[0], **case[1])
    assert method.views
    assert set(method.views) <= {"global", "after_local", "after_downlink"}


# --- a whole run ----------------------------------------------------------------------------------


@EVERY_CASE
def test_arrival_does_not_matter(case, finished, digits, tmp_path):
    """Two runs of one seed agree to the bit, whatever the order in which uploads come."""
    first, _ = finished(case)
    second = run_in_process(
        experiment_for(case), digits, tmp_path / "out", arrival=random.Random(3)
    )
    assert second["state_sha256"] == first["state_sha256"]
    assert second["metrics"] == first["metrics"]


@EVERY_CASE
def test_seed_matters(case, finished, digits, tmp_path):
    experiment = experiment_for(case, seed=1, schedule={"rounds": 1})
    other = run_in_process(experiment, digits, tmp_path / "out")
    assert other["state_sha256"] != finished(case)[0]["state_sha256"]


@EVERY_NAME
def test_bfloat16_stays_within_the_net(name, digits, tmp_path):
    """What travels is checked against the method's spec, which knows float32 alone."""
    half = {"precision": "bfloat16"}
    experiment = experiment_for((name, {}), schedule={"rounds": 1}, training=half)
    summary = run_in_process(experiment, digits, tmp_path / "out")
    assert all(np.isfinite(value) for value in summary["metrics"].values())
    plain, rounded = (context_of(e, digits, 0) for e in (experiment_for((name, {})), experiment))
    x = plain.stream.test(0)[0][:8]
    assert rounded.run.make_net().mixed_precision
    assert not plain.run.make_net().mixed_precision
    assert not torch.equal(*(ctx.run.make_net().eval()(x) for ctx in (plain, rounded)))


@EVERY_CASE
def test_metrics_are_fractions(case, finished):
    summary, out = finished(case)
    assert {"a_glo", "a_loc"} & summary["metrics"].keys()
    for key, value in summary["metrics"].items():
        assert np.isfinite(value), key
        assert key == "loss" or -1 <= value <= 1, key
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 4


@EVERY_CASE
def test_client_that_is_not_selected_keeps_its_state(case, digits, tmp_path):
    """One of three clients trains in a round; the newest private state of the others stays."""
    schedule = {**TABLES["schedule"], "rounds": 4, "per_round": 1}
    experiment = experiment_for(case, schedule=schedule, scenario={"tasks": 1})
    seen, out = [], tmp_path / "out"

    def before(order):
        if order.kind in (rpc.ORDER_TRAIN, rpc.ORDER_FINISH):
            trains = order.client_id if order.kind == rpc.ORDER_TRAIN else None
            seen.append((trains, newest_states(out / "clients")))

    run_in_process(experiment, digits, out, before=before)
    stateful = method_of(experiment).keeps_state(Run(experiment, Problem((1, 8, 8), 10)))
    assert bool(seen[-1][1]) == stateful
    for (trains, states), (_, later) in itertools.pairwise(seen):
        for client in states:
            if client != trains:
                assert later[client] == states[client]


def newest_states(root):
    return {
        directory.name: max(directory.glob("state-*.safetensors")).read_bytes()
        for directory in root.iterdir()
        if list(directory.glob("state-*.safetensors"))
    }


# --- one interaction ------------------------------------------------------------------------------


@EVERY_CASE
def test_aggregate_of_one_client_is_its_weights(case, digits):
    method, run, state, results = trained(case, digits, clients=(1,))
    upload = results[1].upload
    after = method.aggregate(server_context(run, 0, (1,)), state, {1: upload})
    for name, tensor in after.common.weights.items():
        if name in upload.weights:
            assert torch.equal(tensor, upload.weights[name]), name
    assert after.common.weights.keys() == state.common.weights.keys()


@EVERY_CASE
def test_server_half_leaves_its_inputs_alone(case, digits):
    method, run, state, results = trained(case, digits)
    uploads = {c: r.upload for c, r in results.items()}
    ctx = server_context(run, 0, (0, 1))
    before = copy_of(*(b for _, b in state.named()), *uploads.values())
    reduced = method.aggregate(ctx, state, uploads)
    middle = copy_of(*(b for _, b in reduced.named()))
    after, _ = method.finish(ctx, reduced, uploads)
    assert copy_of(*(b for _, b in state.named()), *uploads.values()) == before
    assert copy_of(*(b for _, b in reduced.named())) == middle
    middle = copy_of(*(b for _, b in after.named()))
    method.broadcast(ctx, after)
    assert copy_of(*(b for _, b in after.named())) == middle


@EVERY_CASE
def test_client_half_leaves_its_inputs_alone(case, digits):
    experiment = experiment_for(case)
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    x, y = ctx.stream.train(ctx.task)
    before = copy_of(payload, state), x.clone(), y.clone()
    result = train_locally(method, ctx, payload, state)
    assert copy_of(payload, state) == before[0]
    assert torch.equal(x, before[1])
    assert torch.equal(y, before[2])
    leaves = copy_of(result.upload, result.state)
    with torch.no_grad():  # what left the net is a copy, not a view of it
        for parameter in ctx.net.parameters():
            parameter.add_(1.0)
    assert copy_of(result.upload, result.state) == leaves


@EVERY_CASE
def test_loss_leaves_its_inputs_alone(case, digits):
    experiment = experiment_for(case)
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    x, y = (t[:8] for t in method.training_data(ctx, refs))
    batch = Batch(x.clone(), y.clone(), torch.arange(8))
    features = ctx.net.features(batch.x)
    out = Output(features, ctx.net.head(features))
    weights = copy_of(Bundle(weights={k: p.detach() for k, p in ctx.net.named_parameters()}))
    kept = out.features.clone(), out.logits.clone()
    loss = method.loss(ctx, batch, out, refs)
    assert loss.shape == ()
    assert loss.requires_grad
    assert torch.equal(batch.x, x)
    assert torch.equal(batch.y, y)
    assert torch.equal(out.features, kept[0])
    assert torch.equal(out.logits, kept[1])
    found = Bundle(weights={k: p.detach() for k, p in ctx.net.named_parameters()})
    assert copy_of(found) == weights


@EVERY_CASE
def test_states_survive_the_archive(case, digits, tmp_path):
    method, run, state, results = trained(case, digits)
    ctx = server_context(run, 0, (0, 1))
    uploads = {c: r.upload for c, r in results.items()}
    state, _ = method.finish(ctx, method.aggregate(ctx, state, uploads), uploads)
    save_named(tmp_path / "server", dict(state.named()), {})
    loaded = load_named(tmp_path / "server")[0]
    kept = [(name, bundle) for name, bundle in state.named() if bundle.flat()]
    assert state_digest([(n, loaded[n]) for n, _ in kept]) == state_digest(kept)
    save(tmp_path / "client", results[0].state, {})
    assert copy_of(load(tmp_path / "client")[0]) == copy_of(results[0].state)


@EVERY_CASE
def test_private_state_has_one_shape(case, digits):
    """A client that was never selected holds what every other one does."""
    method, run, _, results = trained(case, digits)
    initial = method.init_client(run, 0)
    assert bool(initial.flat()) <= method.keeps_state(run)
    assert bool(results[0].state.flat()) <= method.keeps_state(run)
    missing = initial.weights.keys() - results[0].state.weights.keys()
    assert not missing


@EVERY_CASE
def test_what_travels_is_what_is_expected(case, digits):
    """Payloads and uploads pass the codec under the specs their receivers derive themselves."""
    method, run, state, results = trained(case, digits)
    for result in results.values():
        assert copy_of(transported(result.upload, method.upload_spec(run))) == copy_of(
            result.upload
        )
        check_finite(result.state)
    ctx = server_context(run, 1, (0, 1))
    uploads = {c: r.upload for c, r in results.items()}
    after, _ = method.finish(ctx, method.aggregate(ctx, state, uploads), uploads)
    for now in (state, after):
        common, personal = method.broadcast(ctx, now)
        specs = method.payload_spec(run)
        assert copy_of(transported(common, specs[0])) == copy_of(common)
        for part in personal.values():
            assert copy_of(transported(part, specs[1])) == copy_of(part)


@EVERY_CASE
def test_predictions_are_scores_of_classes(case, digits):
    experiment = experiment_for(case)
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    result = train_locally(method, ctx, payload, state)
    ctx.net.eval()
    x = ctx.stream.test(0)[0]
    with torch.no_grad():
        for inputs in (x, x[:1]):
            found = method.predict(ctx, payload, result.state, inputs)
            assert found
            for rule, scores in found.items():
                assert scores.shape == (len(inputs), 10), rule
                assert not torch.isnan(scores).any(), rule


# --- clients with little --------------------------------------------------------------------------

FEW = [[3] * 20, [5], []]
"""Training labels of three clients: one class, one example, nothing."""


@pytest.fixture(scope="module")
def few(digits, tmp_path_factory):
    """A partition whose clients hold a single class, a single example, and nothing to train on."""
    root = tmp_path_factory.mktemp("few")
    rng = np.random.default_rng(0)
    for client, labels in enumerate(FEW):
        facts = json.loads((digits / "0" / "client.json").read_text())
        tests = [3, 5, 7] if labels else []
        for part, ys in (("train", labels), ("test", tests)):
            place = root / str(client) / "task-0"
            place.mkdir(parents=True, exist_ok=True)
            x = rng.uniform(0, 16, (len(ys), *facts["input_shape"])).astype(np.float32)
            np.save(place / f"{part}_x.npy", x)
            np.save(place / f"{part}_y.npy", np.array(ys, dtype=np.int64))
        facts.pop("tasks")
        (root / str(client) / "client.json").write_text(json.dumps(facts))
    write_server_data(root)
    return root


@pytest.mark.parametrize("net", ["mlp", "resnet20"])
@EVERY_CASE
def test_clients_with_little_data(case, net, few, tmp_path):
    """With batch normalisation, one example makes no batch; all still take part and are scored."""
    if net != "mlp" and "net" in NEEDS.get(case[0], {}):
        pytest.skip("it needs a net of its own")
    options = {"net": net} if net == "resnet20" else {}
    training = {**TABLES["training"], "batch_size": 8}
    schedule = {"rounds": 1, "clients": 3}
    experiment = experiment_for(
        case, training=training, schedule=schedule, scenario={"tasks": 1}, **options
    )
    out = tmp_path / "out"
    summary = run_in_process(experiment, few, out)
    assert all(np.isfinite(v) for v in summary["metrics"].values())
    for line in (out / "rounds.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
