import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedmodels.config.training import Training
from fedmodels.errors import ConfigError, TrainingFailed
from fedmodels.methods import make
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.asked import keeps_state
from fedmodels.training.augmentation import augment
from fedmodels.training.contexts import ClientContext, Position
from fedmodels.training.loop import batches, embed_once, train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.scoring import score
from fedmodels.training.stepped import Phase
from fedmodels.training.steps import begin_phase
from tests.conftest import OneTask, linear_context, tiny_experiment


def small_net(dropout=0.0):
    """Two layers with batch normalisation between them, in the base and in the head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        linear = nn.Linear(4, 5, bias=False)  # a bias before the normalisation has no gradient
        base = nn.Sequential(nn.Flatten(), linear, nn.BatchNorm1d(5), nn.Dropout(dropout))
        head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
        return SplitNet(base, head, 5)


RNG = torch.Generator().manual_seed(1)
X, Y = torch.randn(21, 4, generator=RNG) + 2, torch.randint(0, 3, (21,), generator=RNG)


@dataclass(frozen=True, kw_only=True)
class Phased(FedAvg):
    """FedAvg that trains as it is told."""

    stretches: tuple[Phase, ...] = (Phase(1),)

    def phases(self, ctx):
        return self.stretches


def context(net=None, client=0, interaction=0, tick=None, **training):
    experiment = tiny_experiment(training={"batch_size": 8, "lr": 0.1, **training})
    run = RunFacts(experiment, Problem((4,), 3))
    options = {} if tick is None else {"tick": tick}
    return ClientContext(
        run, client, Position(interaction, 0, 0), net or small_net(),
        OneTask(X.tolist(), Y.tolist()), torch.device("cpu"), **options,
    )  # fmt: skip


def trained(*stretches, ctx=None, **training):
    """Train from the small net's first weights; return the weights before and after."""
    ctx = ctx or context(**training)
    before = weights_of(ctx.net)
    method = Phased(stretches=stretches or (Phase(1),))
    result = train_locally(method, ctx, Bundle(weights=before), Bundle())
    return before, result.upload.weights


def moved(before, after):
    return {key for key in before if not torch.equal(before[key], after[key])}


def is_statistic(key):
    return "running" in key or "num_batches" in key


PARAMETERS = {k for k in weights_of(small_net()) if not is_statistic(k)}
STATISTICS = {k for k in weights_of(small_net()) if is_statistic(k)}


def of(role, keys):
    return {k for k in keys if k.startswith(role)}


# --- phases ---------------------------------------------------------------------------------------


def test_everything_trains_unless_told_otherwise():
    assert moved(*trained()) == PARAMETERS | STATISTICS


@pytest.mark.parametrize("role", ["base/", "head/"])
def test_frozen_weights_stay_and_their_statistics_move(role):
    found = moved(*trained(Phase(2, trains=(role,))))
    assert found == of(role, PARAMETERS) | STATISTICS


@pytest.mark.parametrize("role", ["base/", "head/"])
def test_frozen_statistics_stay_in_eval_mode(role):
    found = moved(*trained(Phase(2, trains=(role,), bn_of_frozen="eval")))
    assert found == of(role, PARAMETERS | STATISTICS)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_momentum_of_one_phase_does_not_move_what_the_next_freezes(optimizer):
    """One optimiser per phase: momentum and weight decay of the first are gone in the second."""
    training = {"momentum": 0.9, "weight_decay": 0.1, "optimizer": optimizer}
    phases = Phase(1, trains=("head/",)), Phase(2, trains=("base/",))
    head_only = trained(phases[0], **training)[1]
    both = trained(*phases, **training)[1]
    for key in of("head/", PARAMETERS):
        assert torch.equal(both[key], head_only[key])
    assert moved(head_only, both) >= of("base/", PARAMETERS)


def test_no_epochs_change_nothing():
    assert moved(*trained(Phase(0))) == set()


def test_requires_grad_is_restored():
    ctx = context()
    trained(Phase(1, trains=("head/",)), ctx=ctx)
    assert all(p.requires_grad for p in ctx.net.parameters())
    assert all(m.training for m in ctx.net.modules())


