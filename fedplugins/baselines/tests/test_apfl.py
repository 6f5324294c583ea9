import pytest
import torch
from torch.nn.functional import cross_entropy

from fedmodels.methods import make
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques.twins import begin_twin
from fedmodels.tensors.archive import load, load_named
from fedmodels.tensors.bundle import Bundle, tensor_bytes
from fedmodels.tensors.roles import part_of, under
from fedmodels.training.loop import train_locally
from fedmodels.training.stepped import Batch
from fedplugins.baselines.apfl import ApflReferences, mix
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment

TRAINING = {"local_epochs": 2, "momentum": 0.5, "weight_decay": 1e-3}
BOTH = pytest.mark.parametrize("mix", ["params", "logits"])


def apfl(tables=None, **switches):
    return tiny_experiment(method={"name": "apfl", **switches}, **(tables or {}))


def personal(out):
    found = [load(out / "clients" / c / "personal.safetensors")[0].weights for c in "012"]
    return [{k: bytes(tensor_bytes(t)) for k, t in weights.items()} for weights in found]


def server_weights(out):
    return load_named(max((out / "server").glob("*.safetensors")))[0]["common"].weights


UNIFORM = {"name": "fedavg", "weighting": "uniform"}


@BOTH
def test_global_model_is_that_of_fedavg(mix, digits, tmp_path):
    one = run_in_process(apfl({"training": TRAINING}, mix=mix), digits, tmp_path / "apfl")
    fedavg = tiny_experiment(method=UNIFORM, training=TRAINING)
    other = run_in_process(fedavg, digits, tmp_path / "avg")
    found, expected = (server_weights(tmp_path / name) for name in ("apfl", "avg"))
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert one["metrics"]["a_glo"] == other["metrics"]["a_glo"]
    assert one["bytes"] == other["bytes"]


@BOTH
def test_mixture_moves_no_running_statistics_of_the_global_model(mix, digits):
    tables, uploads = {"net": "resnet20", "training": TRAINING}, []
    for experiment in (apfl(tables, mix=mix), tiny_experiment(method=UNIFORM, **tables)):
        ctx, method = context_of(experiment, digits), method_of(experiment)
        uploads.append(train_locally(method, ctx, *payload_of(experiment, ctx)).upload.weights)
    assert all(torch.equal(uploads[0][k], uploads[1][k]) for k in uploads[1])


def test_alpha_one_is_local(digits, tmp_path):
    fixed = {"alpha": 1.0, "adaptive": False}
    one = run_in_process(apfl({"training": TRAINING}, **fixed), digits, tmp_path / "apfl")
    local = tiny_experiment(method="local", training=TRAINING)
    other = run_in_process(local, digits, tmp_path / "local")
    assert personal(tmp_path / "apfl") == personal(tmp_path / "local")
    assert one["metrics"]["a_loc"] == other["metrics"]["a_loc"]


@BOTH
def test_alpha_zero_is_the_global_model(mix, digits, tmp_path):
    experiment = apfl({"training": TRAINING}, alpha=0.0, adaptive=False, mix=mix)
    metrics = run_in_process(experiment, digits, tmp_path / "out")["metrics"]
    assert metrics["a_loc"] == metrics["a_glo"]
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method = make("apfl", **experiment.method.hyper_parameters())
    after = train_locally(method, ctx, payload, state).state
    assert all(torch.equal(after.weights[k], t) for k, t in state.weights.items())


def mixture(ctx, mix, v, w):
    """References and batch of a client at given weights."""
    method = make("apfl", mix=mix)
    load_weights(ctx.net, w)
    twin = begin_twin(ctx, Bundle(under("twin", v)))
    batch = Batch(ctx.stream.x, ctx.stream.y, torch.arange(len(ctx.stream.y)))
    return method, batch, ApflReferences(twin, torch.tensor(0.3))


