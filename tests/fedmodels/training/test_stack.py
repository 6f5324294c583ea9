"""Clients trained together come to the weights they come to in turn, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedmodels.training.loop
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.methods import make, names
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import START, ClientContext
from fedmodels.training.loop import ClientHalf, train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stack import fit_together
from fedmodels.training.stack_trial import check_together
from fedmodels.training.stepped import Phase
from tests.conftest import OneTask, context_of, method_of, payload_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for

TOGETHER = [
    "centralized", "fedala", "fedavg", "fedbabu", "feddyn", "fedic", "fedntd", "fedper", "fedprox",
    "fedproto", "fedrep", "fedtgp", "gldp", "ifca", "lg-fedavg", "local", "moon", "pfedgraph",
    "pilora", "scaffold",
]  # fmt: skip
SIZES = (21, 16, 9, 21, 0)
"""Examples of each client: batches of 8, a rest of 5, none or one; the last has none at all."""


def bits(bundle: Bundle) -> dict[str, torch.Tensor]:
    return dict(bundle.by_key())


def assert_close(one: Bundle, other: Bundle, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    a, b = bits(one), bits(other)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.allclose(a[key].float(), b[key].float(), rtol, atol), key


def assert_equal(one: Bundle, other: Bundle) -> None:
    a, b = bits(one), bits(other)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def together(halves: list[ClientHalf]) -> list[Any]:
    for half in halves:
        half.begin_apart()
    return [half.end_apart(loss) for half, loss in zip(halves, fit_together(halves), strict=True)]


def assert_as_in_turn(experiment: Experiment, root: Path) -> list[Any]:
    """Train three clients in turn and together; return the latter, which come to the same."""
    method = method_of(experiment)
    rtol, atol = (1e-2, 2e-2) if experiment.training.mixed_precision else (1e-4, 1e-5)

    def halves():
        contexts = [context_of(experiment, root, client) for client in range(3)]
        return [ClientHalf(method, ctx, *payload_of(experiment, ctx)) for ctx in contexts]

    in_turn = [train_locally(method, h.ctx, h.payload, h.state) for h in halves()]
    at_once = together(halves())
    for one, other in zip(in_turn, at_once, strict=True):
        assert_close(one.upload, other.upload, rtol, atol)
        assert_close(one.state, other.state, rtol, atol)
        assert other.loss == pytest.approx(one.loss, abs=atol)
        assert other.num_examples == one.num_examples
    alone = together(halves()[1:2])[0]
    assert_close(alone.upload, at_once[1].upload, rtol, atol)
    assert_close(alone.state, at_once[1].state, rtol, atol)
    return at_once


def run_of(name: str, net: str = "mlp", **method: Any) -> RunFacts:
    table = {"name": name, **method}
    adapters = {"adapters": 8} if name == "pilora" else {}
    options = {"name": net, **adapters}
    experiment = tiny_experiment(method=table, net=options, training={"together": 2})
    return RunFacts(experiment, Problem((1, 8, 8), 10))


def tried(name: str, net: str = "mlp", **method: Any) -> None:
    run = run_of(name, net, **method)
    check_together(method_of(run.experiment), run)


# --- every method that can ------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOGETHER)
def test_every_method_comes_to_what_training_in_turn_does(name, digits):
    experiment = experiment_for((name, {}), training={"local_epochs": 2, "momentum": 0.9})
    results = assert_as_in_turn(experiment, digits)
    assert all(result.num_examples for result in results)
    tried(name)


@pytest.mark.parametrize(
    "training",
    [
        {"loss": "focal", "class_weights": [1.0 + k for k in range(10)]},
        {"label_smoothing": 0.1, "optimizer": "nadam", "lr": 0.001},
        {"lr_schedule": {"kind": "cosine", "warmup": 2}, "optimizer": "rmsprop", "lr": 0.001},
    ],
)
def test_losses_and_steps_of_the_config_come_to_the_same(training, digits):
    experiment = experiment_for(("fedprox", {}), training=training)
    assert_as_in_turn(experiment, digits)
    check_together(method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10)))


def test_there_are_no_others():
    """What the list above leaves out is refused."""
    for name in {*names()} - {*TOGETHER, "fedali", "fedbn"}:  # these need another net
        with pytest.raises(ConfigError, match="train in turn only; leave together out"):
            tried(name)


@pytest.mark.parametrize("name", ["fedavg", "gldp"])
def test_in_bfloat16_too(name, digits):
    half, full = ({"precision": precision} for precision in ("bfloat16", "float32"))
    rounded = assert_as_in_turn(experiment_for((name, {}), training=half), digits)
    plain = assert_as_in_turn(experiment_for((name, {}), training=full), digits)
    for one, other in zip(rounded, plain, strict=True):
        weights = other.upload.weights
        assert not all(torch.equal(t, weights[key]) for key, t in one.upload.weights.items())


@pytest.mark.parametrize(
    ("name", "reading", "why"),
    [
        ("ditto", {}, "cannot refer to Twin"),
        ("fedmlp", {}, "references differ"),
        ("fedpac", {}, "references differ"),
        ("creff", {}, "references differ"),
        ("fedem", {}, "its fit is its own"),
        ("pfedgrp", {}, "what stands for earlier tasks"),
        ("gldp", {"proto_pass": "running"}, "references differ"),
        ("gldp", {"own_moves": "epoch"}, "changes between epochs"),
    ],
)
def test_what_cannot_is_refused_before_the_run_begins(name, reading, why):
    """Methods whose loss decides by values, or keeps something; readings of one that can."""
    line = rf"together = 2: clients of method {name!r} train in turn only; leave together out \(.*"
    with pytest.raises(ConfigError, match=line + why):
        tried(name, **({"reading": reading} if reading else {}))


@pytest.mark.parametrize("reading", ["kl_space", "gp_mode"])
def test_readings_that_can(reading):
    tried("gldp", reading={reading: {"kl_space": "head", "gp_mode": "per_sample"}[reading]})


@dataclass(frozen=True, kw_only=True)
class Numbered(FedAvg):
    """A method whose loss weighs by the client."""

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) * (1 + ctx.client)


@dataclass(frozen=True, kw_only=True)
class Keeping(FedAvg):
    """A method whose loss keeps something, and is called less often for several clients."""

    calls: ClassVar[list[int]] = []

    def loss(self, ctx, batch, out, refs):
        self.calls.append(1)
        return super().loss(ctx, batch, out, refs) * len(self.calls)


@dataclass(frozen=True, kw_only=True)
class Later(FedAvg):
    """A method that makes the mean of what clients learned a reference from then on."""

    def prepare(self, ctx, payload, state):
        return ctx.net.copy().requires_grad_(False) if ctx.interaction else None

    def loss(self, ctx, batch, out, refs):
        said = 0 if refs is None else refs(batch.x).mean()
        return super().loss(ctx, batch, out, refs) + said


@dataclass(frozen=True, kw_only=True)
class Squared(FedAvg):
    """A method of one's own that says nothing of training together."""

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) + out.features.square().mean()


