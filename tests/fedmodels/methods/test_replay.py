"""Class replay: filter, shortage, drift test, what is private, and the two replay baselines."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.methods import make
from fedmodels.techniques import class_replay, generator_training
from fedmodels.techniques.class_replay import ALL, ClassReplay, Judge, Rehearsal, Replay, met
from fedmodels.techniques.generator_training import Course, Lesson, telling
from fedmodels.techniques.generators import Family, Painter, public, to_images, to_inputs
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Problem
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import check_parts
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, tiny_experiment

SHAPE = (1, 8, 8)
LIMITS = torch.tensor([-0.5]), torch.tensor([2.0])
FAMILY = Family(input_shape=SHAPE, width=4, epochs=2)
SMALL = {"generator_width": 4, "generator_epochs": 2, "n_check": 16}


def trained(family, tensors, inputs, seed):
    """Train one generator."""
    return family.trained([Lesson(tensors, to_images(tensors, inputs), seed)])[0]


def made(label, seed=None):
    return GeneratorState(1, FAMILY.fresh(label if seed is None else seed, LIMITS))


class Splitting(nn.Module):
    """Takes batches of any size."""

    def split(self, x, size):
        return x.split(size)


class Brightness(Splitting):
    """Takes images for class 1 whose mean is above a threshold, for class 0 otherwise."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(threshold))

    def forward(self, x):
        above = x.flatten(1).mean(1) - self.threshold
        return torch.stack([torch.zeros_like(above), above], 1)


def test_generators_have_the_sizes_of_the_papers_data_sets():
    """Section 5.1: 16 channels and 200 epochs for MNIST, 64 and 1000 for CIFAR; U-Nets alike."""
    grey, colour = (Family(input_shape=(channels, 32, 32)) for channels in (1, 3))
    assert grey.usual() == (16, 200, 1e-3)
    assert colour.usual()[:2] == (64, 1000)
    assert replace(colour, width=8, epochs=3).usual()[:2] == (8, 3)
    assert replace(colour, arch="ddpm").usual() == replace(grey, arch="ddpm").usual()


def middle_of(generator, seed, count=64):
    """The brightness that about half of a generator's images exceed."""
    images = Painter(FAMILY, generator.tensors).inputs(count, seed)
    return float(images.flatten(1).mean(1).median())


def seeds(word):
    return sum(map(ord, word))


# --- generators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["wgan", "dcgan", "ddpm"])
def test_the_same_seed_draws_the_same_images(arch):
    """Property 10: the server reproduces what the client sees, from what was uploaded alone."""
    family = Family(input_shape=SHAPE, arch=arch, width=16 if arch == "ddpm" else 4, epochs=1)
    tensors = trained(family, family.fresh(3, LIMITS), torch.rand(9, *SHAPE), seed=5)
    client, server = Painter(family, tensors), Painter(family, public(tensors))
    torch.manual_seed(1)
    first = client.inputs(6, 11)
    torch.manual_seed(2)
    assert torch.equal(server.inputs(6, 11), first)
    assert not torch.equal(server.inputs(6, 12), first)
    assert first.shape == (6, *SHAPE)
    assert bool((to_images(tensors, first).abs() <= 1 + 1e-6).all())


@pytest.mark.parametrize("arch", ["wgan", "ddpm"])
@pytest.mark.parametrize("moments", [False, True])
def test_training_goes_on_and_repeats(arch, moments):
    width, epochs = (16, 2) if arch == "ddpm" else (4, 6)
    family = Family(input_shape=SHAPE, arch=arch, width=width, epochs=epochs, moments=moments)
    x, start = torch.rand(9, *SHAPE), family.fresh(0, LIMITS)
    before = {k: t.clone() for k, t in start.items()}
    once = trained(family, start, x, seed=1)
    assert all(torch.equal(start[k], before[k]) for k in start)
    again = trained(family, start, x, seed=1)
    assert once.keys() == again.keys()
    assert all(torch.equal(once[k], again[k]) for k in once)
    further, afresh = trained(family, once, x, seed=1), trained(family, start, x, seed=1)
    assert any(not torch.equal(further[k], afresh[k]) for k in public(further))
    assert moments == any(k.startswith("moments/") for k in once)
    if moments:
        bare = {k: t for k, t in once.items() if not k.startswith("moments/")}
        cold = trained(family, bare, x, seed=1)
        assert any(not torch.equal(cold[k], further[k]) for k in public(cold))


