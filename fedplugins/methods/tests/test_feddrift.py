"""FedDrift and FedDrift-Eager: the test for a drift, new models, and which models merge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmodels.config.reduction import Reduction
from fedmodels.errors import PayloadError
from fedmodels.methods import make
from fedmodels.nets.split import weights_of
from fedmodels.reductions.rule import rule_of
from fedmodels.tensors.aggregation_rule import Facts
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedplugins.methods.feddrift import clusters
from tests.conftest import (
    OneTask,
    context_of,
    linear_context,
    method_of,
    payload_of,
    tiny_experiment,
)

HEAD = "head/weight"
RAY = torch.tensor([[1.0], [-1.0]])
"""Of a model a, whose matrix is a times this, the first class is right of x where a x > 0."""
ONE_STEP = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}


def drifting(name="feddrift", **fields):
    method = {"name": name, "models": 3, **fields}
    return tiny_experiment(method=method, training=ONE_STEP)


def server_of(models, tables, *, used=(0, 0, 0), born=(-1, -1, -1), step=0):
    """Return the state with models a by number, and the models of each client's tasks."""
    nets = {f"model{m}/{HEAD}": a * RAY for m, a in models.items()}
    own = {"used": used, "born": born, "step": (step,)}
    clients = {c: Bundle({"models": torch.tensor(row)}) for c, row in tables.items()}
    return ServerState(Bundle(nets), Bundle({k: torch.tensor(v) for k, v in own.items()}), clients)


def server_at(experiment, task, cohort=(0, 1, 2)):
    run = RunFacts(experiment, Problem((1,), 2))
    run.__dict__["forms"] = {HEAD: torch.zeros(2, 1)}
    return ServerContext(run, Position(9, 9, task), cohort)


class Tasks(OneTask):
    """A stream of tasks: by number the inputs, each of one feature, and the classes."""

    def __init__(self, *tasks):
        self.tasks = [(torch.tensor(x).float()[:, None], torch.tensor(y).long()) for x, y in tasks]

    def train(self, task):
        return self.tasks[task]

    def train_each(self, task):
        return dict(enumerate(self.tasks[: task + 1]))


def trained(experiment, state, client, *tasks, accuracy=1.0):
    """Return what a client sends for its last task, and keeps; it was so accurate before."""
    task, method = len(tasks) - 1, method_of(experiment)
    common, tables = method.broadcast(server_at(experiment, task), state)
    payload = Bundle({**common.weights, **tables.get(client, Bundle()).weights})
    ctx = replace(linear_context(experiment, [[1.0]], [0], client), at=Position(9, 9, task))
    ctx.stream = Tasks(*tasks)
    kept = Bundle(scalars={"task": task - 1.0, "accuracy": accuracy, "before": -1.0})
    return train_locally(method, ctx, payload, kept)


def reduced(experiment, state, task, uploads):
    method = method_of(experiment)
    return reduce(method, server_at(experiment, task), state, as_uploads(method, uploads))


def slopes(state):
    """Return a by model."""
    return {k.split("/")[0]: t[0].item() for k, t in state.common.weights.items()}


def rows(state):
    return {c: held.weights["models"].tolist() for c, held in state.clients.items()}


@pytest.mark.parametrize(
    ("name", "new", "tables"),
    [
        ("feddrift-eager", {"model1": -0.4224123}, {0: [0, 1], 1: [0, 0], 2: [0, 1]}),
        ("feddrift", {"model1": 0.119203, "model2": -0.9640276}, {0: [0, 1], 1: [0, 0], 2: [0, 2]}),
    ],
)
def test_drifts_by_hand(name, new, tables):
    """All models are a multiple a of (1, -1), lr is 1, delta .1, and model 0 has a = 1.

    Client 0 had x = 1 of class 0, and has it of class 1 now: its accuracy falls from 1 to 0. Its
    new model starts from a = 1 and ends with a = 1 - s(2) = .1192030; on its first task it trains
    model 0, which ends with 1 + 1 - s(2) = 1.1192029. Client 2 had the same, and has x = 2 of
    class 1: its new model ends with 1 - 2 s(4) = -.9640276. Client 1 stays with model 0; its two
    tasks are alike, so its step is client 0's first one. Model 0's mean is 1.1192029, whatever
    counts; the new models' mean is (.1192030 - .9640276) / 2 = -.4224123 where there is one.
    """
    experiment = drifting(name)
    state = server_of({0: 1.0}, {c: [0] for c in range(3)})
    first = ([1.0], [0])
    second = {0: ([1.0], [1]), 1: ([1.0], [0]), 2: ([2.0], [1])}
    results = {c: trained(experiment, state, c, first, own) for c, own in second.items()}
    assert [r.upload.scalars["drifted"] for r in results.values()] == [1, 0, 1]
    assert [r.state.scalars["accuracy"] for r in results.values()] == [0, 1, 0]
    assert [r.upload.weights["examples"].tolist() for r in results.values()] == [
        [1, 0, 0, 1], [2, 0, 0, 0], [1, 0, 0, 1]
    ]  # fmt: skip
    after, metrics = reduced(experiment, state, 1, {c: r.upload for c, r in results.items()})
    assert slopes(after) == pytest.approx({"model0": 1.1192029, **new}, abs=1e-6)
    assert rows(after) == tables
    assert metrics["clients_drifted"] == pytest.approx(2 / 3)
    assert metrics["models_kept"] == 1 + len(new)
    common, _ = method_of(experiment).broadcast(server_at(experiment, 1), after)
    assert common.weights["open"].tolist() == [1, 0, 0]  # new models are apart in their step
    common, _ = method_of(experiment).broadcast(server_at(experiment, 2), after)
    assert common.weights["open"].tolist() == [1, 1, int(name == "feddrift")]


