from dataclasses import replace

import pytest
import torch

from fedmodels.methods import make
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import EVALUATOR, Bundle
from fedmodels.training.contexts import START, ServerContext
from fedmodels.training.hooks import as_uploads, evaluation
from fedmodels.training.loop import train_locally
from fedtide.inprocess import run_in_process
from tests.conftest import TABLES, context_of, payload_of, records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import NORMED


def fedper(tables=None, **switches):
    return tiny_experiment(method={"name": "fedper", **switches}, **(tables or {}))


def result_of(experiment, root, client=0):
    ctx = context_of(experiment, root, client)
    method = make("fedper", **experiment.method.hyper_parameters())
    payload, state = payload_of(experiment, ctx)
    return method, ctx, payload, train_locally(method, ctx, payload, state)


def personal(out, client):
    return load(out / "clients" / str(client) / "personal.safetensors")[0].weights


@pytest.mark.parametrize("net", [TABLES["net"], NORMED], ids=["mlp", "normed"])
def test_without_private_weights_it_is_fedavg(net, digits, tmp_path):
    tables = {"schedule": {"rounds": 1}, "net": net}
    one = run_in_process(fedper(tables, private=[]), digits, tmp_path / "per")
    other = run_in_process(tiny_experiment(**tables), digits, tmp_path / "avg")
    assert one["state_sha256"] == other["state_sha256"]
    assert one["metrics"] == other["metrics"]
    assert one["bytes"] == other["bytes"]


def test_heads_stay(digits):
    _, _, payload, result = result_of(fedper(), digits)
    assert {k.partition("/")[0] for k in result.upload.weights} == {"base"}
    assert {k.partition("/")[0] for k in payload.weights} == {"base"}
    assert result.state.weights.keys() == {"head/weight", "head/bias"}
    assert result.upload.num_bytes() == 4 * (64 * 16 + 16) + 8


def test_any_prefix_can_stay(digits, tmp_path):
    """Everything after the first stage, as in nets whose head is more than the last layer."""
    tables = {"net": {"name": "mlp", "hidden": [16, 8]}, "schedule": {"rounds": 1}}
    private = ["base/3", "head/"]
    _, ctx, _, result = result_of(fedper(tables, private=private), digits)
    assert result.upload.weights.keys() == {"base/1.weight", "base/1.bias"}
    assert len(result.state.weights) == len(ctx.net.state_dict()) - 2
    run_in_process(fedper(tables, private=private), digits, tmp_path / "out")
    one, other = (personal(tmp_path / "out", client) for client in (0, 1))
    assert torch.equal(one["base/1.weight"], other["base/1.weight"])
    assert not torch.equal(one["base/3.weight"], other["base/3.weight"])


def test_one_base_and_many_heads(digits, tmp_path):
    run_in_process(fedper(), digits, tmp_path / "out")
    one, other = (personal(tmp_path / "out", client) for client in (0, 1))
    assert torch.equal(one["base/1.weight"], other["base/1.weight"])
    assert not torch.equal(one["head/weight"], other["head/weight"])
    x = context_of(fedper(), digits).stream.test(0)[0]
    logits = []
    for client in (0, 1):
        method, ctx, payload, result = result_of(fedper(), digits, client)
        method.load(ctx, payload, result.state)
        logits.append(method.predict(ctx, payload, result.state, x)["classifier"])
    assert not torch.allclose(*logits)


def test_clients_that_never_trained_store_no_model(digits, tmp_path):
    run_in_process(
        fedper({"schedule": {"rounds": 1, "clients": 3, "per_round": 1}}), digits, tmp_path / "out"
    )
    rows = records_of(tmp_path / "out")
    trained = {str(c) for row in rows for c in row["cohort"]}
    stored = {path.parent.name for path in tmp_path.glob("out/clients/*/personal.safetensors")}
    assert stored == trained != {"0", "1", "2"}


def test_no_global_model_unless_heads_go_up(digits, tmp_path):
    plain = run_in_process(fedper(), digits, tmp_path / "plain")
    heads = run_in_process(fedper(eval_upload_head=True), digits, tmp_path / "heads")
    assert "a_glo" not in plain["metrics"]
    assert "a_glo" in heads["metrics"]
    assert heads["metrics"]["a_loc"] == plain["metrics"]["a_loc"]
    assert heads["bytes"]["up"] == plain["bytes"]["up"]
    assert heads["bytes"]["down"] == plain["bytes"]["down"]
    for client in range(3):
        one, other = (personal(tmp_path / name, client) for name in ("plain", "heads"))
        assert all(torch.equal(one[k], other[k]) for k in one)


def test_global_model_has_the_mean_head(digits):
    """Weighed as the base is; it goes to everyone with evaluation orders, never to be trained."""
    experiment = fedper(eval_upload_head=True)
    uploads = {c: result_of(experiment, digits, c)[3].upload for c in (0, 1)}
    method, ctx, _, result = result_of(experiment, digits)
    server = ServerContext(ctx.run, START, (0, 1))
    state = method.aggregate(server, method.init_server(ctx.run), as_uploads(method, uploads))
    common, parts = evaluation(method, server, state)
    assert parts.keys() == {0, 1, 2, EVALUATOR}
    assert method.broadcast(server, state) == (common, {})
    assert not any(k.startswith("eval/") for k in common.weights)
    n = [uploads[c].scalars["num_examples"] for c in (0, 1)]
    heads = [uploads[c].weights["eval/head/weight"].double() for c in (0, 1)]
    mean = (n[0] * heads[0] + n[1] * heads[1]) / sum(n)
    found = parts[0].weights["eval/head/weight"]
    torch.testing.assert_close(found, mean.float())
    merged = Bundle(common.weights | parts[0].weights)
    method.load(replace(ctx, view="global"), merged, Bundle())
    assert torch.equal(ctx.net.head.weight, found)
    method.load(ctx, merged, result.state)
    assert torch.equal(ctx.net.head.weight, result.state.weights["head/weight"])