def test_a_diffusion_model_draws_by_as_many_calls_as_it_is_told():
    few = Family(input_shape=SHAPE, arch="ddpm", width=16, evaluations=3)
    painter = Painter(few, few.fresh(0, LIMITS))
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    painter.net.register_forward_hook(count)
    painter.images(2, seed=0, batches=2)
    assert calls == 6
    with pytest.raises(ConfigError, match="generator_evaluations is of diffusion models"):
        Family(input_shape=SHAPE, evaluations=3)


def test_long_work_with_diffusion_models_is_told_beforehand(monkeypatch, caplog):
    """Ticks of a clock that gains a second a look: five steps take a second each and more."""
    clock = iter(range(10_000))
    monkeypatch.setattr(generator_training.time, "perf_counter", lambda: next(clock))
    course = Course(
        input_shape=SHAPE, arch="ddpm", width=16, epochs=200, batch_size=4, lr=0.1, moments=False
    )
    lessons = [Lesson({}, torch.zeros(n, *SHAPE), 0) for n in (8, 9)]  # two and three batches
    ticks = []
    tick = telling(course, lessons, lambda *each: ticks.append(each))
    for step in range(1, 8):
        tick(0, step, torch.tensor(0.0))
    assert len(ticks) == 7
    (line,) = caplog.messages
    assert "2 diffusion models train for about 16 min 40 s, 1000 steps of 1 s" in line


@pytest.mark.parametrize("arch", ["wgan", "ddpm"])
def test_long_drawing_is_told_of_diffusion_models_alone(arch, monkeypatch, caplog):
    """A GAN's images are one call each, and fewer evaluations, which the line names, refused."""
    monkeypatch.setattr(class_replay, "LONG_S", 0)
    some = {"width": 16, "evaluations": 1} if arch == "ddpm" else {"width": 4}
    family = Family(input_shape=SHAPE, arch=arch, batch_size=4, **some)
    held = GeneratorState(1, public(family.fresh(0, LIMITS)))
    replay = ClassReplay(family=family, settings=Replay(replay_attempts=3))
    judge = Judge(Brightness(0.0))
    replay.replayed({"0": held, "1": held}, torch.tensor([2, 3]), judge, seeds)
    assert len(caplog.messages) == (arch == "ddpm")
    assert not caplog.messages or "up to 15 images are drawn, of" in caplog.messages[0]


def test_what_may_leave_has_no_critic():
    kept = public(FAMILY.fresh(0, LIMITS))
    assert {k.partition("/")[0] for k in kept} == {"net", "affine"}
    assert kept.keys() == FAMILY.public_shapes().keys()


def test_wire_size_of_a_generator():
    """pfedgrp.md, section 5: 898,268 bytes; beside them the affine map and the version."""
    family = Family(input_shape=(1, 28, 28))
    state = GeneratorState(1, family.public_shapes())
    assert Bundle(generators={"3": state}).num_bytes() == 898_268 + 8 + 8


def test_affine_map():
    tensors = FAMILY.fresh(0, LIMITS)
    inputs = torch.tensor([-0.5, 2.0, 0.75]).view(3, 1, 1, 1).expand(3, *SHAPE)
    images = to_images(tensors, inputs)
    assert images[:, 0, 0, 0].tolist() == pytest.approx([-1, 1, 0])
    torch.testing.assert_close(to_inputs(tensors, images), inputs)


def test_a_gan_learns_a_bright_square():
    """Not only noise: after training, the middle of the images is brighter than their rim."""
    x = torch.full((64, *SHAPE), -0.5)
    x[:, :, 2:6, 2:6] = 2.0
    family = replace(FAMILY, epochs=100, width=8, lr=2e-3)
    images = Painter(family, trained(family, family.fresh(0, LIMITS), x, seed=0)).inputs(32, 0)
    assert float(images[:, :, 3:5, 3:5].mean()) > float(images[:, :, 0].mean()) + 0.7


# --- drawing --------------------------------------------------------------------------------------


def test_only_what_the_judge_recognises_is_kept():
    """Property 4, and the counts."""
    generator = made(1)
    judge = Judge(Brightness(middle_of(generator, seeds("draw/1"))))
    replay = ClassReplay(family=FAMILY)
    found = replay.replayed({"1": generator}, torch.tensor([0, 20]), judge, seeds)
    assert len(found.y) == found.asked == 20
    assert judge(found.x).argmax(1).tolist() == found.y.tolist() == [1] * 20
    assert 0 < found.accepted / found.drawn < 1
    assert found.shortage == 0


