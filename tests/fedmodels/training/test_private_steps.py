"""Training that hides its examples: gradients by hand, batches, noise, cost and refusals."""

import importlib
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedcli.runtime.workers import Workers
from fedmodels.errors import ConfigError, FedtideError
from fedmodels.methods import make
from fedmodels.numerics.secrecy import Secret
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.training.contexts import START, Position
from fedmodels.training.ghost_clipping import per_example
from fedmodels.training.loop import ClientHalf
from fedmodels.training.private_steps import (
    HiddenExamples,
    PrivateSteps,
    private_class_sums,
)
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Phase
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import context_of, method_of, payload_of
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_private_rounds import BESIDE, SMALL_GLDP

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
RUN = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
NOISE = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 0.5, "allow": BESIDE}


def hiding(method="fedavg", **changes):
    table = {key: value for key, value in {**NOISE, **changes}.items() if value is not None}
    return tiny_experiment(method=method, privacy=table)


def hidden_of(contents, batch_size, prototypes=False, **table):
    privacy, contents = hiding(**table).privacy, np.array(contents, dtype=np.uint64)
    return HiddenExamples(privacy, contents, batch_size, 3, 1, sends_prototypes=prototypes)


def steps_of(net, examples, batch_size, noise=1e-9, clip=0.5):
    contents = range(examples) if isinstance(examples, int) else examples
    hidden = hidden_of(contents, batch_size, noise_multiplier=noise, clip=clip)
    ctx = type("Ctx", (), {
        "run": RUN, "net": net, "device": torch.device("cpu"), "hidden": hidden, "asked": set(),
        "interaction": 0, "secret": lambda: Secret(b"s" * 32),
    })  # fmt: skip
    return PrivateSteps(make("fedavg"), ctx, Phase(1), None)


def loss(batch, out):
    return cross_entropy(out.logits, batch.y)


def test_gradients_of_examples_are_those_one_by_one_scaled_and_added():
    """What vmap comes to is what a loop over examples comes to, with a norm of at most 0.5 each."""
    run = RUN
    net, torch_rng = run.make_net(), torch.Generator().manual_seed(0)
    x, y = torch.randn(5, *run.problem.input_shape, generator=torch_rng), torch.arange(5) % 3
    found = steps_of(net, 5, 4).put_gradients(Batch(x, y, torch.arange(5)), loss, "fedavg")
    got = torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()])
    wanted, losses = torch.zeros_like(got), []
    for one in range(5):
        net.zero_grad()
        single = cross_entropy(net(x[one : one + 1]), y[one : one + 1])
        single.backward()
        flat = torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()])
        wanted += flat * min(1.0, 0.5 / float(flat.norm()))
        losses.append(single.item())
    assert torch.allclose(got, wanted / 4, atol=1e-6), "over the expected size, which is 4"
    assert float(found) == pytest.approx(sum(losses) / 5, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_gradients_of_examples_are_those_of_opacus():
    opacus = importlib.import_module("opacus")
    torch_rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, *RUN.problem.input_shape, generator=torch_rng), torch.arange(5) % 3
    net = RUN.make_net()
    trained = {k: p for k, p in net.parameters_by_key().items() if p.requires_grad}
    ours, _ = per_example(net, trained, Batch(x, y, torch.arange(5)), loss)
    theirs = opacus.GradSampleModule(net)
    cross_entropy(theirs(x), y, reduction="mean").backward()
    samples = [p.grad_sample.flatten(1) for p in trained.values()]
    assert torch.allclose(ours, torch.cat(samples, 1), atol=1e-6)


def test_noise_has_its_deviation_also_where_no_example_is_drawn():
    run = RUN
    net = run.make_net()
    nothing = torch.zeros(0, *run.problem.input_shape), torch.zeros(0).long(), torch.zeros(0).long()
    steps_of(net, 5, 4, noise=8.0).put_gradients(Batch(*nothing), loss, "fedavg")
    got = torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()])
    assert float(got.std()) == pytest.approx(8.0 * 0.5 / 4, rel=0.1)