@pytest.mark.parametrize(
    ("method", "why"),
    [(Numbered, r"ctx\.client"), (Keeping, "differs from training in turn"), (Later, "SplitNet")],
)
def test_a_method_of_ones_own_is_tried(method, why):
    with pytest.raises(ConfigError, match=rf"train in turn only; leave together out \(.*{why}"):
        check_together(method(), run_of("fedavg"))
    check_together(Squared(), run_of("fedavg"))


def test_a_method_that_fails_by_itself_is_told_so():
    class Failing(FedAvg):
        name = "failing"

        def loss(self, ctx, batch, out, refs):
            raise KeyError("boom")

    with pytest.raises(ConfigError, match=r"^method failing: loss failed \(.*KeyError: 'boom'"):
        check_together(Failing(), run_of("fedavg"))


def test_long_training_is_not_tried_in_full():
    """An epoch of each phase: GLDP has 30."""
    phases, plain = [], fedmodels.training.steps.begin_phase

    def watched(nets, phase, training):
        phases.append(phase.epochs)
        return plain(nets, phase, training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedmodels.training.steps.begin_phase", watched)
        tried("gldp")
    assert phases == [1] * len(phases) != []


# --- what differs between clients -----------------------------------------------------------------


class Tiny(nn.Module):
    """Two layers with batch normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


def tiny_net() -> SplitNet:
    with seeded(0):
        return SplitNet(Tiny(), nn.Linear(5, 3), 5)


class TinyRun(RunFacts):
    """A run with the tiny net."""

    def _built(self, *_: Any) -> SplitNet:
        return tiny_net()


@dataclass(frozen=True, kw_only=True)
class Phased(FedAvg):
    """FedAvg that trains its head, then all of it, then its base beside a frozen head."""

    def phases(self, ctx):
        return [Phase(2, ("head/",), bn_of_frozen="eval"), Phase(1), Phase(1, ("base/",), lr=0.01)]


def half_of(client: int, method: FedAvg, **training: Any) -> ClientHalf:
    run = TinyRun(tiny_experiment(training={"batch_size": 8, **training}), Problem((4,), 3))
    draw, net = torch.Generator().manual_seed(client), tiny_net()
    n = SIZES[client]
    x, y = torch.randn(n, 4, generator=draw), torch.randint(0, 3, (n,), generator=draw)
    stream = OneTask([], [])
    stream.x, stream.y = x, y
    ctx = ClientContext(run, client, START, net, stream, torch.device("cpu"))
    return ClientHalf(method, ctx, Bundle(weights=weights_of(net)), Bundle())


@pytest.mark.parametrize(
    "training",
    [
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.01, "optimizer": "adam"},
        {"lr": 0.01, "optimizer": "adamw", "weight_decay": 0.1},
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_batches_of_different_sizes(training):
    """A client that has no batch left waits, and its optimiser's state with it."""
    method = Phased()
    halves = [half_of(c, method, **training) for c in range(4)]
    in_turn = [train_locally(method, h.ctx, h.payload, h.state) for h in halves]
    at_once = together([half_of(c, method, **training) for c in range(4)])
    for one, other in zip(in_turn, at_once, strict=True):
        assert_close(one.upload, other.upload)
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        before = halves[0].payload.weights["base/norm.num_batches_tracked"]
        assert other.upload.weights["base/norm.num_batches_tracked"] > before


@pytest.mark.parametrize("net", ["digits-cnn", "mlp", "resnet20"])
def test_one_stack_has_the_same_bits_and_another_one_rounds_differently_at_most(net):
    experiment = tiny_experiment(net={"name": net}, training={"batch_size": 8, "momentum": 0.9})
    run, method = RunFacts(experiment, Problem((1, 8, 8), 10)), make("fedavg")

    def made(client):
        draw = torch.Generator().manual_seed(client)
        x = torch.randn(SIZES[client], 1, 8, 8, generator=draw)
        y = torch.randint(10, (len(x),), generator=draw)
        stream = OneTask(x.tolist(), y.tolist())
        ctx = ClientContext(run, client, START, run.make_net(), stream, torch.device("cpu"))
        return ClientHalf(method, ctx, Bundle(weights=run.initial_weights), Bundle())

    expected = together([made(client) for client in range(4)])
    again = together([made(client) for client in range(4)])
    for one, other in zip(again, expected, strict=True):
        assert_equal(one.upload, other.upload)
        assert one.loss == other.loss
    for clients in ((3, 2, 1, 0), (1, 0), (2,), (0, 3)):
        found = together([made(client) for client in clients])
        for client, result in zip(clients, found, strict=True):
            assert_close(result.upload, expected[client].upload)
            assert result.loss == pytest.approx(expected[client].loss, rel=1e-4)


def test_images_are_augmented_by_their_own_clients_seed(digits):
    augmented, plain = (
        assert_as_in_turn(
            tiny_experiment(net="digits-cnn", training={"augment": how, "batch_size": 8}), digits
        )
        for how in ("crop-flip", "none")
    )
    assert augmented[0].loss != plain[0].loss


def test_parameters_and_gradients_are_left_as_they_were_found():
    halves = [half_of(c, Phased(), lr=0.1) for c in range(2)]
    together(halves)
    for parameter in halves[0].ctx.net.parameters():
        assert parameter.requires_grad
        assert parameter.grad is None


@pytest.mark.parametrize("fails", [True, False])
def test_nets_lie_in_their_own_blocks_again(fails):
    """Also when nobody waits for the training any more."""

    def tick(epoch, batch, loss):
        if fails and epoch == 1:
            raise InterruptedError

    halves = [half_of(c, Phased(), lr=0.1) for c in range(3)]
    for half in halves:
        half.ctx.net.pack()
        half.ctx.tick = tick
    if fails:
        with pytest.raises(InterruptedError):
            together(halves)
    else:
        together(halves)
    for half in halves:
        assert half.ctx.net.packed() is not None
        assert all(p.grad is None for p in half.ctx.net.parameters())


def test_a_tied_parameter_is_replaced_wherever_it_is_used():
    net = tiny_net()
    net.base.again = nn.Linear(4, 5, bias=False)
    net.base.again.weight = net.base.linear.weight
    other = torch.ones_like(net.base.linear.weight)
    with net.holding({"base/linear.weight": other}):
        assert net.base.linear.weight is other
        assert net.base.again.weight is other
    assert net.base.again.weight is net.base.linear.weight
    assert net.base.linear.weight is not other
    assert list(net.parameters_by_key()).count("base/again.weight") == 0


def test_a_client_without_data_keeps_what_it_got():
    method = Phased()
    halves = [half_of(c, method, lr=0.1) for c in (0, 4)]
    some, none = together(halves)
    assert none.num_examples == 0
    assert_equal(Bundle(weights=none.upload.weights), halves[1].payload)
    assert_close(some.upload, together([half_of(0, method, lr=0.1)])[0].upload)


def test_every_step_is_told_to_its_own_client():
    steps: dict[int, list[tuple[int, int]]] = {0: [], 2: []}
    halves = [half_of(c, make("fedavg"), lr=0.1, local_epochs=2) for c in steps]
    for client, half in zip(steps, halves, strict=True):
        half.ctx.tick = lambda epoch, batch, loss, told=steps[client]: told.append((epoch, batch))
    together(halves)
    assert steps[0] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert steps[2] == [(0, 0), (1, 0)]  # the rest of one example cannot be normalised


# --- what cannot ----------------------------------------------------------------------------------


def test_a_net_that_draws_random_numbers_is_refused():
    experiment = tiny_experiment(net={"name": "hart"}, training={"together": 2})
    with pytest.raises(ConfigError, match=r"together = 2: .* net 'hart' train in turn only"):
        check_together(make("fedavg"), RunFacts(experiment, Problem((128, 6), 6)))


@pytest.mark.parametrize("net", ["digits-cnn", "resnet20", "vit-tiny"])
def test_nets_that_can(net):
    tried("fedavg", net)


def test_references_that_are_no_tensors_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class Teacher(FedAvg):
        def prepare(self, ctx, payload, state):
            return ctx.net.copy().requires_grad_(False)

        def loss(self, ctx, batch, out, refs):
            return super().loss(ctx, batch, out, refs) + refs.features(batch.x).mean()

    with pytest.raises(TypeError, match="cannot refer to SplitNet"):
        together([half_of(c, Teacher(), lr=0.1) for c in range(2)])


@dataclass(frozen=True, kw_only=True)
class Longer(FedAvg):
    """Later clients train for more epochs."""

    def phases(self, ctx):
        return [Phase(1 + ctx.client)]


@dataclass(frozen=True, kw_only=True)
class Numbered(FedAvg):
    """The references hold a number of the client that is no tensor."""

    def prepare(self, ctx, payload, state):
        return {"scale": 1.0 + ctx.client}


@dataclass(frozen=True, kw_only=True)
class Named(FedAvg):
    """The references of each client have another name."""

    def prepare(self, ctx, payload, state):
        return {f"of {ctx.client}": torch.ones(())}


@dataclass(frozen=True, kw_only=True)
class Asking(FedAvg):
    """The loss counts by the client's number."""

    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) * (1 + ctx.client)


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """The loss counts its calls."""

    def loss(self, ctx, batch, out, refs):
        ctx.metrics["steps"] = ctx.metrics.get("steps", 0.0) + 1
        return super().loss(ctx, batch, out, refs)


class Weighing(FedAvg):
    def loss(self, ctx, batch, out, refs):
        return super().loss(ctx, batch, out, refs) * ctx.num_examples


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (Longer(), "train client 0 together with others, as client 1 has other phases"),
        (Numbered(), "references differ in more than the values of tensors from those of client 1"),
        (Named(), "references differ"),
        (Asking(), r"asks for ctx\.client"),
        (Counting(), r"asks for ctx\.metrics"),
        (Weighing(), r"asks for ctx\.num_examples"),
    ],
)
def test_what_differs_between_clients_is_never_taken_from_the_first(method, line):
    with pytest.raises(ConfigError, match=line):
        together([half_of(c, method, lr=0.1) for c in range(2)])
