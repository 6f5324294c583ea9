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
from fedmodels.training.loop import ClientHalf, train_locally
from fedmodels.training.private_steps import HiddenExamples, check_hides_examples
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, method_of, payload_of, tiny_experiment


def fedbabu(training=None, **fields):
    return tiny_experiment(method={"name": "fedbabu", **fields}, training=training or {})


def one_number(experiment, y):
    """A net whose body is a number, 1, under the head (1, -1)."""
    ctx = linear_context(experiment, [[1.0]], [y])
    base, head = nn.Linear(1, 1, bias=False), ctx.net.head
    with torch.no_grad():
        base.weight.fill_(1.0)
        head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    ctx.net = SplitNet(base, head, 1)
    return ctx


def test_two_clients_by_hand():
    """One step of lr 1 on the body w = 1; logits (w, -w), s = sigmoid(2).

    Client 0 has y = 0: the gradient is -2 (1 - s), w_0 = 1 + 2 (1 - s). Client 1 has y = 1: the
    gradient is 2 s, w_1 = 1 - 2 s. The mean is w = 2 - 2 s, under the same head. Client 0 then
    fine-tunes the head for one epoch: with p = 1 - sigmoid(2 w) the head is (1 + w p) (1, -1).
    """
    experiment = fedbabu({"lr": 1.0}, fine_tune="head", fine_tune_epochs=1)
    method, uploads = method_of(experiment), {}
    for y in (0, 1):
        ctx = one_number(experiment, y)
        first = Bundle(weights_of(ctx.net))
        uploads[y] = train_locally(method, ctx, first, Bundle()).upload
    s = torch.sigmoid(torch.tensor(2.0)).item()
    assert {*uploads[0].weights} == {"base/weight"}
    assert uploads[0].weights["base/weight"].item() == pytest.approx(1 + 2 * (1 - s), abs=1e-6)
    assert uploads[1].weights["base/weight"].item() == pytest.approx(1 - 2 * s, abs=1e-6)
    at = ServerContext(RunFacts(experiment, Problem((1,), 2)), START, (0, 1))
    after, _ = reduce(method, at, ServerState(first), as_uploads(method, uploads))
    w = 2 - 2 * s
    assert after.common.weights["base/weight"].item() == pytest.approx(w, abs=1e-6)
    assert torch.equal(after.common.weights["head/weight"], first.weights["head/weight"])
    ctx = one_number(experiment, 0)
    ctx.view = "after_downlink"
    method.load(ctx, after.common, Bundle())
    expected = 1 + w * (1 - torch.sigmoid(torch.tensor(2 * w)).item())
    assert ctx.net.head.weight.flatten().tolist() == pytest.approx([expected, -expected], abs=1e-6)
    assert ctx.net.base.weight.item() == pytest.approx(w, abs=1e-6)


def test_fine_tuning_has_the_loss_of_the_run():
    """A head step of lr 1 at w = 1; of the smoothed label (3/4, 1/4) p = 3/4 - sigmoid(2)."""
    experiment = fedbabu({"lr": 1.0, "label_smoothing": 0.5}, fine_tune="head", fine_tune_epochs=1)
    method, ctx = method_of(experiment), one_number(experiment, 0)
    ctx.view = "after_downlink"
    method.load(ctx, Bundle(weights_of(ctx.net)), Bundle())
    expected = 1 + 0.75 - torch.sigmoid(torch.tensor(2.0)).item()
    assert ctx.net.head.weight.flatten().tolist() == pytest.approx([expected, -expected], abs=1e-6)


def test_hidden_examples_are_refused_in_a_line():
    """By the coordinator before a run, and by a client that it asks all the same."""
    privacy = {"level": "example", "noise_multiplier": 1.0, "clip": 1.0, "delta": 1e-5}
    for name in ("fedbabu", "flash", "per-fedavg"):
        experiment = tiny_experiment(method=name, privacy=privacy)
        method, ctx = method_of(experiment), one_number(experiment, 0)
        line = f'level = "example": method {name!r} (fine-tunes|stops|takes)'
        with pytest.raises(ConfigError, match=line):
            check_hides_examples(method, ctx.run)
        half = ClientHalf(method, ctx, Bundle(weights_of(ctx.net)), Bundle())
        half.y = torch.zeros(1)
        with pytest.raises(ConfigError, match=line):
            HiddenExamples.of(half)


@pytest.mark.parametrize(("part", "moves"), [("all", "base head"), ("body", "base")])
def test_what_is_fine_tuned(part, moves, digits):
    experiment = fedbabu(fine_tune=part)
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    ctx.view = "after_downlink"
    method_of(experiment).load(ctx, payload, state)
    found = {
        k.split("/")[0] for k, t in weights_of(ctx.net).items() if not t.equal(payload.weights[k])
    }
    assert found == {*moves.split()}


def test_the_head_never_moves_in_training(digits, tmp_path):
    """The personal models at the end are fine-tuned, and differ; nothing is left of that."""
    experiment = fedbabu()
    run_in_process(experiment, digits, tmp_path)
    common = load_named(max((tmp_path / "server").glob("*.safetensors")))[0]["common"].weights
    first = RunFacts(experiment, Problem((1, 8, 8), 10)).initial_weights
    heads = [key for key in first if key.startswith("head/")]
    assert all(torch.equal(common[key], first[key]) for key in heads)
    assert all(not torch.equal(common[k], t) for k, t in first.items() if k.startswith("base/"))
    models = [load(tmp_path / f"clients/{c}/personal.safetensors")[0].weights for c in (0, 1)]
    assert all(not torch.equal(models[0][key], models[1][key]) for key in heads)


def test_without_fine_tuning_everybody_has_one_model(digits, tmp_path):
    summary = run_in_process(fedbabu(fine_tune_epochs=0), digits, tmp_path)
    models = [load(tmp_path / f"clients/{c}/personal.safetensors")[0].weights for c in (0, 1)]
    assert all(torch.equal(models[0][key], tensor) for key, tensor in models[1].items())
    assert 0 < summary["metrics"]["a_loc"] <= 1
    assert make("fedbabu").views == ("global", "after_downlink")