def test_steps_on_the_same_examples_have_noise_of_their_own():
    """All batches of an epoch are drawn before its first step; two may be empty."""
    net, found = RUN.make_net(), []
    nothing = torch.zeros(0, *RUN.problem.input_shape), torch.zeros(0).long(), torch.zeros(0).long()
    steps = steps_of(net, 5, 4, noise=1.0)
    steps.drawn()
    for _ in range(2):
        steps.put_gradients(Batch(*nothing), loss, "fedavg")
        found.append(torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()]))
    assert not torch.equal(*found)


def test_no_draw_of_a_run_is_drawn_again(digits, tmp_path, monkeypatch):
    """Many of its batches are empty: of all epochs, phases, clients and tasks."""
    drawn, plain = [], Secret.normal

    def normal(secret, content, purpose):
        drawn.append(plain(secret, content, purpose))
        return drawn[-1]

    monkeypatch.setattr(Secret, "normal", normal)
    few, once = {"batch_size": 2, "local_epochs": 1}, {"rounds": 1}
    experiment = tiny_experiment(method="fedrep", privacy=NOISE, training=few, schedule=once)
    run_in_process(experiment, digits, tmp_path / "run")
    assert len(drawn) > 100
    assert len({noise.numpy().tobytes() for noise in drawn}) == len(drawn)


def test_other_trainings_of_one_interaction_have_another_name_and_noise(digits):
    """A server that begins again may send other weights, or an open run another learning rate."""
    plain = hiding("fedproto", prototype_clip=1.0)
    secret = Secret(b"s" * 32)

    def hidden_in(experiment, others=None, at=START):
        ctx = context_of(experiment, digits)
        ctx.secret, ctx.at = lambda: secret, at
        payload, state = payload_of(experiment, ctx)
        half = ClientHalf(method_of(experiment), ctx, others or payload, state)
        half.begin()
        return half.ctx.hidden

    now = hidden_in(plain)
    assert hidden_in(plain).name == now.name, "the same after a crash"
    changed = plain.model_copy(update={"training": plain.training.model_copy(update={"lr": 1.0})})
    sent = Bundle(prototypes={"class": Prototypes.of({0: (torch.ones(16), 0)}, 16)})
    others = [hidden_in(changed), hidden_in(plain, sent), hidden_in(plain, at=Position(0, 1, 0))]
    z, y = torch.ones(now.examples, 2), torch.zeros(now.examples, dtype=torch.int64)
    found = {
        (one.name, private_class_sums(z, y, 3, one, secret, 0)[0].numpy().tobytes())
        for one in (now, *others)
    }
    assert len({name for name, _ in found}) == 4
    assert len({sums for _, sums in found}) == 4


def test_each_example_is_in_a_batch_with_the_same_chance():
    steps = steps_of(RUN.make_net(), 40, 10)
    sizes = [len(batch) for _ in range(50) for batch in steps.drawn()]
    assert len(sizes) == 200
    assert sum(sizes) / 200 == pytest.approx(10, abs=4 * math.sqrt(40 * 0.25 * 0.75 / 200))
    assert len(set(sizes)) > 5, "their size varies"


def test_class_sums_by_hand():
    """The embedding (3, 4) is scaled to a norm of 1; nearly no noise."""
    hidden = hidden_of([7, 8, 9], 2, prototypes=True, noise_multiplier=1e-9, prototype_clip=1.0)
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 1.0]])
    sums, counts = private_class_sums(z, torch.tensor([0, 0, 1]), 3, hidden, Secret(b"s" * 32), 0)
    assert sums.flatten().tolist() == pytest.approx([0.9, 1.2, 0, 1, 0, 0], abs=1e-5)
    assert counts.tolist() == pytest.approx([2, 1, 0], abs=1e-5)


