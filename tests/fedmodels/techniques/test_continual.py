"""Masks of classes, what is announced before a round, and several nets in one set of weights."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmodels.errors import PayloadError
from fedmodels.methods.fedavg import FedAvg
from fedmodels.techniques.continual import (
    ClassMasks,
    add_clients,
    cross_entropy_among,
    mask_of,
    masks_spec,
)
from fedmodels.techniques.moments import load_moments, moments_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.roles import part_of, tensors_of, under, without
from fedmodels.tensors.weighted_mean import weighted_mean
from fedmodels.training.contexts import START, ServerContext
from fedmodels.training.run import RunFacts
from fedsrv.engine.client_profile import Profile, common_limits
from fedsrv.engine.plan import Plan
from fedsrv.engine.round_parts import RoundParts
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort, transported
from tests.conftest import tiny_experiment


def context(labels, cohort=(0, 1), classes=4):
    run = RunFacts(tiny_experiment(), Problem((2,), classes))
    return ServerContext(run, START, cohort, labels=labels)


# --- masks ----------------------------------------------------------------------------------------


def test_masks_of_a_stream_whose_classes_come_back():
    """Client 0 holds class 0, then 2, then 0 again; client 1 holds 1 and fails in the second."""
    first = context({0: (0,), 1: (1,)})
    told = add_clients(first, None, first.cohort)
    assert told.round.tolist() == told.total.tolist() == [1, 1, 0, 0]
    masks = ClassMasks.of(told)
    assert masks.now.tolist() == masks.seen.tolist() == [True, True, False, False]
    assert not masks.before.any()
    kept = add_clients(first, None, (0, 1))
    second = context({0: (2,), 1: (1, 3)})
    masks = ClassMasks.of(add_clients(second, kept, second.cohort))
    assert masks.now.tolist() == [False, True, True, True]
    assert masks.before.tolist() == [True, True, False, False]
    assert masks.seen.all()
    kept = add_clients(second, kept, (0,))
    masks = ClassMasks.of(add_clients(context({0: (0,)}, (0,)), kept, (0,)))
    assert masks.now.tolist() == [True, False, False, False]
    assert masks.before.tolist() == [True, True, True, False]  # nobody has trained on class 3


def test_masks_travel():
    told = add_clients(context({0: (3,), 1: (3, 1)}), None, (0, 1))
    came = transported(Bundle(histogram=told), masks_spec(4)).histogram
    assert came.round.tolist() == [0, 1, 0, 2]
    assert mask_of(torch.tensor([2, 0, 2]), 4).tolist() == [True, False, True, False]


def test_the_loss_among_some_classes_is_that_of_a_smaller_head():
    """Columns 1 and 3 of (9, 1, 9, 2): label 3 is the second of logits (1, 2)."""
    odd = torch.tensor([1, 3])
    logits = torch.tensor([[9.0, 1.0, 9.0, 2.0]], requires_grad=True)
    loss = cross_entropy_among(logits, torch.tensor([3]), odd)
    assert float(loss.detach()) == pytest.approx(0.313262, abs=1e-6)  # log(1 + e^-1)
    loss.backward()
    assert logits.grad[0, 0] == logits.grad[0, 2] == 0
    assert logits.grad[0, 1] == pytest.approx(0.268941, abs=1e-6)
    every = torch.arange(4)
    assert torch.equal(
        cross_entropy_among(logits, torch.tensor([3]), every),
        cross_entropy(logits, torch.tensor([3])),
    )
    nothing = cross_entropy_among(logits[:0], torch.zeros(0, dtype=torch.int64), odd)
    assert float(nothing.detach()) == 0.0
    assert nothing.requires_grad


# --- what the server half is told -----------------------------------------------------------------


def facts(**changes):
    tasks = [{"train": [3, 0], "test": [1, 0]}, {"train": [0, 5], "test": [0, 2]}]
    return json.dumps(
        {"format": 1, "input_shape": [3, 8, 8], "num_classes": 2, "tasks": tasks, **changes}
    )


def test_a_single_class_teaches_nothing():
    """A softmax over one column is 1 whatever the logit: the loss is 0, and so is its gradient."""
    logits = torch.tensor([[3.0, -1.0, 0.5], [0.0, 2.0, 1.0]], requires_grad=True)
    loss = cross_entropy_among(logits, torch.tensor([1, 1]), torch.tensor([1]))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_description_says_labels_and_limits():
    profile = Profile.parse(0, facts(mean=[0.5, 0.25, 0.0], std=[0.5]))
    assert profile.labels(0) == (0,)
    assert profile.labels(1) == (1,)
    assert profile.labels(2) == ()
    low, high = profile.limits
    assert low.tolist() == [-1.0, -0.5, 0.0]
    assert high.tolist() == [1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    "changes",
    [{"mean": [0.0] * 2}, {"std": [0.0]}, {"std": [1e-45]}, {"mean": ["a"]}, {"mean": [[0.0]]}],
)
def test_a_normalisation_that_is_none_is_refused(changes):
    with pytest.raises(PayloadError, match=r"client 0: client\.json is malformed"):
        Profile.parse(0, facts(**changes))


def test_one_client_does_not_say_what_black_is():
    """Of three clients one announces another normalisation; one has a number for all channels."""
    said = [{"mean": [0.5] * 3}, {"mean": [-1e30]}, {"mean": [0.5]}]
    low, high = common_limits(Profile.parse(c, facts(**s)) for c, s in enumerate(said))
    assert low.tolist() == [-0.5] * 3
    assert high.tolist() == [0.5] * 3


def test_the_engine_tells_the_server_half(digits, tmp_path):
    """Labels of the clients' tasks; when a task ends; and what is told comes out as an event."""
    experiment = tiny_experiment(schedule={"rounds": 2, "order": "tasks_outer"})
    store, events = Store(tmp_path / "out", experiment, False), EventLog()
    try:
        cohort = InProcessCohort(experiment, digits, tmp_path / "out" / "clients")
        plan = Plan.of(FedAvg(), store, cohort.gather())
        commits = SimpleNamespace(cohort=cohort, store=store, events=events)
        parts = RoundParts(plan, commits)
        contexts = [parts.context(step, step.cohort) for step in plan.steps]
        assert [c.ends_task for c in contexts] == [False, True, False, False]
        for ctx in contexts:
            for client in ctx.cohort:
                _, y = cohort.workers.of(client).data.arrays(ctx.task, "train")
                assert ctx.labels[client] == tuple(sorted(set(y.tolist())))
        assert [edge.tolist() for edge in contexts[0].limits] == [
            edge.tolist() for edge in cohort.workers.of(0).stream.limits()
        ]
        found = []
        listener = threading.Thread(target=lambda: found.extend(events.listen(from_start=True)))
        listener.start()
        contexts[1].tell("generator", 3, 10, 0.5)
        events.close()
        listener.join()
    finally:
        store.close()
    assert (found[0].kind, found[0].interaction) == ("server", 1)
    assert found[0].detail == {"work": "generator", "step": 3, "of": 10, "loss": 0.5}