def test_each_client_begins_with_a_model_of_its_own_by_hand():
    """From a = 1, as in the drifts by hand: x = 1 of class 0 ends with 1.1192029, and x = 2 of
    class 1 with -.9640276. The first model, which nobody has then, makes room for the third client.
    In later rounds of the task nobody begins again, and after it models that fit alike merge.
    """
    experiment = drifting()
    state = server_of({0: 1.0}, {}, step=-1)
    tasks = {0: ([1.0], [0]), 1: ([1.0], [0]), 2: ([2.0], [1])}
    results = {c: trained(experiment, state, c, own, accuracy=-1.0) for c, own in tasks.items()}
    after, metrics = reduced(experiment, state, 0, {c: r.upload for c, r in results.items()})
    assert rows(after) == {0: [1], 1: [2], 2: [0]}
    expected = {"model0": -0.9640276, "model1": 1.1192029, "model2": 1.1192029}
    assert slopes(after) == pytest.approx(expected, abs=1e-6)
    assert (metrics["clients_drifted"], metrics["models_merged"]) == (1, 0)
    again = trained(experiment, after, 0, tasks[0], accuracy=-1.0)
    assert (again.upload.scalars["model"], again.upload.scalars["drifted"]) == (1, 0)
    common, _ = method_of(experiment).broadcast(server_at(experiment, 1), after)
    assert common.weights["open"].tolist() == [1, 1, 1]  # from the second task on they may merge
    alike = {c: trained(experiment, after, c, tasks[c], ([1.0], [0])) for c in (0, 1)}
    merged, metrics = reduced(experiment, after, 1, {c: r.upload for c, r in alike.items()})
    assert (metrics["models_merged"], rows(merged)) == (1, {0: [1, 1], 1: [1, 1], 2: [0]})


def test_models_that_fit_alike_merge_by_hand():
    """Models a = 1, -1 and -3; x = 1 is of class 0 in task 0 and of class 1 in tasks 1 and 2.

    Models 1 and 2 are right on each other's data, and neither is right on model 0's. On task 2,
    both clients take model 1. Both clients train model 1 on x = 1 of class 1: a = -1 - s(-2) =
    -1.1192029, and client 1 trains model 2: a = -3 - s(-6) = -3.0024726. Of the tasks, model 1 has
    three and model 2 one: merged, a = (3 * -1.1192029 - 3.0024726) / 4 = -1.5900203. Model 0 is
    nobody's at present, and nobody trains it.
    """
    experiment = drifting()
    state = server_of({0: 1.0, 1: -1.0, 2: -3.0}, {0: [0, 1], 1: [0, 2]}, used=(1, 1, 1), step=1)
    tasks = ([1.0], [0]), ([1.0], [1]), ([1.0], [1])
    results = {c: trained(experiment, state, c, *tasks) for c in (0, 1)}
    assert results[0].upload.weights["correct"].tolist() == [[1, 0, 0], [0, 2, 0], [0, 2, 0]]
    assert results[1].upload.weights["correct"].tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    uploads = {c: r.upload for c, r in results.items()}
    after, metrics = reduced(experiment, state, 2, uploads)
    expected = {"model0": 1.0, "model1": -1.5900203}
    assert slopes(after) == pytest.approx(expected, abs=1e-6)
    assert rows(after) == {0: [0, 1, 1], 1: [0, 1, 1]}
    assert (metrics["models_merged"], metrics["models_kept"]) == (1, 2)
    state.own.weights["step"][0] = 2  # in a later round of the step nothing merges
    assert len(slopes(reduced(experiment, state, 2, uploads)[0])) == 3
    assert len(slopes(reduced(drifting("feddrift-eager"), state, 2, uploads)[0])) == 3


