"""Optimisers, schedules, clipping and losses of local training, against torch's own."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from fedmodels.config.changes import forbidden_changes
from fedmodels.config.training import LrSchedule, Training
from fedmodels.errors import ConfigError
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.contexts import Position
from fedmodels.training.criterion import check_own_loss, criterion_of
from fedmodels.training.loop import train_locally
from fedmodels.training.optimizer import check_training, factor_at, lr_of, optimizer_of
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from tests.conftest import linear_context, method_of, tiny_experiment
from tests.runs import dies, ends_as, killed

STEPS = 10
RNG = torch.Generator().manual_seed(3)
X, Y = torch.randn(6, 3, generator=RNG), torch.tensor([0, 1, 0, 0, 1, 0])
OPTIONS = {
    "adadelta": {"rho": 0.8}, "adam": {"betas": [0.8, 0.9]}, "sgd": {"nesterov": True},
    "rmsprop": {"momentum": 0.5, "centered": True},
}  # fmt: skip
CLASSES = {each.lower(): each for each in dir(torch.optim)}


def context(interaction=0, **training):
    experiment = tiny_experiment(
        training={"lr": 0.1, "batch_size": len(Y), **training}, schedule={"rounds": STEPS}
    )
    ctx = linear_context(experiment, X.tolist(), Y.tolist())
    ctx.at = Position(interaction, interaction, 0)
    return ctx


def trained(ctx):
    """Return the weights (2, 3) after local training from zeros."""
    start = Bundle(weights=weights_of(ctx.net))
    return train_locally(FedAvg(), ctx, start, Bundle()).upload.weights["head/weight"]


def by_torch(make, clip=None, schedule=None, loss=cross_entropy, steps=STEPS):
    """Return the same weights after steps in a plain loop."""
    w = nn.Parameter(torch.zeros(2, 3))
    optimizer = make([w])
    course = schedule(optimizer) if schedule else None
    for _ in range(steps):
        optimizer.zero_grad()
        loss(X @ w.T, Y).backward()
        if clip:
            nn.utils.clip_grad_norm_([w], clip)
        optimizer.step()
        if course:
            course.step()
    return w.detach()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


# --- optimisers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Training.model_fields["optimizer"].annotation.__args__)
def test_ten_steps_of_each_optimiser_are_torchs(name):
    options = OPTIONS.get(name, {})
    own = {"momentum": 0.5} if name == "sgd" else {}
    decay = {} if name == "rprop" else {"weight_decay": 0.25}
    kind = getattr(torch.optim, CLASSES[name])
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    found = trained(
        context(optimizer=name, local_epochs=STEPS, optimizer_options=options, **own, **decay)
    )
    wanted = by_torch(lambda w: kind(w, lr=0.1, **given, **own, **decay))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.abs().max() > 5e-4


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"optimizer_options": {"beta": 0.5}}, "'sgd' takes no 'beta'"),
        ({"optimizer_options": {"lr": 0.5}}, "cannot hold 'lr', which has a key"),
        ({"optimizer_options": {"foreach": True}}, "'foreach' says how torch computes a step"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "'rprop' has none"),
        ({"optimizer": "adam", "optimizer_options": {"betas": [2.0, 0.9]}}, "Invalid beta"),
        ({"optimizer": "adam", "optimizer_options": {"betas": True}}, "optimizer = 'adam'"),
    ],
)
def test_what_an_optimiser_does_not_take_is_said_at_the_start(training, said):
    with pytest.raises(ConfigError, match=said):
        check_training(tiny_experiment(training=training))


# --- schedules ------------------------------------------------------------------------------------

COURSES = {
    "constant": ({}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "linear": ({"final": 0.1}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS)),
    "cosine": ({"final": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, 0.01)),
    "step": ({"every": 3, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
    "exponential": ({"gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
}


@pytest.mark.parametrize("kind", COURSES)
def test_ten_epochs_of_a_schedule_are_torchs(kind):
    keys, torchs = COURSES[kind]
    course = {"kind": kind, "over": "epochs", **keys}
    found = trained(context(local_epochs=STEPS, lr_schedule=course))
    wanted = by_torch(sgd, schedule=torchs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert (kind == "constant") == torch.allclose(found, by_torch(sgd), rtol=1e-4)


@pytest.mark.parametrize("kind", COURSES)
def test_a_rate_over_rounds_with_a_warm_up_is_torchs(kind):
    """torch's warm-up of w steps: LinearLR from 1/w, w - 1 steps long; then the course."""
    keys, torchs = COURSES[kind]
    course = {"kind": kind, "warmup": 4, **keys}
    if kind in ("linear", "cosine"):
        course["length"] = STEPS + 4
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    with warnings.catch_warnings():  # torch's own SequentialLR warns of an order that is right
        warnings.simplefilter("ignore")
        warm = lr_scheduler.LinearLR(optimizer, 1 / 4, 1.0, 3)
        both = lr_scheduler.SequentialLR(optimizer, [warm, torchs(optimizer)], [4])
        for t in range(STEPS):
            ctx = context(interaction=t, lr_schedule=course)
            assert lr_of(ctx) == pytest.approx(optimizer.param_groups[0]["lr"])
            step = trained(ctx)
            torch.testing.assert_close(step, by_torch(sgd, steps=1) * lr_of(ctx) / 0.1)
            optimizer.step()
            both.step()