def test_copies_of_an_example_are_drawn_together_and_have_one_bound():
    """Of the inputs A, B, A, C, A, those of A give at most 0.5 in all, whatever their labels."""
    net, x = RUN.make_net(), torch.randn(5, *RUN.problem.input_shape)
    x[2] = x[4] = x[0]
    steps = steps_of(net, [7, 8, 7, 9, 7], 3)
    for _ in range(20):
        for batch in steps.drawn():
            assert len({0, 2, 4} & {*batch.tolist()}) in (0, 3)
    copies, y = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0])
    large = lambda batch, out: 100 * loss(batch, out)  # noqa: E731
    steps.put_gradients(Batch(x[copies], y, copies), large, "fedavg")
    flat = torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()])
    assert 0 < float(flat.norm()) * 3 <= 0.5 + 1e-6, "times the expected size of a batch"
    hidden = hidden_of([7, 8, 7, 9, 7], 3, prototypes=True, noise_multiplier=1e-9,
                       prototype_clip=1.0)  # fmt: skip
    z, labels = torch.ones(5, 1), torch.tensor([0, 2, 1, 2, 0])
    sums, counts = private_class_sums(z, labels, 3, hidden, Secret(b"s" * 32), 0)
    assert counts.tolist() == pytest.approx([2 / 3, 1 / 3, 2], abs=1e-5), "A counts once"
    assert sums.flatten().tolist() == pytest.approx([2 / 3, 1 / 3, 2], abs=1e-5)


def test_a_run_tells_what_each_client_spent_and_ends_before_more(digits, tmp_path):
    """Tasks have other examples, so a client spends what its longest task costs."""
    out = tmp_path / "whole"
    summary = run_in_process(hiding(), digits, out)
    done = records_of(out)
    spent = [record["clients"]["0"]["epsilon"] for record in done]
    assert spent[0] < spent[2], "the same task costs more each time"
    assert summary["metrics"]["epsilon"] == max(
        row["epsilon"] for record in done for row in record["clients"].values()
    )
    first = [row["epsilon"] for record in done[:2] for row in record["clients"].values()]
    limited = hiding(epsilon=1.001 * max(first))
    short = run_in_process(limited, digits, tmp_path / "short")
    assert len(records_of(tmp_path / "short")) == 2, "of 4"
    assert short["metrics"]["epsilon"] == max(first)
    again = run_in_process(limited, digits, tmp_path / "short", resume=True)
    assert again["state_sha256"] == short["state_sha256"]


def test_prototypes_of_clients_that_hide_examples_have_noise_from_the_start(digits, tmp_path):
    for method in (SMALL_GLDP, "fedproto"):
        out = tmp_path / str(len(str(method)))
        run_in_process(hiding(method, prototype_clip=1.0), digits, out)
        assert all("epsilon" in row for row in records_of(out)[-1]["clients"].values())


@pytest.mark.parametrize(
    ("experiment", "line"),
    [
        ({"method": "fedproto"}, "prototype_clip is needed"),
        ({"method": "fedem"}, "method 'fedem' keeps"),
        ({"method": "pfedgrp"}, "of earlier tasks as well"),
        ({"method": "target"}, "of earlier tasks as well"),
        ({"allow": ()}, "adds no noise to all that leaves"),
    ],
)
def test_what_cannot_hide_its_examples_is_refused(digits, tmp_path, experiment, line):
    with pytest.raises(FedtideError, match=line):
        run_in_process(hiding(**experiment), digits, tmp_path / "run")


def test_a_training_for_a_score_alone_is_refused_by_the_config_and_by_a_client(
    digits, tmp_path, caplog
):
    """Nobody would charge it, and the coordinator is not trusted to ask for none."""
    with pytest.raises(ConfigError, match='trained = "all" trains for scores alone'):
        tiny_experiment(
            privacy=NOISE, evaluate={"trained": "all"}, schedule={"per_round": 2, "clients": 3}
        )
    known = Workers([0], digits, tmp_path, torch.device("cpu"))
    known.begin(hiding())
    order = rpc.Order(
        kind=rpc.ORDER_KIND_EVALUATE, client_id="0", base=-1, committed=-1, durable=-1,
        views=["after_local"], tasks_seen=1,
    )  # fmt: skip
    payload = Bundle(known.of(0).run.initial_weights)
    assert known.of(0).execute(order, payload).failure
    assert "an order to train for a score, which nobody would charge" in caplog.text