def test_groups_are_those_of_complete_linkage():
    """Distances .05 (0, 1), .08 (1, 2) and .2 (0, 2): single linkage would merge all three."""
    accuracy = np.array([[0.9, 0.85, 0.7], [0.9, 0.9, 0.82], [0.9, 0.9, 0.9]])
    for holders in ([3] * 3, [1] * 3):
        assert clusters(accuracy, 0.1, holders) == [[0, 1], [2]]
        assert clusters(accuracy, 0.21, holders) == [[0, 1, 2]]
        assert clusters(accuracy, 0.04, holders) == [[0], [1], [2]]
    assert clusters(accuracy[:1, :1], 0.1, [1]) == [[0]]


def test_the_longest_unused_model_makes_room():
    """Nobody is with models 1 and 2 now, and 2 goes: its tasks are nobody's then."""
    experiment, never = drifting(), (-1, -1, -1)
    tables = {0: [0], 1: [2, 1, 0]}
    state = server_of({0: 1.0, 1: 3.0, 2: 3.0}, tables, used=(5, 4, 3), born=never)
    result = trained(experiment, state, 0, ([1.0], [0]), ([1.0], [1]))
    after, _ = reduced(experiment, state, 1, {0: result.upload})
    assert slopes(after)["model2"] == pytest.approx(0.119203, abs=1e-6)
    assert rows(after) == {0: [0, 2], 1: [-1, 1, 0]}


def test_a_model_of_one_client_makes_room_before_one_of_several():
    """Model 1 is the longer unused one, and two clients had it; model 2 was client 0's alone."""
    tables = {0: [2, 0], 1: [1, 0], 2: [1, 0]}
    state = server_of({0: 1.0, 1: 3.0, 2: 3.0}, tables, used=(5, 3, 4), born=(-1, -1, -1))
    result = trained(drifting(), state, 0, ([1.0], [0]), ([1.0], [0]), ([1.0], [1]))
    after, _ = reduced(drifting(), state, 2, {0: result.upload})
    assert rows(after) == {0: [-1, 0, 2], 1: [1, 0], 2: [1, 0]}


def test_a_model_in_use_makes_no_room():
    """Client 1 is away, and has the longest unused model; model 2 is nobody's now."""
    tables = {0: [0], 1: [1], 2: [2, 0]}
    state = server_of({0: 1.0, 1: 3.0, 2: 3.0}, tables, used=(5, 3, 4), born=(-1, -1, -1))
    experiment = drifting()
    result = trained(experiment, state, 0, ([1.0], [0]), ([1.0], [1]))
    after, _ = reduced(experiment, state, 1, {0: result.upload})
    assert rows(after) == {0: [0, 2], 1: [1], 2: [-1, 0]}


def test_counts_of_models_that_nobody_has_merge_nothing():
    tables = {0: [0, 0]}
    state = server_of({0: 1.0, 1: 3.0, 2: 3.0}, tables, used=(1, 1, 1), step=0)
    right = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 1]])
    counts = {"examples": torch.tensor([1, 1, 1, 0]), "correct": right}
    told = {"num_examples": 1.0, "model": 0.0, "drifted": 0.0}
    lie = Bundle({f"model0/{HEAD}": RAY, **counts}, scalars=told)
    after, metrics = reduced(drifting(), state, 1, {0: lie})
    assert (len(slopes(after)), metrics["models_merged"]) == (3, 0)


@pytest.mark.parametrize("name", ["feddrift", "feddrift-eager"])
def test_a_client_drifts_once_a_task(name):
    """Client 0 has a model on task 1, and says in a later round that none fits."""
    sent = {f"new/{HEAD}": 9 * RAY, "examples": torch.tensor([0, 0, 0, 1])}
    lie = Bundle(sent, scalars={"num_examples": 1.0, "model": 0.0, "drifted": 1.0})
    state = server_of({0: 1.0}, {0: [0, 0]}, step=1)
    after, metrics = reduced(drifting(name), state, 1, {0: lie})
    assert (slopes(after), rows(after)) == ({"model0": 1.0}, {0: [0, 0]})
    assert metrics["clients_drifted"] == 0


