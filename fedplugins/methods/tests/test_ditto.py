import pytest
import torch

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.archive import load, load_named
from fedmodels.tensors.bundle import Bundle, Problem, tensor_bytes
from fedmodels.tensors.roles import part_of, under
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, payload_of, tiny_experiment

TRAINING = {"local_epochs": 2, "momentum": 0.5, "weight_decay": 1e-3}


def ditto(lam, **tables):
    return tiny_experiment(method={"name": "ditto", "lam": lam}, **tables)


def personal(out):
    found = [load(out / "clients" / c / "personal.safetensors")[0].weights for c in "012"]
    return [{k: bytes(tensor_bytes(t)) for k, t in weights.items()} for weights in found]


def trained(experiment, root, state=None):
    ctx = context_of(experiment, root)
    payload, first = payload_of(experiment, ctx)
    method = make("ditto", **experiment.method.hyper_parameters())
    return payload, train_locally(method, ctx, payload, state or first)


@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_global_model_is_that_of_fedavg(lam, digits, tmp_path):
    one = run_in_process(ditto(lam, training=TRAINING), digits, tmp_path / "ditto")
    other = run_in_process(tiny_experiment(training=TRAINING), digits, tmp_path / "avg")
    found, expected = (
        load_named(max((tmp_path / name / "server").glob("*.safetensors")))[0]["common"].weights
        for name in ("ditto", "avg")
    )
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert one["metrics"]["a_glo"] == other["metrics"]["a_glo"]
    assert one["bytes"] == other["bytes"]


def test_without_pull_personal_models_are_local(digits, tmp_path):
    run_in_process(ditto(0.0, training=TRAINING), digits, tmp_path / "ditto")
    local = tiny_experiment(method="local", training=TRAINING)
    run_in_process(local, digits, tmp_path / "local")
    assert personal(tmp_path / "ditto") == personal(tmp_path / "local")


def test_more_pull_is_nearer_to_the_broadcast(digits):
    distances = []
    for lam in (0.0, 0.1, 1.0, 10.0):
        payload, result = trained(ditto(lam, training={"local_epochs": 5, "batch_size": 8}), digits)
        v = part_of(result.state.weights, "twin")
        squares = [(v[k] - w).double().square().sum() for k, w in payload.weights.items()]
        distances.append(torch.stack(squares).sum().item())
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]


def test_personal_model_by_hand():
    """One step of lr 1/2 from v = (1, 0), broadcast w = 0, lam 1; one example x = 1, y = 0.

    p_1 = 1 - sigmoid(1) =: q; gradient (-q, q) + v = (1 - q, q); v = (1 - (1 - q)/2, -q/2).
    w takes the FedAvg step (1/4, -1/4) whatever v is.
    """
    experiment = ditto(1.0, training={"lr": 0.5})
    ctx = linear_context(experiment, [[1.0]], [0])
    payload = Bundle(weights=weights_of(ctx.net))
    state = Bundle(weights=under("twin", {"head/weight": torch.tensor([[1.0], [0.0]])}))
    result = train_locally(make("ditto", lam=1.0), ctx, payload, state)
    q = 1 - torch.sigmoid(torch.tensor(1.0)).item()
    found = result.state.weights["twin/head/weight"].flatten().tolist()
    assert found == pytest.approx([1 - (1 - q) / 2, -q / 2], abs=1e-6)
    assert result.upload.weights["head/weight"].flatten().tolist() == [0.25, -0.25]


def test_client_is_scored_with_its_own_model(digits):
    experiment = ditto(1.0)
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method = make("ditto")
    result = train_locally(method, ctx, payload, state)
    after_local = weights_of(ctx.net)
    method.load(ctx, payload, result.state)
    assert all(torch.equal(t, after_local[k]) for k, t in weights_of(ctx.net).items())
    assert not torch.equal(after_local["head/weight"], result.upload.weights["head/weight"])


def test_everybody_starts_alike():
    run = RunFacts(ditto(1.0), Problem((1, 8, 8), 10))
    states = [make("ditto").init_client(run, client).weights for client in (0, 1)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert all(k.startswith("twin/") for k in states[0])
