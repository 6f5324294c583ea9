"""FedCIL: what its losses come to, whose generators draw what, and its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedmodels.errors import ConfigError, PayloadError, TrainingFailed
from fedmodels.methods import make
from fedmodels.nets import make_net
from fedmodels.nets.generative import acgan
from fedmodels.nets.generative.gan import Generator
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.numerics.distances import distillation
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques.continual import labels_from
from fedmodels.tensors.bundle import Bundle, Histogram
from fedmodels.tensors.roles import part_of, tensors_of, under, without
from fedmodels.training.contexts import Position
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import batches, train_locally
from fedplugins.baselines.acgan_replay import ConditionalGenerator, GeneratorPool, balanced
from fedplugins.baselines.fedcil import teacher_logits
from fedsrv.engine.round_parts import RoundParts
from fedtide.inprocess import run_in_process
from tests.conftest import context_of, method_of, payload_of, server_context, tiny_experiment
from tests.runs import Killed, ends_as, killed

SMALL = {"iterations": 4, "md_iter": 3, "generator_width": 2, "replay_batch": 8, "md_batch": 8}


def experiment_for(**switches):
    return tiny_experiment(method={"name": "fedcil", **SMALL, **switches})


def sets(now=(), past=()):
    counts = torch.zeros(2, 10, dtype=torch.int32)
    counts[0, list(now)] = 1
    counts[1, list(past)] = 1
    return Histogram(*counts)


def trained(experiment, root, history=(0,), now=range(10), before=()):
    """Train one client on tasks one after another, alone; return contexts, payloads, results."""
    method, out, payload, state = method_of(experiment), [], None, Bundle()
    for number, task in enumerate(history):
        ctx = context_of(experiment, root, task=task, interaction=number)
        if payload is None:
            payload = payload_of(experiment, ctx)[0]
        told = sets(now, {*now, *before})
        told.total[list(before)] += 1
        payload = Bundle(weights=payload.weights, histogram=told)
        result = train_locally(method, ctx, payload, state)
        out.append((ctx, payload, result))
        payload, state = Bundle(weights=result.upload.weights), result.state
    return out


# --- losses ---------------------------------------------------------------------------------------


def flat_net():
    """Embeddings are the inputs (B, 2); logits of two classes are 2 ln 3 h_0 and 0."""
    net = SplitNet(nn.Flatten(), nn.Linear(2, 2, bias=False), 2)
    with torch.no_grad():
        net.head.weight.copy_(torch.tensor([[2 * math.log(3), 0.0], [0.0, 0.0]]))
    source = acgan.SourceHead(2)
    with torch.no_grad():
        source.weight.copy_(torch.tensor([[0.0, math.log(3)]]))
        source.bias.zero_()
    return net, source


def test_critic_loss_by_hand():
    """x = (1, 1): class logits (2 ln 3, 0), that is (.9, .1), and source logit ln 3, that is 3/4.
    Real of class 0 costs -ln .75 - ln .9; fake of class 1 costs -ln .25 - ln .1."""
    net, source = flat_net()
    x, zero, one = torch.ones(1, 2), torch.tensor([0]), torch.tensor([1])
    expected = -math.log(0.75) - math.log(0.9) - math.log(0.25) - math.log(0.1)
    assert acgan.critic_loss(net, source, x, zero, x, one).item() == pytest.approx(expected)
    assert expected == pytest.approx(4.081922, abs=1e-6)
    fooled = acgan.generator_loss(net, source, x, one).item()
    assert fooled == pytest.approx(-math.log(0.75) - math.log(0.1))


def test_critic_loss_in_numpy():
    rng = np.random.default_rng(0)
    head, by, (real, fake) = rng.normal(size=(3, 4)), rng.normal(size=4), rng.normal(size=(2, 5, 4))
    y, fake_y = rng.integers(3, size=(2, 5))

    def part(x, labels, is_real):
        judged = 1 / (1 + np.exp(-(x @ by)))
        p = np.exp(x @ head.T)
        p /= p.sum(1, keepdims=True)
        told = -np.log(judged if is_real else 1 - judged).mean()
        return told - np.log(p[np.arange(5), labels]).mean()

    net, source = (
        SplitNet(nn.Flatten(), nn.Linear(4, 3, bias=False), 4).double(),
        acgan.SourceHead(4),
    )
    with torch.no_grad():
        net.head.weight.copy_(torch.from_numpy(head))
        source.double().weight.copy_(torch.from_numpy(by)[None])
        source.bias.zero_()
    given = map(torch.from_numpy, (real, y, fake, fake_y))
    found = acgan.critic_loss(net, source, *given)
    assert found.item() == pytest.approx(part(real, y, True) + part(fake, fake_y, False))


def test_consistency_by_hand_and_without_a_gradient_to_the_teacher():
    """KL((3/4, 1/4) ‖ (1/2, 1/2)) = 3/4 ln 3/2 + 1/4 ln 1/2."""
    teacher = torch.tensor([[math.log(3), 0.0]], requires_grad=True)
    student = torch.zeros(1, 2, requires_grad=True)
    loss = distillation(teacher, student)
    assert loss.item() == pytest.approx(0.130812, abs=1e-6)
    loss.backward()
    assert teacher.grad is None
    torch.testing.assert_close(student.grad, torch.tensor([[-0.25, 0.25]]))
    assert distillation(teacher, teacher).item() == 0


def test_a_teacher_is_asked_in_evaluation_mode_and_learns_nothing():
    net = make_net("resnet20", num_classes=3, input_shape=(1, 8, 8)).train()
    x, before = torch.randn(4, 1, 8, 8), {k: t.clone() for k, t in weights_of(net).items()}
    found = teacher_logits(net, x)
    assert net.training
    assert all(torch.equal(t, before[k]) for k, t in weights_of(net).items())
    torch.testing.assert_close(found, net.eval()(x))
    assert not found.requires_grad


def test_parts_weigh_by_importance(digits):
    """A new and a past part count .3 and .7; alone, the new one counts whole."""
    experiment = experiment_for(importance=0.3)
    method, ctx = method_of(experiment), context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    model = method.prepare(ctx, payload, state).model
    assert model._shares([0]) == (1.0,)
    assert model._shares([0, 1]) == (0.3, 0.7)
    x, y = ctx.stream.train(0)
    parts, fakes = [(x[:4], y[:4]), (x[4:8], y[4:8])], [y[:4], y[4:8]]
    draw = generator(0)
    images = [model.maker(labels, draw).detach() for labels in fakes]
    each = [
        acgan.critic_loss(model.net, model.source, *part, image, labels).item()
        for part, image, labels in zip(parts, images, fakes, strict=True)
    ]
    found = model.train_critic(parts, fakes, generator(0), 2.0).item()
    assert found == pytest.approx(2.0 + 0.3 * each[0] + 0.7 * each[1], rel=1e-5)


# --- who draws what -------------------------------------------------------------------------------


def test_the_sampler_is_balanced():
    """Class 0 has three holders, class 5 one: both are a half, and each holder of 0 a sixth."""
    y, clients = balanced({0: [1, 2, 4], 5: [7]}, 6000, generator(0))
    assert (y == 0).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert set(y.tolist()) == {0, 5}
    assert torch.equal(clients == 7, y == 5)
    for client in (1, 2, 4):
        assert (clients == client).float().mean().item() == pytest.approx(1 / 6, abs=0.02)


def test_labels_are_drawn_evenly_from_those_given():
    y = labels_from(torch.tensor([2, 7]), 4000, generator(0))
    assert set(y.tolist()) == {2, 7}
    assert (y == 2).float().mean().item() == pytest.approx(0.5, abs=0.03)


def constant_maker(value):
    net = Generator((1, 8, 8), 2, latent=13)
    maker = ConditionalGenerator(net, 10, 13, None)
    net.forward = lambda z: torch.full((len(z), 1, 8, 8), value)
    return maker.frozen()


def test_a_pool_draws_each_label_from_who_holds_it():
    pool = GeneratorPool(
        {3: constant_maker(0.25), 8: constant_maker(math.nan)}, {1: [3], 2: [8], 4: [3]}
    )
    x, y = pool.batch(64, generator(0))
    assert set(y.tolist()) == {1, 2, 4}
    assert bool(torch.isfinite(x).all())  # whatever a client's generator draws
    assert torch.equal(x[:, 0, 0, 0], torch.where(y == 2, 0.0, 0.25))


def test_images_lie_between_black_and_white():
    limits = torch.tensor([-0.5, 0.0, 1.0]), torch.tensor([1.5, 2.0, 5.0])
    with seeded(0):
        maker = ConditionalGenerator(Generator((3, 8, 8), 2, latent=13), 10, 13, limits)
    for value, edge in ((-1.0, limits[0]), (1.0, limits[1])):
        maker.net.forward = lambda z, value=value: torch.full((len(z), 3, 8, 8), value)
        x = maker(torch.tensor([0, 1]), generator(0))
        torch.testing.assert_close(x[1, :, 4, 4], edge)


def test_only_classes_of_the_task_of_earlier_ones_and_announced_ones_are_drawn(digits, monkeypatch):
    drawn, plain = {}, acgan.latents

    def spy(y, *rest):
        drawn.setdefault(place["task"], set()).update(y.tolist())
        return plain(y, *rest)

    place = {"task": 0}
    monkeypatch.setattr(acgan, "latents", spy)
    experiment = experiment_for(iterations=12, replay_batch=32)
    own = [set(context_of(experiment, digits, task=k).stream.train(k)[1].tolist()) for k in (0, 1)]
    outside = set(range(10)) - own[0] - own[1]
    known = min(outside)
    method, state = method_of(experiment), Bundle()
    payload = payload_of(experiment, context_of(experiment, digits))[0]
    for task in (0, 1):
        place["task"] = task
        ctx = context_of(experiment, digits, task=task, interaction=task)
        told = sets((), {known})  # somebody trained on it before; this one does not hold it
        payload = Bundle(weights=payload.weights, histogram=told)
        result = train_locally(method, ctx, payload, state)
        payload, state = Bundle(weights=result.upload.weights), result.state
    assert drawn[0] == own[0] | {known}
    assert drawn[1] == own[0] | own[1] | {known}


# --- tasks ----------------------------------------------------------------------------------------


def test_what_is_replayed_changes_with_the_task(digits):
    """Tasks 0, 0, 1, 1: nothing, nothing, the generator that task 0 left, and the same again."""
    experiment = experiment_for()
    done = trained(experiment, digits, (0, 0, 1, 1))
    states = [result.state for _, _, result in done]
    own = [torch.bincount(ctx.stream.train(ctx.task)[1], minlength=10) > 0 for ctx, _, _ in done]
    for state, classes in zip(states, own, strict=True):
        assert torch.equal(state.histogram.round > 0, classes)
    for state in states[:2]:
        assert not part_of(state.weights, "last")
        assert not state.histogram.total.any()
    left = part_of(states[1].weights, "now")
    for state in states[2:]:
        assert torch.equal(state.histogram.total > 0, own[0])
        last = part_of(state.weights, "last")
        assert last.keys() == left.keys()
        assert all(torch.equal(last[k], t) for k, t in left.items())


def test_the_server_keeps_last_generators(digits):
    """What a client uploaded last on its previous task, and no other."""
    experiment = experiment_for(md_iter=0)
    done = trained(experiment, digits, (0, 0, 1, 1))
    method, run = method_of(experiment), done[0][0].run
    state, uploaded = method.init_server(run), []
    for number, (ctx, _, result) in enumerate(done):
        server = replace(server_context(run, number, (0,)), at=Position(number, 0, ctx.task))
        state = method.aggregate(server, state, as_uploads(method, {0: result.upload}))
        uploaded.append(part_of(result.upload.weights, "generator"))
    held = state.clients[0].generators
    for name, expected in (("now", uploaded[3]), ("last", uploaded[1])):
        assert held[name].tensors.keys() == expected.keys()
        assert all(torch.equal(held[name].tensors[k], t) for k, t in expected.items())
    assert held["last"].version == 1


# --- consolidation --------------------------------------------------------------------------------


def consolidated(experiment, root, clients=(0, 1)):
    method, uploads = method_of(experiment), {}
    for client in clients:
        ctx = context_of(experiment, root, client)
        uploads[client] = train_locally(method, ctx, *payload_of(experiment, ctx)).upload
    told = []
    server = replace(server_context(ctx.run, 0, clients), tell=lambda *facts: told.append(facts))
    before = method.aggregate(server, method.init_server(ctx.run), as_uploads(method, uploads))
    after, metrics = method.finish(server, before, as_uploads(method, uploads))
    return before, after, metrics, told


def test_consolidation_trains_everything_and_tells_of_it(digits):
    before, after, metrics, told = consolidated(experiment_for(md_iter=20), digits)
    for part in ("common", "own"):
        old, new = (getattr(state, part).weights for state in (before, after))
        assert old.keys() == new.keys()
        roles = {key.split("/")[0] for key in new if not torch.equal(old[key], new[key])}
        assert roles == ({"base", "head"} if part == "common" else {"source", "generator"})
    assert after.clients is before.clients
    assert torch.equal(after.own.histogram.total, before.own.histogram.total)
    assert [(what, step, of) for what, step, of, _ in told] == [
        ("consolidation", step, 20) for step in range(2, 21, 2)
    ]
    assert 0 <= metrics["consolidation_agreement"] <= 1
    _, again, _, _ = consolidated(experiment_for(md_iter=20), digits)
    for key, tensor in after.common.weights.items():
        assert torch.equal(again.common.weights[key], tensor)


def test_without_iterations_the_mean_stays(digits):
    before, after, metrics, told = consolidated(experiment_for(md_iter=0), digits)
    assert after is before
    assert not metrics
    assert not told


def test_it_learns_from_generators_what_they_know(digits):
    """Generators that draw class 0 dark and class 1 light teach a fresh mean to tell them apart."""
    experiment = experiment_for(md_iter=150, lr=2e-3, md_batch=16)
    ctx = context_of(experiment, digits)
    method = method_of(experiment)
    state = method.init_server(ctx.run)
    model_source, maker = method._fresh(ctx.run)
    with torch.no_grad():
        for parameter in maker.parameters():
            parameter.zero_()
        maker.fc.weight[:, 1] = 3.0  # the slot of class 1
        maker.fc.bias.fill_(-1.0)
        for layer in maker.layers:
            if isinstance(layer, nn.ConvTranspose2d):
                layer.weight.fill_(0.2)
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.fill_(1.0)
        maker.layers[-1].bias.fill_(-0.8)
    upload = Bundle(
        {**state.common.weights, **under("source", tensors_of(model_source)),
         **under("generator", tensors_of(maker))},
        histogram=sets((0, 1)), scalars={"num_examples": 5.0},
    )  # fmt: skip
    server = server_context(ctx.run, 0, (0,))
    reduced = method.aggregate(server, state, as_uploads(method, {0: upload}))
    after, metrics = method.finish(server, reduced, as_uploads(method, {0: upload}))
    assert metrics["consolidation_agreement"] == 1
    net = ctx.run.make_net().eval()
    load_weights(net, after.common.weights)
    draw = ConditionalGenerator(maker, 10, method.latent, None).frozen()
    y = torch.arange(20) % 2
    assert torch.equal(net(draw(y, generator(0))).argmax(1), y)


def test_consolidation_survives_a_crash_in_its_middle(digits, tmp_path, monkeypatch):
    experiment = experiment_for()
    whole, out = run_in_process(experiment, digits, tmp_path / "whole"), tmp_path / "broken"
    plain = RoundParts.tell_work

    def stop(parts, step, what, done, of, loss):
        if (step.interaction, done) == (2, 2):
            raise Killed
        plain(parts, step, what, done, of, loss)

    with monkeypatch.context() as patch:
        patch.setattr(RoundParts, "tell_work", stop)
        killed(experiment, digits, out)
    ends_as(whole, experiment, digits, out)


# --- limits ---------------------------------------------------------------------------------------


def test_the_first_task_is_a_plain_acgan(digits):
    """Without consistency, one client's training written out: critic, then generator."""
    experiment = experiment_for(consistency=0.0)
    ctx, payload, result = trained(experiment, digits)[0]
    method, (x, y) = method_of(experiment), ctx.stream.train(0)
    source, maker = method._fresh(ctx.run)
    net = ctx.run.make_net()
    load_weights(net, without(payload.weights, "source", "generator"))
    for module in (net, source, maker):
        module.train()
    options = {"lr": 1e-4, "betas": (0.5, 0.99), "weight_decay": 1e-5}
    critics = torch.optim.Adam([*net.parameters(), *source.parameters()], **options)
    makers = torch.optim.Adam(maker.parameters(), **options)
    low, high = (edge.view(-1, 1, 1) for edge in ctx.stream.limits())
    order, draw, classes = ctx.generator("order"), ctx.generator("method"), y.unique()

    def painted(labels):
        z = torch.randn(len(labels), 110, generator=draw)
        z[:, :10] = F.one_hot(labels, 10)
        return maker(z) * (high - low) / 2 + (high + low) / 2

    done = 0
    while done < 4:
        for index in batches(len(y), net, experiment.training, order):
            labels = classes[torch.randint(len(classes), (len(index),), generator=draw)]
            fake, loss = painted(labels).detach(), 0.0
            for inputs, wanted, real in ((x[index], y[index], 1.0), (fake, labels, 0.0)):
                h = net.features(inputs)
                judged = source(h)
                aim = torch.full_like(judged, real)
                loss = loss + F.binary_cross_entropy_with_logits(judged, aim)
                loss = loss + F.cross_entropy(net.head(h), wanted)
            critics.zero_grad()
            loss.backward()
            critics.step()
            h = net.features(painted(labels))
            judged = source(h)
            passed = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
            makers.zero_grad()
            (passed + F.cross_entropy(net.head(h), labels)).backward()
            makers.step()
            done += 1
            if done == 4:
                break
    expected = {
        **weights_of(net),
        **under("source", tensors_of(source)),
        **under("generator", tensors_of(maker)),
    }
    assert result.upload.weights.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(result.upload.weights[key], tensor, msg=key)