def test_acceptance_is_told_by_class():
    """One class is never recognised and drawn ten times over: 64 of 264, but 1 and 0 by class."""
    knows_zero = Judge(Brightness(1e6))  # takes everything for class 0
    replay = ClassReplay(family=FAMILY)
    found = replay.replayed({"0": made(0), "1": made(1)}, torch.tensor([20, 20]), knows_zero, seeds)
    assert (found.by_class, found.drawn) == ({0: 1, 1: 0}, 64 + 200)
    metrics = found.metrics()
    assert metrics["replay_acceptance_0"] == 1
    assert metrics["replay_acceptance_1"] == 0
    assert metrics["replay_acceptance"] < 0.3


def test_without_a_filter_everything_is_accepted():
    judge = Judge(Brightness(1e6))  # takes nothing for class 1
    replay = ClassReplay(family=FAMILY, settings=Replay(replay_filter=False))
    found = replay.replayed({"1": made(1)}, torch.tensor([0, 20]), judge, seeds)
    assert (len(found.y), found.drawn, found.accepted) == (20, 20, 20)
    assert found.metrics()["replay_acceptance"] == 1


@pytest.mark.parametrize("shortage", ["truncate", "fill_top"])
def test_what_is_lacking(shortage):
    """Nothing is accepted: 10 times 7 images are looked at, and no more."""
    generator, judge = made(1), Judge(Brightness(5.0))
    replay = ClassReplay(family=FAMILY, settings=Replay(shortage=shortage))
    found = replay.replayed({"1": generator}, torch.tensor([0, 7]), judge, seeds)
    assert (found.drawn, found.accepted, found.shortage) == (70, 0, 7)
    assert len(found.y) == (7 if shortage == "fill_top" else 0)
    if shortage == "fill_top":  # the brightest of all
        painter, start = Painter(FAMILY, generator.tensors), seeds("draw/1")
        looked = torch.cat([painter.inputs(64, start), painter.inputs(64, start + 1)])[:70]
        brightest = looked.flatten(1).mean(1).sort(descending=True).values[:7]
        torch.testing.assert_close(found.x.flatten(1).mean(1), brightest)


def test_a_surplus_of_one_class_does_not_hide_the_lack_of_another():
    """Images come in batches of 64: of ten that were asked for, all 64 are accepted."""
    family = Family(input_shape=(1, 8, 8), width=4)
    limits = torch.tensor([0.0]), torch.tensor([1.0])
    generators = {str(c): GeneratorState(1, family.fresh(c, limits)) for c in (0, 1)}
    replay = ClassReplay(family=family)
    found = replay.replayed(generators, torch.tensor([10, 10]), Judge(AlwaysZero()), lambda w: 1)
    assert torch.bincount(found.y, minlength=2).tolist() == [10, 0]
    assert (found.asked, found.accepted, found.shortage) == (20, 64, 10)


class AlwaysZero(Splitting):
    """Takes every image for class 0."""

    def __init__(self):
        super().__init__()
        self.logit = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.logit * torch.eye(2)[torch.zeros(len(x), dtype=torch.int64)]


def test_a_class_without_generator_is_lacking():
    found = ClassReplay(family=FAMILY).replayed(
        {}, torch.tensor([3, 0]), Judge(Brightness(0.0)), seeds
    )
    assert (len(found.y), found.asked, found.shortage) == (0, 3, 3)
    assert found.x.shape == (0, *SHAPE)
    assert "replay_acceptance" not in found.metrics()


def test_one_generator_for_all_is_labelled_by_the_judge():
    judge = Judge(Brightness(middle_of(made(0), seeds("draw/all"))))
    replay = ClassReplay(family=FAMILY, decoupled=False, soft=True)
    found = replay.replayed({ALL: made(0)}, torch.tensor([30, 10]), judge, seeds)
    assert len(found.y) == 40
    assert set(found.y.tolist()) == {0, 1}
    torch.testing.assert_close(found.soft, judge(found.x).softmax(1))


def test_judging_leaves_the_net_in_its_mode():
    class Net(nn.Sequential, Splitting):
        pass

    net = Net(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2)).train()
    mean = net[1].running_mean.clone()
    scores = Judge(net, batch_size=3)(torch.rand(8, *SHAPE))
    assert net.training
    assert not scores.requires_grad
    assert torch.equal(net[1].running_mean, mean)


# --- drift ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "drifted"), [(49, True), (50, False)])
def test_card_ratio(accepted, drifted):
    """200 images, 49 recognised -> .245 < .25 -> train; 50 -> .25 -> keep (anchor 5)."""
    replay, generator = ClassReplay(family=FAMILY), made(1)
    painter, parts = Painter(FAMILY, generator.tensors), (64, 64, 64, 64)
    looked = torch.cat([painter.inputs(n, 5 + k) for k, n in enumerate(parts)])[:200]
    ranked = looked.flatten(1).mean(1).sort(descending=True).values
    threshold = float((ranked[accepted - 1] + ranked[accepted]) / 2)
    ratio = replay.ratio(painter, 1, Judge(Brightness(threshold)), 5)
    assert ratio == accepted / 200
    assert replay.has_drifted(ratio) == drifted


