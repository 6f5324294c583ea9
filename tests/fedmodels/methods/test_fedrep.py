import pytest
import torch

from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.loop import train_locally
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, linear_context, payload_of, tiny_experiment

HARD = {"momentum": 0.9, "weight_decay": 0.1, "batch_size": 8, "lr": 0.05}


def fedrep(tables=None, **switches):
    return tiny_experiment(method={"name": "fedrep", **switches}, **(tables or {}))


def trained(experiment, ctx):
    method = make("fedrep", **experiment.method.hyper_parameters())
    payload, state = payload_of(experiment, ctx)
    return payload.weights | state.weights, train_locally(method, ctx, payload, state)


@pytest.mark.parametrize(("of", "moves"), [("head_epochs", "head/"), ("base_epochs", "base/")])
def test_each_phase_leaves_the_other_part_alone(of, moves, digits):
    """With momentum and weight decay at work, and running statistics of a frozen base held."""
    epochs = {"head_epochs": 0, "base_epochs": 0, of: 2}
    experiment = fedrep({"net": "resnet20", "training": HARD}, bn_of_frozen="eval", **epochs)
    ctx = context_of(experiment, digits)
    before, _ = trained(experiment, ctx)
    for name, tensor in weights_of(ctx.net).items():
        if not name.startswith(moves):
            assert torch.equal(tensor, before[name]), name
        elif "num_batches" not in name:
            assert not torch.equal(tensor, before[name]), name


def test_running_statistics_move_with_the_head_as_released(digits):
    experiment = fedrep({"net": "resnet20"}, head_epochs=1, base_epochs=0)
    ctx = context_of(experiment, digits)
    before, _ = trained(experiment, ctx)
    after = weights_of(ctx.net)
    for name in before:
        moves = name.startswith("head/") or "running" in name or "num_batches" in name
        assert torch.equal(after[name], before[name]) != moves, name


def test_base_that_never_trains_never_changes(digits, tmp_path):
    experiment = fedrep(head_epochs=1, base_epochs=0)
    run_in_process(experiment, digits, tmp_path / "out")
    first = context_of(experiment, digits).run.initial_weights
    for client in "012":
        last = load(tmp_path / "out" / "clients" / client / "personal.safetensors")[0].weights
        assert torch.equal(last["base/1.weight"], first["base/1.weight"])
        assert not torch.equal(last["head/weight"], first["head/weight"])


def test_heads_stay(digits):
    experiment = fedrep()
    ctx = context_of(experiment, digits)
    _, result = trained(experiment, ctx)
    assert {k.partition("/")[0] for k in result.upload.weights} == {"base"}
    assert result.upload.num_bytes() == 4 * (64 * 16 + 16) + 8
    assert result.state.weights.keys() == {"head/weight", "head/bias"}


@pytest.mark.parametrize(
    ("local_epochs", "expected"),
    [(30, (5, 25)), (20, (3, 17)), (6, (1, 5)), (2, (1, 1)), (1, (1, 1)), (0, (0, 0))],
)
def test_epochs_unless_given(local_epochs, expected):
    assert make("fedrep").epochs(local_epochs) == expected
    assert make("fedrep", head_epochs=0).epochs(local_epochs) == (0, expected[1])
    assert make("fedrep", base_epochs=7).epochs(local_epochs) == (expected[0], 7)


def test_order_and_weight_decay_of_the_phases(digits):
    experiment = fedrep(head_epochs=2, base_epochs=3, wd_head=0.5)
    ctx = context_of(experiment, digits)
    for order, trains in (("head_first", "head/"), ("base_first", "base/")):
        phases = make("fedrep", order=order, head_epochs=2, base_epochs=3, wd_head=0.5).phases(ctx)
        assert phases[0].trains == (trains,)
        assert {p.trains[0]: p.epochs for p in phases} == {"head/": 2, "base/": 3}
        head = next(p for p in phases if p.trains == ("head/",))
        assert head.weight_decay == {"head/": 0.5}


def test_head_by_hand():
    """Two full-batch head steps of lr 1 from W = 0; one example x = 1, y = 0.

    Step 1: p = 1/2, W = (1/2, -1/2). Step 2: p_1 = 1 - sigmoid(1), W = (1/2 + p_1) (1, -1).
    The base is frozen at 1; weight decay 1 on all but the head changes nothing.
    """
    experiment = fedrep(
        {"training": {"lr": 1.0, "weight_decay": 1.0}}, head_epochs=2, base_epochs=0
    )
    ctx = linear_context(experiment, [[1.0]], [0])
    ctx.net.base = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(ctx.net.base.weight)
    method = make("fedrep", **experiment.method.hyper_parameters())
    weights = weights_of(ctx.net)
    payload = Bundle(method.shared(ctx.run, weights))
    state = Bundle({"head/weight": weights["head/weight"]})
    result = train_locally(method, ctx, payload, state)
    expected = 1.5 - torch.sigmoid(torch.tensor(1.0)).item()
    found = result.state.weights["head/weight"].flatten().tolist()
    assert found == pytest.approx([expected, -expected], abs=1e-6)
    assert result.upload.weights == {"base/weight": torch.ones(1, 1)}