def test_the_server_is_fedavg_of_the_acgan(digits, tmp_path):
    """Without consolidation: every part by examples, the generator's buffers included."""
    experiment = experiment_for(md_iter=0)
    method, uploads = method_of(experiment), {}
    for client in (0, 1):
        ctx = context_of(experiment, digits, client)
        uploads[client] = train_locally(method, ctx, *payload_of(experiment, ctx)).upload
    n = [uploads[c].scalars["num_examples"] for c in (0, 1)]
    server = server_context(ctx.run, 0, (0, 1))
    state, _ = method.finish(
        server,
        method.aggregate(server, method.init_server(ctx.run), as_uploads(method, uploads)),
        as_uploads(method, uploads),
    )
    found = {**state.common.weights, **state.own.weights}
    assert found.keys() == uploads[0].weights.keys()
    assert any(key.endswith("running_var") and "generator" in key for key in found)
    for key, tensor in found.items():
        one, other = (uploads[c].weights[key].double().numpy() for c in (0, 1))
        if tensor.is_floating_point():
            expected = (n[0] * one + n[1] * other) / sum(n)
            np.testing.assert_allclose(tensor.numpy(), expected.astype(np.float32), err_msg=key)


def test_released_is_without_consistency(digits):
    """To the bit; in the paper's preset the terms count from when somebody has trained before."""
    weights = {}
    for name, switches, before in [
        ("released", {"preset": "released"}, (1, 3)),
        ("zero", {"consistency": 0.0}, (1, 3)),
        ("paper", {}, (1, 3)),
        ("first", {}, ()),
    ]:
        result = trained(experiment_for(**switches), digits, before=before)[0][2]
        weights[name] = result.upload.weights["base/1.weight"]
    assert torch.equal(weights["released"], weights["zero"])
    assert torch.equal(weights["released"], weights["first"])
    assert not torch.equal(weights["released"], weights["paper"])