def test_always_means_always():
    assert ClassReplay(family=FAMILY, settings=Replay(generator_update="always")).has_drifted(1.0)


def test_history():
    """S counts what was met; Y this round alone."""
    first = met(None, torch.tensor([0, 0, 2]), 4)
    second = met(first, torch.tensor([2, 3]), 4)
    assert second.round.tolist() == [0, 0, 1, 1]
    assert second.total.tolist() == [2, 0, 2, 1]


# --- the baselines --------------------------------------------------------------------------------

BASELINES = pytest.mark.parametrize(
    ("name", "parent"), [("fedavg-replay", "fedavg"), ("pfedgraph-replay", "pfedgraph")]
)


@BASELINES
def test_without_past_classes_it_is_its_parent(name, parent, digits, tmp_path):
    """One round: no history, so that nothing is replayed; the uploads are equal to the bit."""
    uploads = {}
    for method in ({"name": name, **SMALL}, {"name": parent}):
        experiment = tiny_experiment(method=method)
        ctx = context_of(experiment, digits)
        result = train_locally(method_of(experiment), ctx, *payload_of(experiment, ctx))
        uploads[method["name"]] = result.upload
    mine, theirs = uploads[name].by_key(), uploads[parent].by_key()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)


@BASELINES
def test_generators_never_leave(name, parent, digits):
    experiment = tiny_experiment(method={"name": name, **SMALL})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    result = train_locally(method, ctx, *payload_of(experiment, ctx))
    assert result.state.generators
    assert not result.upload.generators
    assert result.upload.histogram is None
    assert not any("generators" in key for key in method.upload_spec(ctx.run).optional)


@BASELINES
def test_replayed_classes_are_those_of_the_rule(name, parent, digits):
    """Per-class counts are Y_A: here everything met before and not now, filter off."""
    experiment = tiny_experiment(method={"name": name, **SMALL, "replay_filter": False})
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    state = train_locally(method, ctx, payload, state).state
    later = context_of(experiment, digits, task=1, interaction=1)
    method.load(later, payload, state)
    refs = method.prepare(later, payload, state)
    rehearsal = refs if isinstance(refs, Rehearsal) else refs.replay
    now, total = rehearsal.histogram.round, rehearsal.histogram.total
    found = torch.bincount(rehearsal.replayed.y, minlength=10)
    alpha = max(float(now[c] / total[c]) for c in now.nonzero().flatten().tolist())
    expected = [
        max(0, int(min(alpha * float(s) + 1e-9, float(now.max())) - float(y)))
        for s, y in zip(total, now, strict=True)
    ]
    assert found.tolist() == expected
    assert sum(expected) > 0


def test_replay_shapes_training(digits, tmp_path):
    """The second task trains on more than its real examples, and S goes on counting."""
    experiment = tiny_experiment(method={"name": "fedavg-replay", **SMALL, "replay_filter": False})
    out = tmp_path / "out"
    summary = run_in_process(experiment, digits, out)
    assert summary["metrics"]
    plain = run_in_process(tiny_experiment(method={"name": "fedavg"}), digits, tmp_path / "plain")
    assert summary["state_sha256"] != plain["state_sha256"]


def test_initial_state_is_that_of_a_client_that_met_nothing():
    run = context_free_run()
    state = make("fedavg-replay").init_client(run, 0)
    assert isinstance(state.histogram, Histogram)
    assert int(state.histogram.total.sum()) == 0
    assert not state.generators


def context_free_run():
    from fedmodels.tensors.bundle import Problem
    from fedmodels.training.run import RunFacts

    return RunFacts(tiny_experiment(method={"name": "fedavg-replay"}), Problem(SHAPE, 10))


@pytest.mark.parametrize("name", ["pfedgrp", "fedavg-replay", "pfedgraph-replay"])
def test_methods_that_replay_images_say_so_before_a_run_begins(name):
    experiment = tiny_experiment(method={"name": name})
    run = RunFacts(experiment, Problem((2,), 3))
    line = rf"^method '{name}': the GAN makes images of at most 32x32, not \[2\]"
    with pytest.raises(ConfigError, match=line):
        check_parts(make(name), run)
    check_parts(make(name), RunFacts(experiment, Problem((1, 8, 8), 3)))
