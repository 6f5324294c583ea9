"""FedEM: responsibilities, the symmetry trap, and one learner as FedAvg."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from fedcli.data.store.commands import run_partition
from fedcli.runtime.worker import Worker
from fedmodels.nets.split import load_weights
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedplugins.baselines.fedem import losses_of, responsibilities
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import write_server_data
from tests.conftest import OneTask, context_of, method_of, payload_of, tiny_experiment


def context(root, learners=3, client=0, **training):
    experiment = tiny_experiment(
        method={"name": "fedem", "learners": learners}, training=training or {"lr": 0.05}
    )
    ctx = context_of(experiment, root, client)
    return method_of(experiment), ctx, *payload_of(experiment, ctx)


def test_responsibilities_by_hand():
    """Losses (ln 2, 0) and (0, 0), pi (.5, .5): q = (1/3, 2/3) and (1/2, 1/2)."""
    losses = torch.tensor([[torch.tensor(2.0).log(), 0.0], [0.0, 0.0]])
    q = responsibilities(losses, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(q, torch.tensor([[1 / 3, 2 / 3], [0.5, 0.5]]).double())
    q = responsibilities(losses, torch.tensor([0.8, 0.2]))
    torch.testing.assert_close(q[0], torch.tensor([2 / 3, 1 / 3]).double())


def test_sweeps_never_raise_the_likelihood_loss():
    """With fixed learners, EM lowers -sum_s log sum_m pi_m exp(-l)."""
    torch.manual_seed(0)
    losses, pi = 3 * torch.rand(50, 4), torch.full((4,), 0.25).double()
    values = []
    for _ in range(20):
        values.append(-float((pi * (-losses.double()).exp()).sum(1).log().sum()))
        q = responsibilities(losses, pi)
        torch.testing.assert_close(q.sum(1), torch.ones(50).double())
        pi = q.mean(0)
        assert float(pi.sum()) == pytest.approx(1)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(values))
    assert values[-1] < values[0]


def test_learners_start_different():
    experiment = tiny_experiment(method={"name": "fedem"})
    run = RunFacts(experiment, Problem((1, 8, 8), 10))
    weights = method_of(experiment).init_server(run).common.weights
    first = [weights[f"learner{m}/head/weight"] for m in range(3)]
    assert torch.equal(first[0], run.initial_weights["head/weight"])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


def test_identical_learners_stay_identical(digits):
    """The symmetry trap, which different initial weights avoid."""
    method, ctx, payload, state = context(digits, learners=2)
    weights = dict(payload.weights)
    for key in list(weights):
        if key.startswith("learner1/"):
            weights[key] = weights[key.replace("learner1/", "learner0/")].clone()
    upload = train_locally(method, ctx, Bundle(weights=weights), state).upload
    for key, tensor in upload.weights.items():
        if key.startswith("learner1/"):
            assert torch.equal(tensor, upload.weights[key.replace("learner1/", "learner0/")])


def test_one_learner_is_fedavg(digits):
    method, ctx, payload, state = context(digits, learners=1, batch_size=16, lr=0.05)
    mine = train_locally(method, ctx, payload, state)
    plain = tiny_experiment(training={"batch_size": 16, "lr": 0.05})
    other = context_of(plain, digits)
    theirs = train_locally(method_of(plain), other, *payload_of(plain, other))
    for key, tensor in theirs.upload.weights.items():
        torch.testing.assert_close(mine.upload.weights[f"learner0/{key}"], tensor)
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert mine.state.weights["pi"].tolist() == [1.0]


def test_pi_is_the_mean_responsibility_of_all_examples(digits):
    method, ctx, payload, state = context(digits)
    learners = method._learners(payload)
    x, y = ctx.stream.train(0)
    expected = responsibilities(losses_of(ctx, learners, x, y), state.weights["pi"]).mean(0)
    result = train_locally(method, ctx, payload, state)
    torch.testing.assert_close(result.state.weights["pi"], expected)
    assert not torch.allclose(expected, torch.full((3,), 1 / 3).double())


def test_pi_stays_where_there_is_no_example(digits):
    method, ctx, payload, state = context(digits)
    ctx.stream = OneTask([], [])
    state = Bundle({"pi": torch.tensor([0.5, 0.3, 0.2])})
    refs = method.prepare(ctx, payload, state)
    assert torch.equal(refs.pi, state.weights["pi"])
    assert refs.q.shape == (0, 3)


def test_examples_keep_their_weights_when_shuffled(digits):
    """q is looked up by position: one step on the whole set is the gradient of mean q l."""
    method, ctx, payload, state = context(digits, learners=2, batch_size=1000, lr=0.1)
    x, y = ctx.stream.train(0)
    upload = train_locally(method, ctx, payload, state).upload
    learners = method._learners(payload)
    q = responsibilities(losses_of(ctx, learners, x, y), state.weights["pi"]).float()
    for m in range(2):
        load_weights(ctx.net, learners[m])
        ctx.net.zero_grad()
        (q[:, m] * cross_entropy(ctx.net(x), y, reduction="none")).mean().backward()
        for key, parameter in ctx.net.named_parameters():
            moved = parameter.detach() - 0.1 * parameter.grad
            name = f"learner{m}/{key.replace('.', '/', 1)}"
            torch.testing.assert_close(upload.weights[name], moved, rtol=1e-5, atol=1e-6)


def test_predictions_mix_probabilities(digits):
    method, ctx, payload, _ = context(digits, learners=2)
    pi = torch.tensor([0.3, 0.7]).double()
    x = ctx.stream.train(0)[0][:5]
    ctx.net.eval()
    with torch.no_grad():
        scores = method.predict(ctx, payload, Bundle(weights={"pi": pi}), x)["mixture"]
    expected = torch.zeros(5, 10)
    for m, learner in enumerate(method._learners(payload)):
        load_weights(ctx.net, learner)
        expected += float(pi[m]) * ctx.net(x).detach().softmax(1)
    torch.testing.assert_close(scores.exp(), expected)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(5))


def test_the_mixture_may_be_estimated_anew_under_the_learners_received(digits):
    """Predictions mix by the mean responsibility under the payload's learners, not by pi."""
    method, ctx, payload, _ = context(digits, learners=2)
    anew, pi = replace(method, mixture="received"), torch.tensor([0.3, 0.7]).double()
    state, ctx.view = Bundle(weights={"pi": pi}), "after_downlink"
    x, y = ctx.stream.train(0)
    expected = responsibilities(losses_of(ctx, method._learners(payload), x, y), pi).mean(0)
    assert not torch.allclose(expected, pi, atol=1e-3)
    with torch.no_grad():
        found = anew.predict(ctx, payload, state, x[:5])["mixture"]
        by_hand = method.predict(ctx, payload, Bundle(weights={"pi": expected}), x[:5])
    torch.testing.assert_close(found, by_hand["mixture"])
    ctx.view = ""  # training begins from the pi that was kept: its E step comes once
    assert torch.equal(anew._mixture(ctx, payload, state), pi)