@BOTH
def test_gradient_of_alpha(mix):
    """<v - w, grad f(v-bar)>, against central differences of the mixture's loss in float64."""
    ctx = linear_context(apfl(), [[1.0, -2.0], [0.5, 3.0]], [0, 1])
    ctx.net.double()
    ctx.stream.x = ctx.stream.x.double()
    rng = torch.Generator().manual_seed(0)
    v, w = (
        {"head/weight": torch.randn(2, 2, generator=rng, dtype=torch.float64)} for _ in range(2)
    )
    method, batch, refs = mixture(ctx, mix, v, w)

    def loss(alpha):
        return method.mixture_loss(ctx, batch, refs, torch.tensor(alpha, dtype=torch.float64))

    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    refs.twin.net.zero_grad()
    method.mixture_loss(ctx, batch, refs, alpha).backward()
    slope = (loss(0.3 + 1e-6) - loss(0.3 - 1e-6)).item() / 2e-6
    assert alpha.grad.item() == pytest.approx(slope, rel=1e-6)
    at = (0.3 * v["head/weight"] + 0.7 * w["head/weight"]).requires_grad_(True)
    (gradient,) = torch.autograd.grad(cross_entropy(batch.x @ at.T, batch.y), at)
    by_hand = ((v["head/weight"] - w["head/weight"]) * gradient).sum()
    assert alpha.grad.item() == pytest.approx(by_hand.item(), rel=1e-9)
    torch.testing.assert_close(refs.twin.net.head.weight.grad, 0.3 * gradient)


@BOTH
def test_one_step_by_hand(mix):
    """lr 1, alpha 1/2, x = 1, y = 0; w = 0, v = (1, -1).

    w steps first: (1/2, -1/2). v-bar = (3/4, -3/4); p_1 = 1 - sigmoid(3/2) =: q;
    v = (1, -1) + q/2 (1, -1); alpha = 1/2 - <(1/2, -1/2), (-q, q)> = 1/2 + q.
    """
    experiment = apfl({"training": {"lr": 1.0}}, mix=mix)
    ctx = linear_context(experiment, [[1.0]], [0])
    payload = Bundle(weights=weights_of(ctx.net))
    v = {"head/weight": torch.tensor([[1.0], [-1.0]])}
    state = Bundle(weights=under("twin", v), scalars={"alpha": 0.5})
    method = make("apfl", mix=mix)
    result = train_locally(method, ctx, payload, state)
    q = 1 - torch.sigmoid(torch.tensor(1.5)).item()
    found = part_of(result.state.weights, "twin")["head/weight"].flatten().tolist()
    assert found == pytest.approx([1 + q / 2, -1 - q / 2], abs=1e-6)
    assert result.state.scalars["alpha"] == pytest.approx(0.5 + q, abs=1e-6)
    assert result.upload.weights["head/weight"].flatten().tolist() == [0.5, -0.5]
    ctx.view = "after_local"
    logits = method.predict(ctx, payload, result.state, torch.tensor([[1.0]]))[method.rules[0]]
    alpha = 0.5 + q
    expected = alpha * (1 + q / 2) + (1 - alpha) * 0.5
    assert logits[0].tolist() == pytest.approx([expected, -expected], abs=1e-6)


@pytest.mark.parametrize("every", ["round", "step"])
def test_alpha_stays_a_share(every, digits):
    """At a learning rate that throws it to its bounds."""
    tables = {"training": {"lr": 2.0, "batch_size": 8}}
    experiment = apfl(tables, alpha_every=every)
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method, seen = make("apfl", alpha_every=every), set()
    for _ in range(3):
        state = train_locally(method, ctx, payload, state).state
        seen.add(state.scalars["alpha"])
    assert all(0 <= alpha <= 1 for alpha in seen)
    assert len(seen) > 1
    assert ctx.metrics["alpha"] == state.scalars["alpha"]


def test_fixed_alpha_stays(digits):
    experiment = apfl(adaptive=False, alpha=0.75)
    ctx = context_of(experiment, digits)
    method = make("apfl", adaptive=False, alpha=0.75)
    assert train_locally(method, ctx, *payload_of(experiment, ctx)).state.scalars["alpha"] == 0.75


def test_aggregation_weights_takes_running_statistics_too():
    v = {"a": torch.tensor([1.0]), "n": torch.tensor(3)}
    w = {"a": torch.tensor([3.0]), "n": torch.tensor(7)}
    found = mix(v, w, 0.25)
    assert found["a"].item() == 2.5
    assert found["n"].item() == 7