def test_learning_rate_and_decay_of_a_phase():
    net = small_net()
    ctx = context(net, weight_decay=0.5, momentum=0.9)
    phase = Phase(1, lr=0.3, weight_decay={"head/1": 0.0, "head/1.bias": 0.25})
    optimizer = begin_phase([net], phase, ctx)
    found = {
        id(p): (group["lr"], group["weight_decay"], group["momentum"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert found[id(net.base[1].weight)] == (0.3, 0.5, 0.9)
    assert found[id(net.head[1].weight)] == (0.3, 0.0, 0.9)
    assert found[id(net.head[1].bias)] == (0.3, 0.25, 0.9)
    assert len(found) == len(PARAMETERS)
    still = begin_phase([net], Phase(1, lr=0.0), ctx)
    assert {group["lr"] for group in still.param_groups} == {0.0}


def test_every_step_is_told():
    steps = []
    ctx = context(tick=lambda epoch, batch, loss: steps.append((epoch, batch, loss.item())))
    result = train_locally(
        Phased(stretches=(Phase(2), Phase(1))), ctx, Bundle(weights=weights_of(ctx.net)), Bundle()
    )
    assert [(e, b) for e, b, _ in steps] == [(e, b) for e in range(3) for b in range(3)]
    losses = [loss for *_, loss in steps[-3:]]
    assert result.loss == pytest.approx((8 * losses[0] + 8 * losses[1] + 5 * losses[2]) / 21)
    assert result.num_examples == 21


def test_the_loss_is_the_mean_over_examples_whatever_the_batches():
    """Ten examples of loss near 0 and one of loss 30: the last batch may hold it alone."""
    x = torch.ones(11, 1)
    x[0] = -30.0

    def loss_of(size, seed):
        experiment = tiny_experiment(training={"batch_size": size, "lr": 1e-12}, seed=seed)
        ctx = linear_context(experiment, x.tolist(), [0] * 11)
        with torch.no_grad():
            ctx.net.head.weight.copy_(torch.tensor([[1.0], [0.0]]))
        return train_locally(FedAvg(), ctx, Bundle(weights=weights_of(ctx.net)), Bundle()).loss

    by_hand = float((-x).exp().log1p().mean())  # of logits (x, 0) and class 0
    for seed in range(3):
        assert [loss_of(size, seed) for size in (11, 10, 5, 1)] == pytest.approx([by_hand] * 4)


@pytest.mark.parametrize(("n", "batch_size", "skipped"), [(17, 8, 1), (16, 8, 0), (1, 8, 1)])
def test_examples_left_out_of_the_last_epoch_are_counted(n, batch_size, skipped):
    ctx = context(batch_size=batch_size, local_epochs=2)
    ctx.stream.x, ctx.stream.y = X[:n], Y[:n]
    before = weights_of(ctx.net)
    result = train_locally(FedAvg(), ctx, Bundle(weights=before), Bundle())
    assert ctx.skipped == skipped
    assert result.num_examples == n
    assert bool(moved(before, result.upload.weights)) == (n > skipped)
    assert (result.loss == result.loss) == (n > skipped)  # NaN where nothing trained


def test_a_batch_size_of_one_is_refused_with_batch_normalisation():
    experiment = tiny_experiment(net={"name": "resnet20"}, training={"batch_size": 1})
    with pytest.raises(ConfigError, match=r"^batch_size = 1: the net normalises over the batch"):
        RunFacts(experiment, Problem((1, 8, 8), 10)).make_net()
    plain = tiny_experiment(training={"batch_size": 1})
    assert RunFacts(plain, Problem((1, 8, 8), 10)).make_net().takes_one


# --- batches --------------------------------------------------------------------------------------


def sizes(n, net, batch_size=8):
    order = torch.Generator().manual_seed(0)
    found = list(batches(n, net, Training(batch_size=batch_size), order))
    return [len(i) for i in found], torch.cat(found).tolist() if found else []


PLAIN = SplitNet(nn.Identity(), nn.Linear(1, 1), 1)


def test_last_batch_is_kept():
    assert sizes(21, PLAIN)[0] == [8, 8, 5]
    assert sizes(21, small_net())[0] == [8, 8, 5]
    assert sorted(sizes(21, PLAIN)[1]) == list(range(21))


@pytest.mark.parametrize(("n", "batch_size"), [(17, 8), (1, 8), (3, 1), (9, 8)])
def test_batches_of_one_are_skipped_with_batch_normalisation_alone(n, batch_size):
    plain = sizes(n, PLAIN, batch_size)
    assert sorted(plain[1]) == list(range(n))
    with_norm = sizes(n, small_net(), batch_size)[0]
    assert with_norm == [size for size in plain[0] if size > 1]


def test_layer_normalisation_bears_batches_of_one():
    net = SplitNet(nn.LayerNorm(1), nn.Linear(1, 1), 1)
    assert sizes(9, net)[0] == [8, 1]


def test_no_examples_make_no_batch():
    assert sizes(0, PLAIN) == ([], [])


def test_every_epoch_has_an_order_of_its_own():
    order = torch.Generator().manual_seed(0)
    one, two = (torch.cat(list(batches(50, PLAIN, Training(), order))) for _ in range(2))
    assert not torch.equal(one, two)


# --- randomness -----------------------------------------------------------------------------------


def test_dropout_is_seeded_and_leaves_no_trace():
    results = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        results.append(trained(ctx=context(small_net(0.5)))[1])
        assert torch.equal(torch.get_rng_state(), before)
    assert moved(*results) == set()


@pytest.mark.parametrize("change", [{"client": 1}, {"interaction": 1}])
def test_dropout_differs_between_clients_and_interactions(change):
    """With one batch of everything the order alone changes no more than rounding does."""
    one, other = (
        trained(ctx=context(small_net(0.5), batch_size=100, **facts))[1] for facts in ({}, change)
    )
    key = "base/1.weight"
    assert (one[key] - other[key]).abs().max() > 1e-3
    calm = [trained(ctx=context(batch_size=100, **facts))[1][key] for facts in ({}, change)]
    torch.testing.assert_close(*calm)


def test_dropout_does_not_shift_the_order_of_batches():
    orders = []
    for dropout in (0.0, 0.5):
        seen = []

        class Watched(Phased):
            def loss(self, ctx, batch, out, refs, seen=seen):
                seen.append(batch.index.tolist())
                return super().loss(ctx, batch, out, refs)

        ctx = context(small_net(dropout))
        train_locally(
            Watched(stretches=(Phase(2),)), ctx, Bundle(weights=weights_of(ctx.net)), Bundle()
        )
        orders.append(seen)
    assert orders[0] == orders[1]


# --- augmentation ---------------------------------------------------------------------------------


IMAGES = torch.rand(6, 3, 10, 12, generator=RNG)
CROP_FLIP = Training(augment="crop-flip")


@pytest.mark.parametrize("shape", [(8,), (6, 128)], ids=["table", "series"])
def test_what_is_no_image_cannot_be_augmented(shape):
    augmenting = tiny_experiment(training={"augment": "crop-flip"})
    RunFacts(augmenting, Problem((1, 8, 8), 10))
    RunFacts(tiny_experiment(), Problem(shape, 10))
    with pytest.raises(ConfigError, match=r"augment = 'crop-flip' is for images"):
        RunFacts(augmenting, Problem(shape, 10))


def test_augmentation_does_not_shift_the_order_of_batches():
    """Each purpose has a generator of its own."""
    ctx = context()
    orders = []
    for _ in range(2):
        order, draw = ctx.generator("order"), ctx.generator("augment")
        augment(IMAGES, CROP_FLIP, draw)
        orders.append([i.tolist() for i in batches(21, PLAIN, Training(), order)])
        torch.randn(10, generator=draw)
    assert orders[0] == orders[1]


# --- scoring --------------------------------------------------------------------------------------


def scores_of(method, ctx, sets):
    return score(method, ctx, Bundle(), Bundle(), sets)


def test_scoring_changes_nothing_and_uses_running_statistics():
    ctx = context(small_net(0.5))
    before = weights_of(ctx.net)
    found = scores_of(FedAvg(), ctx, {"task/0": (X, Y)})[("classifier", "task/0")]
    assert moved(before, weights_of(ctx.net)) == set()
    ctx.net.eval()
    with torch.no_grad():
        logits = ctx.net(X)
    assert found.total() == 21
    assert found.correct.sum() == (logits.argmax(1) == Y).sum()
    expected = nn.functional.cross_entropy(logits, Y, reduction="sum").item()
    assert found.loss_sum == pytest.approx(expected, rel=1e-5)


def test_scores_do_not_depend_on_the_batch_size():
    sets = {"task/0": (X, Y), "task/1": (X[:0], Y[:0])}
    found = []
    for size in (1, 5, 100):
        ctx = context()
        evaluate = ctx.run.experiment.evaluate.model_copy(update={"batch_size": size})
        ctx.run = RunFacts(
            ctx.run.experiment.model_copy(update={"evaluate": evaluate}), ctx.run.problem
        )
        found.append(scores_of(FedAvg(), ctx, sets))
    for counts in found:
        assert counts.keys() == {("classifier", "task/0"), ("classifier", "task/1")}
        assert counts["classifier", "task/1"].total() == 0
        for part in ("support", "predicted", "correct"):
            one, other = (getattr(c["classifier", "task/0"], part) for c in (counts, found[0]))
            assert one.tolist() == other.tolist()


def test_the_last_test_example_is_scored_with_the_batch_before_it():
    """A base without running statistics, whose outputs of one example would say nothing."""
    ctx = context()
    base = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False))
    with seeded(0):
        ctx.net = SplitNet(base, nn.Linear(5, 3), 5, mixes_examples=True, takes_one=False)
    evaluate = ctx.run.experiment.evaluate.model_copy(update={"batch_size": 20})
    ctx.run = RunFacts(
        ctx.run.experiment.model_copy(update={"evaluate": evaluate}), ctx.run.problem
    )
    counts = scores_of(FedAvg(), ctx, {"task/0": (X, Y)})["classifier", "task/0"]
    assert counts.loss_sum == pytest.approx(
        float(cross_entropy(ctx.net(X), Y, reduction="sum").detach()), rel=1e-5
    )


# --- teachers -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Taught(FedAvg):
    """A loss against a frozen copy of the net."""

    def prepare(self, ctx, payload, state):
        import copy

        teacher = copy.deepcopy(ctx.net).eval()
        return teacher.requires_grad_(False)

    def loss(self, ctx, batch, out, refs):
        assert not refs.training
        with torch.no_grad():
            target = refs(batch.x)
        return nn.functional.mse_loss(out.logits, target) + super().loss(ctx, batch, out, refs)


def test_a_teacher_stays_as_it_was_and_in_eval_mode():
    kept = []

    class Watched(Taught):
        def after_local(self, ctx, state, refs):
            kept.append(refs)
            return super().after_local(ctx, state, refs)

    ctx = context(small_net(0.5), local_epochs=3)
    before = weights_of(ctx.net)
    train_locally(Watched(), ctx, Bundle(weights=before), Bundle())
    assert moved(before, weights_of(kept[0])) == set()
    assert not any(m.training for m in kept[0].modules())
    assert not any(p.requires_grad for p in kept[0].parameters())
    assert moved(before, weights_of(ctx.net)) == PARAMETERS | STATISTICS


# --- speed that changes nothing -------------------------------------------------------------------


def frozen_base(mode="eval", **training):
    """Return a context whose net is in a phase of the head."""
    ctx = context(**training)
    begin_phase([ctx.net], Phase(1, ("head/",), bn_of_frozen=mode), ctx)
    return ctx


def test_a_frozen_base_embeds_every_example_once(monkeypatch):
    ctx, seen = context(), []
    embed = ctx.net.features
    monkeypatch.setattr(ctx.net, "features", lambda x: seen.append(len(x)) or embed(x))
    trained(Phase(3, ("head/",), bn_of_frozen="eval"), ctx=ctx)
    assert seen == [len(Y)]


def test_fixed_features_are_those_of_the_net():
    ctx = frozen_base()
    fixed = embed_once(ctx.net, X, ctx.run.experiment.training)
    torch.testing.assert_close(fixed, ctx.net.features(X))


def test_a_client_without_data_has_no_fixed_features():
    ctx = frozen_base()
    nothing = embed_once(ctx.net, X[:0], ctx.run.experiment.training)
    assert nothing.shape == (0, ctx.net.width)


def test_features_are_computed_anew_where_they_can_change():
    training = context().run.experiment.training
    for ctx in (frozen_base(mode="train"), context()):
        assert embed_once(ctx.net, X, training) is None
    assert embed_once(frozen_base().net, X, CROP_FLIP) is None
    mixing = frozen_base()
    mixing.net.mixes_examples = True
    assert embed_once(mixing.net, X, training) is None


@pytest.mark.parametrize(
    ("net", "optimizer"), [("digits-cnn", "sgd"), ("digits-cnn", "adam"), ("resnet20", "sgd")]
)
def test_memory_format_and_fused_steps_are_the_plain_ones(net, optimizer):
    """In float64: without AVX the rounding of float32 grew to 2e-4 in three steps of ResNet-20."""
    ctx = context(optimizer=optimizer, lr=0.01, momentum=0.5, weight_decay=0.1)
    x = torch.randn(8, 3, 8, 8, generator=RNG, dtype=torch.float64)
    y = torch.randint(0, 4, (8,), generator=RNG)
    with seeded(0):
        fast = make_net(net, num_classes=4, input_shape=(3, 8, 8)).double()
    plain = copy.deepcopy(fast)
    runs = ((fast, fast, True), (plain, nn.Sequential(plain.base, plain.head), False))
    for model, forward, fused in runs:
        stepping = begin_phase([model], Phase(1), ctx)
        for group in stepping.param_groups:
            group["fused"] = fused
        for _ in range(3):
            stepping.zero_grad()
            cross_entropy(forward(x), y).backward()
            stepping.step()
    torch.testing.assert_close(weights_of(fast), weights_of(plain), rtol=1e-6, atol=1e-8)


def test_a_run_tells_parameters_from_buffers():
    run = RunFacts(tiny_experiment(net={"name": "resnet18"}), Problem((3, 32, 32), 10))
    net = run.make_net()
    assert set(run.parameters) == {k.replace(".", "/", 1) for k, _ in net.named_parameters()}
    buffers = run.forms.keys() - set(run.parameters)
    assert any(name.endswith("running_mean") for name in buffers)


# --- what a method gets wrong ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Remembers(FedAvg):
    """A method that returns a private state."""

    def after_local(self, ctx, state, refs):
        return Bundle(scalars={"n": 1.0})


def test_what_clients_keep_is_found_out():
    """Whatever a method adds to FedAvg's local training, or private weights it begins with."""
    ctx = context()
    payload = Bundle(weights=weights_of(ctx.net))
    assert not keeps_state(FedAvg(), ctx.run)
    assert not keeps_state(make("fedbabu"), ctx.run)
    assert keeps_state(make("fedrep"), ctx.run)
    assert keeps_state(Remembers(), ctx.run)
    assert train_locally(Remembers(), ctx, payload, Bundle()).state.scalars == {"n": 1.0}


def test_scores_that_are_no_numbers_are_refused():
    class Unsure(FedAvg):
        @property
        def rules(self):
            return ("classifier", "own")

        def predict(self, ctx, payload, state, x):
            scores = ctx.net(x)
            return {"classifier": scores, "own": torch.where(scores > 0, scores, torch.nan)}

    ctx = context(client=2)
    with pytest.raises(TrainingFailed, match=r"NaN scores by the rule 'own', of client 2 in round"):
        score(Unsure(), ctx, Bundle(), Bundle(), {"task/0": (X, Y)})


@pytest.mark.parametrize(
    ("declared", "line"),
    [
        ("views = ('global', 'after_lokal')", "views is 'after_lokal'; .*mean 'after_local'"),
        ("views = 'global'", "views is 'global'; .* as a tuple"),
        ("views = ()", "views is empty"),
        ("local_view = 'own'", "local_view is 'own'; it may be global"),
        ("reduction: ClassVar[str] = 'sum'", "reduction is 'sum'; it may be each, mean"),
    ],
)
def test_words_of_a_declaration_that_nothing_knows_are_refused(declared, line, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from fedtide import FedAvg\n@dataclass(frozen=True, kw_only=True)\n"
        f"class Mine(FedAvg):\n    citation = 'none'\n    {declared}\n"
    )
    with pytest.raises(ConfigError, match=f"method 'mine': {line}"):
        tiny_experiment(method={"name": f"{file}:Mine"})