# --- what travels beside the net, and what is kept ------------------------------------------------


def test_several_nets_in_one_set_of_weights():
    """The mean covers every role: floats are averaged, integer buffers take the maximum."""
    flows = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    uploads = []
    for number, flow in enumerate(flows):
        nn.init.constant_(flow.weight, 1.0 + 2 * number)
        own = {"base/w": torch.tensor([4.0 * number])}
        order = under("flow", {"order": torch.tensor([1, 0])})
        uploads.append({**own, **under("flow", tensors_of(flow)), **order})
    mean = weighted_mean(uploads, [3.0, 1.0], 4.0)
    assert mean["base/w"].tolist() == [1.0]
    flow = part_of(mean, "flow")
    assert flow["weight"].tolist() == [[1.5]]
    assert flow["order"].tolist() == [1, 0]
    assert without(mean, "flow").keys() == {"base/w"}
    assert without(mean, "critic") is mean


def test_kept_moments_go_on():
    """Two steps of one optimiser are two steps of two that hand their moments on."""

    def step(adam, parameter):
        (parameter**2).sum().backward()
        adam.step()
        adam.zero_grad()

    whole = nn.Parameter(torch.tensor([1.0, -2.0]))
    adam = torch.optim.Adam([whole], lr=0.1)
    step(adam, whole)
    step(adam, whole)
    halves = nn.Parameter(torch.tensor([1.0, -2.0]))
    first = torch.optim.Adam([halves], lr=0.1)
    step(first, halves)
    kept = moments_of({"net": first})
    second = torch.optim.Adam([halves], lr=0.1)
    load_moments({"net": second}, kept)
    step(second, halves)
    assert torch.equal(whole, halves)