@pytest.mark.parametrize("name", ["feddrift", "feddrift-eager"])
def test_rules_measure_from_what_a_model_was_trained_from(name):
    """The step of the new model moves a by s(2) = .8807970, so its difference has the norm
    sqrt(2) .8807970, and half of it is left: a is 1 - .4403985. Model 0 moves by 1 - s(2), less.
    """
    experiment = drifting(name)
    rule = rule_of(Reduction(reduce="norm_clipped", clip_norm=2**0.5 * 0.8807970 / 2))
    state = server_of({0: 1.0}, {0: [0]})
    result = trained(experiment, state, 0, ([1.0], [0]), ([1.0], [1]))
    method, ctx = method_of(experiment), server_at(experiment, 1)
    facts = Facts(given=method.broadcast(ctx, state)[0])
    uploads = Uploads({0: result.upload}, method.count, method.reduction, rule=rule, facts=facts)
    assert slopes(reduce(method, ctx, state, uploads)[0]) == pytest.approx(
        {"model0": 1.1192030, "model1": 0.5596015}, abs=1e-6
    )


def test_most_clients_say_what_their_new_model_was_trained_from():
    """A rule measures differences from it: of three, one liar names model 1, far from the others'.

    Honest models move from a = 1 to 1 - s(2) = .1192030, by sqrt(2) .8807970, and differences are
    shortened to that norm at most: so the mean of three lies within that of model 0.
    """
    experiment, bound = drifting("feddrift-eager"), 2**0.5 * 0.8807970
    rule = rule_of(Reduction(reduce="norm_clipped", clip_norm=bound))
    state = server_of({0: 1.0, 1: 900.0}, {c: [0] for c in range(3)})
    sent = trained(experiment, state, 1, ([1.0], [0]), ([1.0], [1])).upload
    lie = replace(sent, scalars={**sent.scalars, "model": 1.0})
    method, ctx = method_of(experiment), server_at(experiment, 1)
    facts = Facts(given=method.broadcast(ctx, state)[0])
    uploads = Uploads({0: lie, 1: sent, 2: sent}, method.count, "each", rule=rule, facts=facts)
    assert slopes(reduce(method, ctx, state, uploads)[0])["model2"] == pytest.approx(0.119203, 1e-5)


def test_without_room_a_client_stays_with_what_fits_best():
    experiment = drifting(models=1)
    state = server_of({0: 1.0}, {0: [0], 1: [0]}, used=(0,), born=(-1,))
    results = {
        0: trained(experiment, state, 0, ([1.0], [0]), ([1.0], [1])),
        1: trained(experiment, state, 1, ([1.0], [0]), ([1.0], [0])),
    }
    after, _ = reduced(experiment, state, 1, {c: r.upload for c, r in results.items()})
    assert rows(after) == {0: [0, 0], 1: [0, 0]}
    assert slopes(after) == pytest.approx({"model0": 1.1192029}, abs=1e-6)


@pytest.mark.parametrize(
    "name", [{"name": "feddrift", "reading": {"begins": "one"}}, {"name": "feddrift-eager"}]
)
def test_with_one_model_at_first_nothing_drifts_on_the_first_task_and_it_is_fedavg(digits, name):
    found = []
    for method in (name, {"name": "fedavg"}):
        experiment = tiny_experiment(method=method)
        ctx = context_of(experiment, digits)
        result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        found.append((result.upload, result.loss))
    (mine, loss), (theirs, expected) = found
    assert loss == expected
    assert mine.scalars == {
        "num_examples": theirs.scalars["num_examples"],
        "model": 0,
        "drifted": 0,
    }
    assert all(torch.equal(mine.weights[f"model0/{k}"], t) for k, t in theirs.weights.items())


def test_a_new_task_is_answered_with_the_model_that_a_client_had():
    experiment = drifting()
    state = server_of({0: 1.0, 1: -1.0}, {0: [1]})
    method = method_of(experiment)
    common, tables = method.broadcast(server_at(experiment, 1), state)
    payload = Bundle({**common.weights, **tables[0].weights})
    ctx = replace(linear_context(experiment, [[1.0]], [0]), at=Position(9, 9, 1))
    ctx.stream = Tasks(([1.0], [1]), ([1.0], [0]))

    def loaded(view, state):
        here = replace(ctx, view=view, made={})
        method.load(here, payload, state)
        return weights_of(here.net)[HEAD][0].item()

    kept = Bundle(scalars={"task": 0.0, "accuracy": 1.0, "before": -1.0})
    assert loaded("after_downlink", kept) == -1.0
    assert loaded("", kept) == 1.0