def test_a_mixture_estimated_anew_changes_scores_alone(digits, tmp_path):
    methods = {how: {"name": "fedem", "mixture": how} for how in ("trained", "received")}
    kept, anew = (
        run_in_process(tiny_experiment(method=method), digits, tmp_path / how)
        for how, method in methods.items()
    )
    assert kept["state_sha256"] == anew["state_sha256"]
    assert kept["metrics"]["loss"] == anew["metrics"]["loss"]


def test_bytes_are_those_of_all_learners(digits, tmp_path):
    schedule = {"rounds": 1, "clients": 3}
    runs = {
        m: run_in_process(
            tiny_experiment(method={"name": "fedem", "learners": m}, schedule=schedule),
            digits,
            tmp_path / str(m),
        )["bytes"]
        for m in (1, 2)
    }
    assert runs[2]["down"] == 2 * runs[1]["down"]


def test_a_mixture_estimated_anew_where_a_client_has_had_its_last_task(tmp_path):
    """The examples are those of its last task, also for a client that starts again at the end."""
    scenario = {"kind": "dirichlet", "alpha": 1.0, "tasks": [1, 2], "min_size": 3}
    schedule = {"rounds": 1, "clients": 2, "order": "tasks_outer"}
    experiment = tiny_experiment(
        scenario=scenario, schedule=schedule, method={"name": "fedem", "mixture": "received"}
    )
    data = tmp_path / "data"
    run_partition(experiment.data, experiment.scenario, 2, 0, data, Console(quiet=True))
    write_server_data(data)
    finish = Worker._finish

    def after_a_restart(self, order, payload):
        self.close()
        return finish(self, order, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "_finish", after_a_restart)
        assert 0 < run_in_process(experiment, data, tmp_path / "run")["metrics"]["a_loc"] <= 1