def test_a_course_ends_where_it_says():
    course = LrSchedule(kind="linear", final=0.25, length=4)
    assert [factor_at(course, t, 100) for t in range(6)] == [1, 0.8125, 0.625, 0.4375, 0.25, 0.25]


def test_each_task_has_the_course_anew_where_tasks_come_one_after_another():
    def rates(order):
        experiment = tiny_experiment(
            schedule={"rounds": 2, "order": order},
            training={"lr": 1.0, "lr_schedule": {"kind": "exponential", "gamma": 0.5}},
        )
        ctx = linear_context(experiment, X.tolist(), Y.tolist())
        found = []
        for t in range(4):
            ctx.at = Position(t, t, t // 2)
            found.append(lr_of(ctx))
        return found

    assert rates("tasks_outer") == [1, 0.5, 1, 0.5]
    assert rates("rounds_outer") == [1, 0.5, 0.25, 0.125]


def test_each_task_of_a_client_has_the_course_anew_in_an_open_run():
    """A line from 1 to 0 over four rounds; the second task begins in round 3, the third in 5."""
    experiment = tiny_experiment(
        schedule={"rounds": 2, "order": "tasks_outer", "open": True},
        training={"lr": 1.0, "lr_schedule": {"kind": "linear", "length": 4}},
    )
    ctx = linear_context(experiment, X.tolist(), Y.tolist())
    found = []
    for t, began in enumerate([0, 0, 0, 3, 3, 5, 5]):
        ctx.at = Position(t, t, 0, began=began)
        found.append(lr_of(ctx))
    assert found == [1, 0.75, 0.5, 1, 0.75, 1, 0.75]


@pytest.mark.parametrize(
    ("course", "said"),
    [
        ({"kind": "step", "gamma": 0.5}, "needs every"),
        ({"kind": "cosine", "gamma": 0.5}, "knows no gamma"),
        ({"kind": "exponential", "gamma": 0.5, "final": 0.5}, "belong to linear and cosine"),
        ({"kind": "linear", "length": 3, "warmup": 3}, "ends within warmup"),
    ],
)
def test_a_course_has_its_numbers(course, said):
    with pytest.raises(ConfigError, match=said):
        context(lr_schedule=course)


@pytest.mark.parametrize(
    ("course", "may_grow"),
    [({"kind": "cosine"}, False), ({"kind": "cosine", "length": 9}, True),
     ({"kind": "step", "every": 2, "gamma": 0.5}, True)],
)  # fmt: skip
def test_a_run_grows_unless_its_earlier_rates_would_change(course, may_grow):
    short, longer = (
        tiny_experiment(schedule={"rounds": n}, training={"lr_schedule": course}) for n in (2, 3)
    )
    assert forbidden_changes(short, longer) == ([] if may_grow else ["schedule.rounds"])


def test_the_rest_of_a_schedule_and_the_moments_of_the_server_outlive_a_crash(digits, tmp_path):
    experiment = tiny_experiment(
        method="ditto",  # whose twin has an optimiser of its own
        schedule={"rounds": 3},
        training={"lr_schedule": {"kind": "cosine", "warmup": 1}, "clip_norm": 1.0,
                  "loss": "focal", "optimizer": "nadam"},
        server_optimizer={"name": "fedyogi", "lr": 0.01},
    )  # fmt: skip
    whole, out = run_in_process(experiment, digits, tmp_path / "whole"), tmp_path / "cut"
    killed(experiment, digits, out, before=dies(interaction=3, client_id="1"))
    ends_as(whole, experiment, digits, out)
    other = experiment.model_copy(update={"server_optimizer": None})
    found = run_in_process(other, digits, tmp_path / "other")
    assert found["state_sha256"] != whole["state_sha256"]


# --- clipping -------------------------------------------------------------------------------------


def test_clipped_steps_are_torchs():
    found = trained(context(local_epochs=STEPS, clip_norm=0.2))
    torch.testing.assert_close(found, by_torch(sgd, clip=0.2), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(found, by_torch(sgd), rtol=1e-2)


# --- losses ---------------------------------------------------------------------------------------


def focal(z: Tensor, y: Tensor) -> Tensor:
    from torchvision.ops import sigmoid_focal_loss  # takes seconds to import

    return sigmoid_focal_loss(z[:, 1] - z[:, 0], y.float(), -1, 1.5, "mean")


LOSSES = [
    ({"label_smoothing": 0.2}, lambda z, y: cross_entropy(z, y, label_smoothing=0.2)),
    ({"class_weights": [1.0, 3.0]}, lambda z, y: cross_entropy(z, y, torch.tensor([1.0, 3.0]))),
    ({"class_weights": "balanced"}, lambda z, y: cross_entropy(z, y, torch.tensor([0.75, 1.5]))),
    ({"loss": "focal", "focal_gamma": 1.5}, focal),
]
"""Settings, and the same loss by torch; 4 and 2 of 6 labels weigh 6 / (2 * 4) and 6 / (2 * 2)."""


@pytest.mark.parametrize(("training", "loss"), LOSSES)
def test_ten_steps_of_each_loss_are_torchs(training, loss):
    found = trained(context(local_epochs=STEPS, **training))
    torch.testing.assert_close(found, by_torch(sgd, loss=loss), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, by_torch(sgd), rtol=1e-3)


def test_the_focal_loss_of_a_sure_net_has_a_gradient_for_every_exponent():
    for gamma in (0.0, 0.5, 2.0):
        loss = criterion_of(context(loss="focal", focal_gamma=gamma).run, Y)
        z = (200 * nn.functional.one_hot(Y, 2)).float().requires_grad_()
        loss(z, Y).backward()
        assert z.grad.isfinite().all()


@pytest.mark.parametrize(
    ("method", "training", "said"),
    [
        ("fedem", {"loss": "focal"}, "loss has no effect: FedEM trains with a loss of its own"),
        ("fedem", {"label_smoothing": 0.1}, "label_smoothing has no effect"),
        ("fedcil", {"clip_norm": 1.0}, "clip_norm has no effect: FedCIL trains with steps"),
    ],
)
def test_a_method_with_a_loss_or_steps_of_its_own_says_so(method, training, said, digits, tmp_path):
    tables = {"method": {"name": method}, "training": training}
    if method == "fedcil":
        tables |= {"net": {"name": "acgan"}, "method": {"name": method, "iterations": 1}}
    experiment = tiny_experiment(**tables)
    with pytest.raises(Exception, match=said):
        run_in_process(experiment, digits, tmp_path / "run")


@pytest.mark.parametrize(
    ("method", "training", "said"),
    [
        ("target", {"loss": "focal"}, "a loss of its own for earlier tasks"),
        ("fedavg", {"class_weights": [1.0, 2.0, 3.0]}, "has 3 weights for 2 classes"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_at_the_start(method, training, said):
    experiment = tiny_experiment(method=method, training=training)
    with pytest.raises(ConfigError, match=said):
        check_own_loss(method_of(experiment), RunFacts(experiment, Problem((3,), 2)))


def test_the_options_of_an_optimiser_follow_a_learning_rate_of_zero():
    ctx = context()
    group = {"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.25}
    found = optimizer_of([group], ctx, 0.0).param_groups[0]
    assert (found["lr"], found["weight_decay"]) == (0.0, 0.25)