@pytest.mark.parametrize(
    ("weights", "scalars", "line"),
    [
        ({}, {"model": 2.0}, "names model 2, and there are"),
        ({}, {"drifted": 0.5}, "names model 0"),
        ({"examples": torch.tensor([9, 0, 0, 0])}, {}, "the sum of tensor 'weights/examples' is 9"),
        ({"examples": torch.tensor([2, -1, 0, 0])}, {}, "a number below 0"),
        ({f"new/{HEAD}": RAY}, {}, "'new', which the client has no data for"),
        ({f"model1/{HEAD}": RAY}, {}, "'model1', which the client has no data for"),
        ({"correct": torch.full((3, 3), 3)}, {}, "counts more than"),
    ],
)
def test_lies_are_refused(weights, scalars, line):
    experiment = drifting()
    state = server_of({0: 1.0}, {})
    told = {"num_examples": 2.0, "model": 0.0, "drifted": 0.0, **scalars}
    sent = {f"model0/{HEAD}": RAY, "examples": torch.tensor([2, 0, 0, 0]), **weights}
    counts = DeclaredCounts(0, *(torch.tensor([2, 0]) for _ in range(3)))
    check = make("feddrift", models=3).check_upload
    with pytest.raises(PayloadError, match=line):
        check(server_at(experiment, 0), state, Bundle(sent, scalars=told), counts)


def counted(right, told=None, n=10, liar=()):
    """Return ten uploads on task 1: clients 0 to 2 have model 0, 3 to 5 model 1, 6 to 8 model 2.

    Model i is right on ``right[i][j]`` of ten examples of model j. Client 9 has all three, and
    says that it has ``n`` of each and that model i is right on ``told[i][j]`` of them.
    """
    honest, uploads = torch.tensor(right), {}
    said = {"num_examples": 10.0, "model": 0.0, "drifted": 0.0}
    for client in range(9):
        has = torch.arange(3) == client // 3
        counts = {"examples": torch.tensor([*(10 * has).tolist(), 0]), "correct": honest * has}
        own = {"model": float(client // 3)}
        uploads[client] = Bundle(counts, scalars={**said, **own})
    counts = {"examples": torch.tensor([n, n, n, 0]), "correct": torch.tensor(told or right)}
    return uploads | {9: Bundle(counts, scalars=said)}


def merged_by(uploads):
    tables = {c: [c // 3] for c in range(9)} | {9: [0]}
    state = server_of({0: 1.0, 1: -1.0, 2: -3.0}, tables, used=(1, 1, 1), step=0)
    experiment = drifting()
    ctx, method = server_at(experiment, 1, tuple(range(10))), method_of(experiment)
    return reduce(method, ctx, state, as_uploads(method, uploads))[1]["models_merged"]


APART = [[9, 2, 2], [2, 9, 2], [2, 2, 9]]
TWO_ALIKE = [[9, 9, 2], [9, 9, 2], [2, 2, 9]]


def test_one_client_of_ten_merges_no_concepts_however_many_examples_it_claims():
    assert merged_by(counted(APART)) == 0
    assert merged_by(counted(APART, [[50_000] * 3] * 3, 50_000)) == 0


@pytest.mark.parametrize("n", [10, 50_000])
def test_one_client_of_ten_prevents_no_merge(n):
    assert merged_by(counted(TWO_ALIKE)) == 1
    assert merged_by(counted(TWO_ALIKE, [[n, 0, 0], [0, n, 0], [0, 0, n]], n)) == 1


def test_a_model_of_one_client_neither_merges_nor_parts_those_of_many():
    """The last model is one client's, who says that all are right on it, or that it alone is.

    Models 0 and 1 are within .1 of each other, and 2 is apart. By complete linkage over all four,
    the liar's would join model 0 first, and model 1 would stay alone.
    """
    told = np.array([[0.9, 0.85, 0.2, 0.0], [0.85, 0.9, 0.2, 0.0], [0.2, 0.2, 0.9, 0.0]])
    lie = np.vstack([told, [0.9, 0.2, 0.2, 0.0]])
    lie[0, 3] = 1.0
    groups = clusters(lie, 0.1, [3, 4, 3, 1])
    assert next(g for g in groups if 0 in g)[:2] == [0, 1]
    alike = lie.copy()
    alike[:, 3] = alike[3] = 0.9
    assert [g for g in clusters(alike, 0.1, [3, 3, 3, 1]) if 2 in g and {0, 1} & {*g}] == []