def test_the_loss_is_the_mean_over_the_last_passs_examples(digits):
    """A pass of all examples but one, and of that one alone."""
    count = len(context_of(experiment_for(), digits).stream.train(0)[1])
    experiment = tiny_experiment(
        method={"name": "fedcil", **SMALL}, training={"batch_size": count - 1}
    )
    told = []
    ctx = context_of(experiment, digits)
    ctx.tick = lambda epoch, batch, loss: told.append(float(loss))
    payload, state = payload_of(experiment, ctx)
    payload = Bundle(weights=payload.weights, histogram=sets(range(10), range(10)))
    result = train_locally(method_of(experiment), ctx, payload, state)
    assert len(told) == SMALL["iterations"]
    assert result.loss == pytest.approx((told[-2] * (count - 1) + told[-1]) / count)


def test_teachers_stay_as_they_are(digits):
    """Received and last generators have no gradient and do not move."""
    experiment = experiment_for()
    first = trained(experiment, digits, before=range(10))[0]
    method = method_of(experiment)
    ctx = context_of(experiment, digits, task=1, interaction=1)
    payload = Bundle(weights=first[2].upload.weights, histogram=sets(range(10), range(10)))
    payload.histogram.total.add_(1)
    method.load(ctx, payload, first[2].state)
    refs = method.prepare(ctx, payload, first[2].state)
    frozen = [refs.received.net, refs.last.net]
    before = [{k: t.clone() for k, t in net.state_dict().items()} for net in frozen]
    method.fit(ctx, *ctx.stream.train(1), refs)
    for net, kept in zip(frozen, before, strict=True):
        assert not net.training
        assert all(not p.requires_grad and p.grad is None for p in net.parameters())
        assert all(torch.equal(t, kept[k]) for k, t in net.state_dict().items())


def test_moments_are_kept(digits):
    """Critic's and generator's: their counts of steps go on from one interaction to the next."""
    for number, (_, _, result) in enumerate(trained(experiment_for(), digits, (0, 1)), start=1):
        steps = {
            key.split("/")[1]: int(tensor)
            for key, tensor in result.state.weights.items()
            if key.startswith("moments/") and key.endswith("/step")
        }
        assert steps == {"critic": 4 * number, "generator": 4 * number}


def test_what_does_not_fit_is_refused(digits):
    ctx = context_of(experiment_for(), digits)
    payload, state = payload_of(experiment_for(), ctx)
    method = method_of(experiment_for())
    with pytest.raises(PayloadError, match="sent no generator"):
        method.prepare(ctx, Bundle(weights=payload.weights), state)
    with pytest.raises(ConfigError, match="make 'latent' larger than 10"):
        make("fedcil", latent=10).init_server(ctx.run)


def test_a_client_that_diverges_says_so(digits):
    with pytest.raises(TrainingFailed, match=r"its loss is .*\[method\] lr is 1e\+30"):
        trained(experiment_for(lr=1e30), digits)
