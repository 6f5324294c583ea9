"""GLFC: the two losses, the memory, what the proxy rebuilds, and which old model is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedplugins.methods.glfc as glfc_module
from fedmodels.errors import PayloadError
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.roles import under
from fedmodels.training.contexts import START, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedplugins.methods.glfc import (
    Work,
    compensation,
    encoder,
    entropy,
    gradients,
    gradients_of_each,
    herded,
)
from tests.conftest import OneTask, linear_context, tiny_experiment

HEAD = "head/weight"
NEVER = Bundle({"memory": torch.zeros(0, 2, dtype=torch.int64)}, scalars={"entropy": 0.0})
ONE_STEP = {"local_epochs": 1, "batch_size": 100, "lr": 1.0}
FEW = {"perturb_steps": 1, "rebuild_steps": 2, "images": 1}


def glfc(**fields):
    return tiny_experiment(method={"name": "glfc", **FEW, **fields}, training=ONE_STEP)


class Tasks(OneTask):
    """A stream of several tasks, of which the last is open."""

    def __init__(self, *tasks):
        super().__init__(*tasks[-1])
        self.tasks = [(torch.tensor(x), torch.tensor(y)) for x, y in tasks]

    def train_each(self, task):
        return dict(enumerate(self.tasks[: task + 1]))


def at_task(experiment, *tasks):
    ctx = linear_context(experiment, *tasks[-1])
    ctx.stream, ctx.at = Tasks(*tasks), replace(START, task=len(tasks) - 1)
    return ctx


def test_old_and_new_classes_weigh_by_their_own_means():
    """Sigmoids of the right class are 1/2, 3/4, 1/2 and 9/10, so G is .5, .25, .5, .1.

    The first two are new: mean .375, weights 4/3 and 2/3. The others are old: mean .3, weights 5/3
    and 1/3. Without an old class all are 1.
    """
    logits = torch.tensor([[0.0, 0.0], [torch.log(torch.tensor(3.0)), 0.0], [0.0, 0.0], [0.0, 0.0]])
    logits[3, 1] = torch.log(torch.tensor(9.0))
    y = torch.tensor([0, 0, 1, 1])
    found = compensation(logits, y, torch.tensor([False, True]))
    assert found.tolist() == pytest.approx([4 / 3, 2 / 3, 5 / 3, 1 / 3], abs=1e-6)
    assert compensation(logits, y, torch.tensor([False, False])).tolist() == [1.0] * 4
    saturated = compensation(torch.full((1, 2), 1e4), y[2:3], torch.tensor([False, True]))
    assert saturated.tolist() == [0.0]


def test_both_losses_by_hand():
    """Logits are 0, so each binary cross-entropy is ln 2 whatever its target: L_GC and L_RD too.

    With logits (ln 3, 0) and class 0: cross-entropies ln 4/3 and ln 2, mean L_GC = .4904146. The
    old model knows class 1 and says sigmoid 1/4 there: targets are 1 and 1/4, of which the second
    costs ln 2 again. It knows class 0 and says 1/4 there: ln 4 - ln 3 / 4 = 1.1116413 in place of
    ln 4/3, so L_RD = (1.1116413 + ln 2) / 2 = .9023943 and the loss is half of each, .6964045.
    """
    logits = torch.tensor([[torch.log(torch.tensor(3.0)), 0.0]])
    x, y = torch.zeros(1, 1), torch.tensor([0])
    nothing, none = torch.zeros(2).bool(), (x[:0], y[:0])
    refs = Work(0.0, False, NEVER.weights["memory"], none, nothing, None, nothing, ~nothing)
    ctx = linear_context(glfc(), [[0.0]], [0])
    batch = Batch(x, y, torch.zeros(1).long())
    method = make("glfc")
    first = method.loss(ctx, batch, Output(x, logits), refs)
    assert float(first) == pytest.approx(0.4904146, abs=1e-6)
    old = replace(refs, old=ctx.net, known=torch.tensor([True, False]))
    said = replace(batch, taught=(torch.full((1, 2), 0.25),))
    assert float(method.loss(ctx, said, Output(x, logits), old)) == pytest.approx(0.6964045, 1e-6)
    alone = make("glfc", kd=0.0).loss(ctx, said, Output(x, logits), old)
    assert float(alone) == pytest.approx(float(first))


def test_columns_of_classes_that_nobody_has_met_do_not_train():
    """Of three columns two are met: losses are those of the two, and the third's logit gets no
    gradient. A client trains its own classes and those that the server says are met."""
    logits = torch.tensor([[torch.log(torch.tensor(3.0)), 0.0, 7.0]], requires_grad=True)
    x, y = torch.zeros(1, 1), torch.tensor([0])
    nothing, none = torch.zeros(3).bool(), (x[:0], y[:0])
    met = torch.tensor([True, True, False])
    ctx = at_task(glfc(), ([[0.0]], [0]))
    refs = Work(0.0, False, NEVER.weights["memory"], none, nothing, ctx.net, met, met)
    batch = Batch(x, y, torch.zeros(1).long(), taught=(torch.full((1, 3), 0.25),))
    loss = make("glfc").loss(ctx, batch, Output(x, logits), refs)
    loss.backward()
    assert logits.grad[0, 2] == 0
    # L_GC = (ln 4/3 + ln 2) / 2, and L_RD = (1.1116413 + ln 2) / 2 as above
    assert loss.item() == pytest.approx((0.4904146 + 0.9023943) / 2, abs=1e-6)
    mine = make("glfc").prepare(ctx, Bundle(), NEVER)
    assert mine.met.tolist() == [True, False]
    told = Bundle({"known/met": torch.tensor([0, 1], dtype=torch.uint8)})
    assert make("glfc").prepare(ctx, told, NEVER).met.tolist() == [True, True]


def test_exemplars_follow_the_mean():
    """Of 0, 1, 2, 6 the mean is 2.25: 2 is nearest; with 2, a pair with 1 (1.5) is nearer than with
    6 (4); then 2, 1, 6 have 3, which is nearer than 1."""
    z = torch.tensor([[0.0], [1.0], [2.0], [6.0]])
    assert herded(z, 3) == [2, 1, 3]
    assert herded(z, 9) == [2, 1, 3, 0]


def test_the_entropy_of_a_net_that_knows_nothing():
    ctx = linear_context(glfc(), [[1.0]], [0])
    assert entropy(ctx, torch.ones(3, 1)) == pytest.approx(0.6931272, abs=1e-6)  # ln 2 - 2e-5


def test_a_new_task_puts_old_classes_into_memory_as_many_of_each():
    """The entropy rises from .1 to ln 2, by more than r_h = .5; of three exemplars each of two
    classes gets one. In the next training the entropy stays, and so does the memory."""
    first = [[1.0], [2.0], [3.0]], [0, 0, 0]
    second = [[-1.0], [-2.0]], [1, 1]
    before = Bundle(NEVER.weights, scalars={"entropy": 0.1})
    experiment = glfc(r_h=0.5, memory=3)
    method = make("glfc", r_h=0.5, memory=3)
    ctx = at_task(experiment, first, second, ([[5.0]], [0]))
    work = method.prepare(ctx, Bundle(), before)
    assert work.is_transition
    assert sorted(task for task, _ in work.memory.tolist()) == [0, 1]
    assert work.exemplars[1].tolist() == [0, 1]
    assert work.learnt.tolist() == [True, True]
    x, y = method.training_data(ctx, work)
    assert (len(x), y.tolist()) == (3, [0, 0, 1])
    kept = method.after_local(ctx, before, work)
    again = method.prepare(ctx, Bundle(), kept)
    assert not again.is_transition
    assert torch.equal(again.memory, work.memory)


def test_exemplars_of_a_task_that_is_gone_are_left_out():
    ctx = at_task(glfc(), ([[1.0]], [0]), ([[1.0]], [1]))
    held = Bundle({"memory": torch.tensor([[0, 0]])}, scalars={"entropy": 9.0})
    assert make("glfc").prepare(ctx, Bundle(), held).exemplars[1].tolist() == [0]
    ctx.stream.train_each = lambda task: {1: ctx.stream.train(1)}
    gone = make("glfc").prepare(ctx, Bundle(), held)
    assert not len(gone.exemplars[1])
    assert not gone.learnt.any()


def run_of(**fields):
    return RunFacts(glfc(**fields), Problem((1, 8, 8), 3))


def test_the_proxy_reads_the_class_from_a_gradient_and_rebuilds_the_image():
    run = run_of()
    gamma = encoder(run)
    assert all(
        torch.equal(a, b)
        for a, b in zip(gamma.parameters(), encoder(run).parameters(), strict=True)
    )
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    names = [name for name, _ in gamma.named_parameters()]
    sent = {n: g.detach()[None] for n, g in zip(names, gradients(gamma, x, 2), strict=True)}
    ctx = ServerContext(run, START, (0,))
    method = make("glfc", rebuild_steps=40, images=1)
    shown = method.rebuilt(ctx, {7: sent})
    images = shown["x"]
    assert (shown["y"].tolist(), shown["of"].tolist()) == ([2], [7])
    drawn = torch.randn(1, 1, 8, 8, generator=ctx.generator())
    assert float((images - x).norm()) < 0.5 * float((drawn - x).norm())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9), (7,)])
def test_gradients_of_many_examples_are_those_of_each(shape):
    """And so are the gradients, for the examples, of their distance to others: those that the proxy
    goes down. Autograd takes both through one example at a time."""
    gamma = encoder(RunFacts(glfc(), Problem(shape, 4)))
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = torch.tensor([0, 3, 1, 1, 2])
    together = gradients_of_each(gamma, x, y)
    down = torch.autograd.grad(sum((t - 0.25).square().sum() for t in together), x)[0]
    for i in range(5):
        one = x[i : i + 1].detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(gamma(one), y[i : i + 1])
        alone = torch.autograd.grad(loss, [*gamma.parameters()], create_graph=True)
        for mine, its in zip(together, alone, strict=True):
            assert torch.allclose(mine[i], its, rtol=1e-5, atol=1e-6)
        its = torch.autograd.grad(sum((t - 0.25).square().sum() for t in alone), one)[0][0]
        assert float((down[i] - its).abs().max()) < 1e-5 * float(its.abs().max())


def uploaded(run, weights, label=None, n=5.0):
    gamma, x = encoder(run), torch.ones(1, 1, 8, 8)
    names = [name for name, _ in gamma.named_parameters()]
    found = [] if label is None else gradients(gamma, x, label)
    grads = {name: g.detach()[None] for name, g in zip(names, found, strict=False)}
    return Bundle({**weights, **under("grads", grads)}, scalars={"num_examples": n})


def test_the_best_model_becomes_the_last_one_when_a_new_task_is_met(monkeypatch):
    """Accuracies are .5, .4, .7 in the first task, then .2 and .1: best is the first model, then
    the third; at the transition the third is the old one, and the fourth the best."""
    run, method = run_of(), make("glfc", **FEW)
    told = iter([0.5, 0.4, 0.7, 0.2, 0.1])
    monkeypatch.setattr(type(method), "accuracy", lambda *_: next(told))
    state = method.init_server(run)
    weights = dict(state.common.weights)
    last, best = [], []
    for round, label in enumerate([0, None, None, 1, None]):
        key = next(iter(weights))
        sent = {**weights, key: torch.full_like(weights[key], float(round))}
        at = replace(START, task=round // 3)
        ctx = ServerContext(run, at, (0, 1), labels={0: (0,), 1: (0,)})
        uploads = as_uploads(method, {c: uploaded(run, sent, label) for c in (0, 1)})
        state, metrics = reduce(method, ctx, state, uploads)
        assert metrics["task_transitions"] == (label is not None)
        own = state.own.weights
        best.append(own[f"best/{key}"].flatten()[0].item())
        last.append(own[f"last/{key}"].flatten()[0].item() if f"last/{key}" in own else None)
    assert best == [0, 0, 2, 3, 3]
    assert last == [None, None, None, 2, 2]
    common, parts = method.broadcast(ctx, state)
    assert parts[0].weights["known/last"].tolist() == [1, 0, 0]
    assert parts[0].weights["known/met"].tolist() == [1, 0, 0]
    assert not any(k.startswith(("last", "best", "proxy")) for k in common.weights)
    assert method.broadcast(replace(ctx, scores=True), state)[1] == {}
    assert not any(key.startswith("proxy") for key in parts[0].weights)


def reduced_by(state, labels, task=0):
    """Return state and metrics after a round of so many clients, of which some send a class."""
    run, method = run_of(), make("glfc", **FEW)
    state = state or method.init_server(run)
    ctx = ServerContext(run, replace(START, task=task), range(len(labels)))
    sent = {c: uploaded(run, state.common.weights, label) for c, label in enumerate(labels)}
    return reduce(method, ctx, state, as_uploads(method, sent))


def test_one_client_of_ten_begins_no_task():
    """The server does no work for it, and no old model moves; two of ten begin one."""
    state, metrics = reduced_by(None, [0] + [None] * 9)
    assert metrics == {"task_transitions": 0}
    assert not any(key.startswith("proxy") for key in state.own.weights)
    state, metrics = reduced_by(None, [0, 1] + [None] * 8)
    assert metrics["task_transitions"] == 0.2
    assert state.own.weights["proxy/of"].tolist() == [0, 1]


def test_a_client_begins_a_task_once():
    state, _ = reduced_by(None, [0, 1])
    shown = state.own.weights["proxy/x"]
    state, metrics = reduced_by(state, [2, None])
    assert metrics["task_transitions"] == 0
    assert state.own.weights["proxy/x"] is shown
    assert reduced_by(state, [2, None], task=1)[1]["task_transitions"] == 0.5


def test_a_client_has_one_prototype_of_each_class_and_no_more_than_it_announced():
    """Gradients of one class three times are rebuilt once: work and voice of a liar are bounded."""
    run, method = run_of(), make("glfc", **FEW)
    one = uploaded(run, {}, 1).weights
    grads = {k.removeprefix("grads/"): torch.cat([t] * 3) for k, t in one.items()}
    ctx = ServerContext(run, START, (0,))
    assert method.rebuilt(ctx, {0: grads})["y"].tolist() == [1]
    state = method.init_server(run)
    sent = replace(uploaded(run, state.common.weights), weights={**state.common.weights,
                   **under("grads", grads)})  # fmt: skip
    counts = torch.tensor([5, 5, 0])
    with pytest.raises(PayloadError, match="holds 3 prototypes of 2 announced classes"):
        method.check_upload(ctx, state, sent, DeclaredCounts(0, counts, counts, counts))


def test_the_accuracy_is_the_median_over_clients():
    """Client 0's twenty images are all wrong, and of the other two clients' one each is right."""
    run, method = run_of(), make("glfc", **FEW)
    weights = method.init_server(run).common.weights
    x = torch.randn(22, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    net = run.make_net()
    net.load_state_dict({k.replace("/", ".", 1): t for k, t in weights.items()})
    y = net.eval()(x).argmax(1)
    y[:20] = (y[:20] + 1) % 3
    shown = {"x": x, "y": y, "of": torch.tensor([0] * 20 + [1, 2])}
    assert method.accuracy(run, weights, shown) == 1.0
    assert method.accuracy(run, weights, {"x": x, "y": y}) == pytest.approx(2 / 22)


@pytest.mark.filterwarnings("error")
def test_the_proxy_rebuilds_many_prototypes_by_as_many_closures_as_one(monkeypatch):
    """Twelve prototypes of four clients take 20 closures for each iteration, as one does."""
    calls = []
    plain = glfc_module.RowsLBFGS.step

    def step(self, evaluate):
        return plain(self, lambda x: (calls.append(len(x)), evaluate(x))[1])

    monkeypatch.setattr(glfc_module.RowsLBFGS, "step", step)
    run, method = run_of(), make("glfc", **FEW)
    told = {}
    for client in range(4):
        each = [uploaded(run, {}, label).weights for label in range(3)]
        told[client] = {k.removeprefix("grads/"): torch.cat([w[k] for w in each]) for k in each[0]}
    shown = method.rebuilt(ServerContext(run, START, range(4)), told)
    assert shown["y"].tolist() == [0, 1, 2] * 4
    assert calls == [12] * 2 * 20


def test_the_client_takes_the_best_model_at_a_transition_and_else_the_last():
    ray = torch.tensor([[1.0], [-1.0]])
    masks = {"known/last": torch.tensor([1, 0]), "known/best": torch.tensor([1, 1])}
    payload = Bundle({HEAD: ray, f"last/{HEAD}": 2 * ray, f"best/{HEAD}": 3 * ray, **masks})
    ctx = linear_context(glfc(), [[1.0]], [0])
    ctx.run.__dict__["make_net"] = lambda *_: ctx.net.copy()
    for is_transition, a, known in ((True, 3.0, [True, True]), (False, 2.0, [True, False])):
        old, mask = make("glfc").old_model(ctx, payload, is_transition)
        assert old.head.weight[0].item() == a
        assert mask.tolist() == known
    first = Bundle({k: t for k, t in payload.weights.items() if "last" not in k})
    assert make("glfc").old_model(ctx, first, False)[0] is None


def test_an_upload_with_a_part_of_its_gradients_is_refused():
    run, method = run_of(), make("glfc", **FEW)
    state = method.init_server(run)
    whole = uploaded(run, state.common.weights, 1)
    ctx = ServerContext(run, START, (0,))
    announced = _announced()
    method.check_upload(ctx, state, whole, announced)
    name = next(k for k in whole.weights if k.startswith("grads/"))
    for wrong in (
        {k: t for k, t in whole.weights.items() if k != name},
        {**whole.weights, name: torch.cat([whole.weights[name]] * 2)},
    ):
        with pytest.raises(PayloadError, match="a part of its prototypes"):
            method.check_upload(ctx, state, replace(whole, weights=wrong), announced)


def _announced():
    counts = torch.tensor([5, 5, 5])
    return DeclaredCounts(0, counts, counts, counts)


def test_gradients_of_a_lie_that_lead_nowhere_choose_nothing():
    run, method = run_of(), make("glfc", **FEW)
    state = method.init_server(run)
    lie = uploaded(run, state.common.weights, 1)
    lie.weights.update({k: t * 1e30 for k, t in lie.weights.items() if k.startswith("grads/")})
    ctx = ServerContext(run, START, (0,), labels={0: (0,)})
    after, metrics = reduce(method, ctx, state, as_uploads(method, {0: lie}))
    assert isinstance(after, ServerState)
    assert metrics["task_transitions"] == 1


def test_without_memory_old_models_and_transitions_a_client_trains_its_task_alone():
    ctx = at_task(glfc(r_h=9.0), ([[1.0]], [0]), ([[1.0], [2.0]], [1, 1]))
    result = train_locally(make("glfc", r_h=9.0), ctx, Bundle({HEAD: torch.zeros(2, 1)}), NEVER)
    assert result.num_examples == 2
    assert [*result.upload.weights] == [HEAD]
