import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.tensors.archive import load, load_named
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from tests.conftest import linear_context, method_of, tiny_experiment

NORMED = {"name": "digits-cnn", "norm": "batch"}
OWN = ("base/weight", "base/bias", "base/running_mean", "base/running_var")


def test_two_clients_by_hand():
    """One step of lr 1; the base normalises one number, the head is 0 and has two classes.

    Client 0 has x = (1, 3), y = (0, 1): the normalised inputs are (-1, 1), p = 1/2, and the head's
    gradient is (1/2, -1/2): W_0 = (-1/2, 1/2). The running mean is 0.1 * 2, the running variance
    0.9 + 0.1 * 2. Client 1 has x = (10, 10, 20, 20), y = (1, 1, 0, 0): W_1 = (1/2, -1/2), running
    mean 0.1 * 15, variance 0.9 + 0.1 * 100 / 3. The mean head is 0; scale and shift have not moved,
    as the head was 0.
    """
    experiment = tiny_experiment(method="fedbn", training={"lr": 1.0})
    method, uploads, states = method_of(experiment), {}, {}
    given = [([[1.0], [3.0]], [0, 1]), ([[10.0]] * 2 + [[20.0]] * 2, [1, 1, 0, 0])]
    for client, (x, y) in enumerate(given):
        ctx = linear_context(experiment, x, y, client)
        ctx.net = SplitNet(nn.BatchNorm1d(1), ctx.net.head, 1)
        ctx.run.__dict__["batch_norm_weights"] = frozenset((*OWN, "base/num_batches_tracked"))
        weights = weights_of(ctx.net)
        ctx.run.__dict__["forms"] = weights
        head = {"head/weight": weights["head/weight"]}
        private = Bundle({key: t for key, t in weights.items() if key not in head})
        result = train_locally(method, ctx, Bundle(head), private)
        uploads[client], states[client] = result.upload, result.state
    assert {*uploads[0].weights} == {"head/weight"}
    close = {"abs": 1e-4}
    assert uploads[0].weights["head/weight"].flatten().tolist() == pytest.approx(
        [-0.5, 0.5], **close
    )
    assert uploads[1].weights["head/weight"].flatten().tolist() == pytest.approx(
        [0.5, -0.5], **close
    )
    found = [[states[c].weights[key].item() for key in OWN] for c in (0, 1)]
    assert found[0] == pytest.approx([1.0, 0.0, 0.2, 1.1], **close)
    assert found[1] == pytest.approx([1.0, 0.0, 1.5, 0.9 + 10 / 3], **close)
    at = ServerContext(RunFacts(experiment, Problem((1,), 2)), START, (0, 1))
    after, _ = reduce(method, at, ServerState(Bundle(head)), as_uploads(method, uploads))
    assert after.common.weights["head/weight"].flatten().tolist() == pytest.approx([0, 0], **close)


def test_layers_are_told_by_their_type():
    """A shortcut's normalisation has no ``bn`` in its name; group normalisation has statistics of
    one example alone, and travels."""
    run = RunFacts(tiny_experiment(net="resnet18"), Problem((3, 32, 32), 10))
    names = run.batch_norm_weights
    assert {k for k in run.forms if "running" in k} < names
    assert [k for k in names if "shortcut" in k]
    assert all(run.forms[k].dim() < 2 for k in names)
    net = {"name": "digits-cnn", "norm": "group"}
    assert RunFacts(tiny_experiment(net=net), Problem((1, 8, 8), 10)).batch_norm_weights == set()


def test_normalisation_stays_with_its_client(digits, tmp_path):
    run_in_process(tiny_experiment(method="fedbn", net=NORMED), digits, tmp_path)
    common = load_named(max((tmp_path / "server").glob("*.safetensors")))[0]["common"].weights
    models = [load(tmp_path / f"clients/{c}/personal.safetensors")[0].weights for c in (0, 1)]
    own = models[0].keys() - common.keys()
    assert {key.split(".")[0] for key in own} == {"base/norms"}
    assert all(torch.equal(models[0][key], models[1][key]) for key in common)
    moved = [key for key in own if not key.endswith("num_batches_tracked")]
    assert all(not torch.equal(models[0][key], models[1][key]) for key in moved)


def test_a_net_without_batch_normalisation_is_refused():
    run = RunFacts(tiny_experiment(method="fedbn"), Problem((1, 8, 8), 10))
    with pytest.raises(ConfigError, match="net 'mlp' has none here: take resnet20, or set"):
        make("fedbn").init_server(run)
