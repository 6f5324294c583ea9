import math
from dataclasses import replace

import pytest
import torch

from fedmodels.errors import TrainingFailed
from fedmodels.methods import make
from fedmodels.methods.gldp import Tables
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.numerics.prototypes import ByClass, uncounted
from fedmodels.tensors.archive import load
from fedmodels.tensors.bundle import EVALUATOR, Bundle, Problem, Prototypes, tensor_bytes
from fedmodels.training.contexts import START, ClientContext, Position, ServerContext, ServerState
from fedmodels.training.hooks import as_uploads, evaluation
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedtide.inprocess import run_in_process
from tests.conftest import (
    TABLES,
    OneTask,
    context_of,
    linear_context,
    method_of,
    payload_of,
    records_of,
    tiny_experiment,
)
from tests.fedmodels.methods.test_conformance import NORMED

CLOSE = {"abs": 1e-6}
SHORT = {"t": 1, "s": 1}


def gldp(tables=None, **switches):
    return tiny_experiment(method={"name": "gldp", **SHORT, **switches}, **(tables or {}))


def table(rows, classes=3):
    """Prototypes by class from ``{class: coordinates}``."""
    vectors = torch.zeros(classes, len(next(iter(rows.values()))))
    known = torch.zeros(classes, dtype=torch.bool)
    for k, row in rows.items():
        vectors[k], known[k] = torch.tensor(row), True
    return ByClass(vectors, known)


def nowhere(width, classes=3):
    return ByClass(torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool))


def batch_of(z, y):
    """A batch whose embeddings are given, and its output with flat logits."""
    z = torch.tensor(z, requires_grad=True)
    return Batch(z.detach(), torch.tensor(y), torch.arange(len(y))), Output(
        z, torch.zeros(len(y), 3)
    )


def prototypes(rows):
    """Prototypes from ``{class: coordinates}``, of one example each."""
    width = len(next(iter(rows.values())))
    return Prototypes.of({k: (torch.tensor(v), 1) for k, v in rows.items()}, width)


# --- losses by hand -------------------------------------------------------------------------------


def local_loss(own, z, y=(0,), **switches):
    batch, out = batch_of(z, y)
    ctx = linear_context(gldp(), [[0.0] * len(z[0])], [0])
    return make("gldp", **switches).local_loss(ctx, batch, out, own), out.features


def test_kl_of_a_symmetric_pair():
    """softmax (1, 0, 0) = (.576117, .211942, .211942); KL = (.576117 - .211942) * 1."""
    loss, _ = local_loss(table({0: (1.0, 0.0, 0.0)}), [[0.0, 1.0, 0.0]])
    assert loss.item() == pytest.approx(0.364175, **CLOSE)


def test_kl_has_the_prototype_as_target():
    """KL(C || z) = .779365, where KL(z || C) = .840334; its gradient is softmax(z) - softmax(C)."""
    loss, z = local_loss(table({0: (2.0, 0.0, 0.0)}), [[0.0, 1.0, 0.0]])
    assert loss.item() == pytest.approx(0.779365, **CLOSE)
    loss.backward()
    assert z.grad[0].tolist() == pytest.approx([-0.575044, 0.469610, 0.105435], **CLOSE)


def test_kl_counts_the_whole_batch_and_known_classes_only():
    own = table({0: (1.0, 0.0, 0.0)})
    loss, z = local_loss(own, [[0.0, 1.0, 0.0], [5.0, 1.0, 0.0]], (0, 1))
    assert loss.item() == pytest.approx(0.364175 / 2, **CLOSE)
    loss.backward()
    assert not z.grad[1].any()


def test_kl_ignores_a_constant_added_to_the_embedding():
    own = table({0: (2.0, 0.0, -1.0)})
    plain, _ = local_loss(own, [[0.0, 1.0, 0.5]])
    shifted, _ = local_loss(own, [[3.0, 4.0, 3.5]])
    assert shifted.item() == pytest.approx(plain.item(), **CLOSE)
    zero, _ = local_loss(own, [[7.0, 5.0, 4.0]])
    assert zero.item() == pytest.approx(0, **CLOSE)
    assert plain.item() > 0.1


def test_temperature_divides_both_sides():
    loss, _ = local_loss(table({0: (2.0, 0.0, 0.0)}), [[0.0, 2.0, 0.0]], tau=2.0)
    assert loss.item() == pytest.approx(0.364175, **CLOSE)


def test_kl_in_head_space():
    """With head W = [[1, 0], [0, 1]] logits are coordinates: KL of (2, 0) and (0, 2) is
    2 (sigmoid(2) - sigmoid(-2)). The target is a constant: W moves through z's logits alone."""
    ctx = linear_context(gldp(), [[0.0, 0.0]], [0])
    with torch.no_grad():
        ctx.net.head.weight.copy_(torch.eye(2))
    z = torch.tensor([[0.0, 2.0]])
    batch, out = Batch(z, torch.tensor([0]), torch.arange(1)), Output(z, ctx.net.head(z))
    own = table({0: (2.0, 0.0)}, 2)
    loss = make("gldp", kl_space="head").local_loss(ctx, batch, out, own)
    upper, lower = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    assert loss.item() == pytest.approx(2 * (upper - lower), **CLOSE)
    loss.backward()
    expected = torch.tensor([[0.0, 2 * (lower - upper)], [0.0, 2 * (upper - lower)]])
    torch.testing.assert_close(ctx.net.head.weight.grad, expected)


def global_loss(everyone, z, y, **switches):
    batch, out = batch_of(z, y)
    return make("gldp", **switches).global_loss(batch, out, everyone), out.features


Z = [[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [0.0, 4.0]]  # class means (1, 1) and (0, 4)


def test_global_loss_by_hand():
    """Means of squares .5 and 4, weighed by 3/4 and 1/4: 1.375."""
    loss, _ = global_loss(table({0: (0.0, 1.0), 1: (2.0, 2.0)}), Z, [0, 0, 0, 1])
    assert loss.item() == pytest.approx(1.375, **CLOSE)


def test_global_loss_without_a_prototype_keeps_its_weights():
    loss, z = global_loss(table({0: (0.0, 1.0)}), Z, [0, 0, 0, 1])
    assert loss.item() == pytest.approx(0.75 * 0.5, **CLOSE)
    loss.backward()
    assert not z.grad[3].any()


def test_global_loss_vanishes_at_the_class_means():
    loss, _ = global_loss(table({0: (1.0, 1.0), 1: (0.0, 4.0)}), Z, [0, 0, 0, 1])
    assert loss.item() == 0


@pytest.mark.parametrize(("mode", "expected"), [("class_mean", 0.0), ("per_sample", 1.0)])
def test_class_mean_or_every_example(mode, expected):
    loss, _ = global_loss(table({0: (1.0,)}), [[0.0], [2.0]], [0, 0], gp_mode=mode)
    assert loss.item() == pytest.approx(expected, **CLOSE)


def test_total():
    """CE .7, LP .364175, GP 1.375: 1.569588 with lambda 1/2, and 1.822294 with 1/4."""
    z = torch.tensor([[0.0, 1.0, 0.0]])
    logits = torch.tensor([[-math.log(math.exp(0.7) - 1), 0.0]])  # log(1 + e^-a) = .7
    batch, out = Batch(z, torch.tensor([0]), torch.arange(1)), Output(z, logits)
    ctx = linear_context(gldp(), [[0.0] * 3], [0])
    away = (math.sqrt(3 * 1.375), 1.0, 0.0)
    refs = Tables(table({0: (1.0, 0.0, 0.0)}), table({0: away}))
    assert make("gldp").loss(ctx, batch, out, refs).item() == pytest.approx(1.569588, **CLOSE)
    quarter = make("gldp", lam=0.25).loss(ctx, batch, out, refs)
    assert quarter.item() == pytest.approx(1.822294, **CLOSE)
    plain = make("gldp", use_lp=False, use_gp=False).loss(ctx, batch, out, refs)
    assert plain.item() == pytest.approx(0.7, **CLOSE)
    first = replace(refs, own=nowhere(3), everyone=nowhere(3))
    assert make("gldp").loss(ctx, batch, out, first).item() == plain.item()


# --- prototypes -----------------------------------------------------------------------------------


def client_with(x, y, **switches):
    """A client whose embeddings are its inputs, trained for no epoch."""
    experiment = gldp(**{**switches, "t": 0, "s": 0})
    ctx = replace(
        linear_context(experiment, x, y), run=RunFacts(experiment, Problem((len(x[0]),), 10))
    )
    return make("gldp", **experiment.method.hyper_parameters()), ctx


def kept_after(method, ctx, held):
    payload = Bundle(weights={}, prototypes={})
    state = Bundle(weights_of(ctx.net), {"class": prototypes(held)})
    refs = method.prepare(ctx, payload, state)
    new = method.after_local(ctx, state, refs)
    upload = method.uplink(ctx, new, refs)
    rows = [b.prototypes["class"].rows() for b in (new, upload)]
    return [{k: v.tolist() for k, (v, _) in found.items()} for found in rows]


def test_local_average_by_hand():
    """beta = .5: (1, 0) and this task's mean (0, 2) give (.5, 1); a new class is stored as is."""
    method, ctx = client_with([[0.0, 1.0], [0.0, 3.0], [7.0, 7.0]], [0, 0, 1])
    kept, sent = kept_after(method, ctx, {0: (1.0, 0.0), 5: (9.0, 9.0)})
    assert kept == {0: [0.5, 1.0], 1: [7.0, 7.0], 5: [9.0, 9.0]}
    assert sent == {0: [0.0, 2.0], 1: [7.0, 7.0]}


def test_own_prototypes_may_move_with_every_epoch():
    """Embeddings (0, 2) and (0, 4) of class 0 in one epoch, beta = .5: (1, 0) moves to (.5, 1.5).

    L_LP reads what moved before the next epoch. Epochs of the head move nothing.
    """
    method, ctx = client_with([[0.0, 2.0], [0.0, 4.0]], [0, 0], own_moves="epoch")
    state = Bundle(weights_of(ctx.net), {"class": prototypes({0: (1.0, 0.0)})})
    refs = method.prepare(ctx, Bundle(weights={}, prototypes={}), state)
    x, y = ctx.stream.x, ctx.stream.y

    def after(phase, epoch, steps=(0, 1)):
        method.begin_epoch(ctx, phase, epoch, refs)
        for index in steps:
            z = x[[index]].clone().requires_grad_(phase is base)
            batch = Batch(x[[index]], y[[index]], torch.tensor([index]))
            method.loss(ctx, batch, Output(z, torch.zeros(1, 10, requires_grad=True)), refs)
        return refs.own.vectors[0].tolist()

    base, head = method.phases(ctx)
    assert after(base, 0) == [1.0, 0.0]
    assert after(base, 1) == [0.5, 1.5]
    assert [after(head, epoch) for epoch in (0, 1)] == [[0.5, 1.5]] * 2
    kept = method.after_local(ctx, state, refs)
    assert kept.prototypes["class"].rows()[0][0].tolist() == [0.25, 2.25]


@pytest.mark.parametrize("name", ["gldp", "fedmlp"])
def test_a_client_that_diverged_says_so_before_anything_is_clustered(digits, name):
    """Its last step may leave weights that are not finite, though every loss was."""
    experiment = tiny_experiment(method={"name": name})
    ctx = context_of(experiment, digits)
    method, (payload, state) = method_of(experiment), payload_of(experiment, ctx)
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    with torch.no_grad():
        for parameter in ctx.net.base.parameters():
            parameter.fill_(3e38)
    line = r"^training diverged: its prototype of class \d is not finite$"
    with pytest.raises(TrainingFailed, match=line):
        method.after_local(ctx, state, refs)


def test_uplink_of_moving_averages():
    method, ctx = client_with([[0.0, 2.0], [7.0, 7.0]], [0, 1], uplink_proto="ema")
    _, sent = kept_after(method, ctx, {0: (1.0, 0.0), 5: (9.0, 9.0)})
    assert sent == {0: [0.5, 1.0], 1: [7.0, 7.0]}


@pytest.mark.parametrize(("beta", "expected"), [(1.0, (1.0, 0.3)), (0.0, (0.1, 2.0))])
def test_beta_at_its_ends(beta, expected):
    method, ctx = client_with([[0.1, 2.0]], [0], beta=beta)
    kept, _ = kept_after(method, ctx, {0: (1.0, 0.3)})
    assert kept[0] == torch.tensor(expected).tolist()
    after = aggregated(method, {0: (1.0, 0.3)}, {0: {0: (0.1, 2.0)}})
    assert after[0].tolist() == torch.tensor(expected).tolist()


def aggregated(method, known, reported):
    """Return the global prototypes after clients reported theirs."""
    width = len(next(iter(next(iter(reported.values())).values())))
    run = RunFacts(tiny_experiment(net={"name": "mlp", "hidden": [width]}), Problem((1, 2, 2), 10))
    assert run.width == width
    held = prototypes(known) if known else Prototypes.of({}, width)
    state = ServerState(Bundle(prototypes={"class": uncounted(held)}))
    uploads = {c: Bundle(prototypes={"class": prototypes(rows)}) for c, rows in reported.items()}
    ctx = ServerContext(run, START, tuple(uploads))
    found = method.aggregate(ctx, state, as_uploads(method, uploads)).common.prototypes["class"]
    return {int(k): v for k, v in zip(found.labels, found.vectors, strict=True)}


def test_server_average_by_hand():
    """Reports (1, 3) and (3, 5) of class 2 mean (2, 4); with (0, 0) known, beta = .5: (1, 2)."""
    reports = {0: {2: (1.0, 3.0)}, 1: {2: (3.0, 5.0)}}
    assert aggregated(make("gldp"), {}, reports)[2].tolist() == [2.0, 4.0]
    assert aggregated(make("gldp"), {2: (0.0, 0.0)}, reports)[2].tolist() == [1.0, 2.0]


def test_server_average_is_not_weighed():
    many = Prototypes(torch.tensor([[1.0]]), torch.tensor([2]).int(), torch.tensor([99]).int())
    one = prototypes({2: (3.0,)})
    run = RunFacts(tiny_experiment(net={"name": "mlp", "hidden": [1]}), Problem((1, 2, 2), 10))
    state = make("gldp").init_server(run)
    weights = state.common.weights
    uploads = {c: Bundle(weights, {"class": p}) for c, p in enumerate((many, one))}
    after = make("gldp").aggregate(
        ServerContext(run, START, (0, 1)), state, as_uploads(make("gldp"), uploads)
    )
    assert after.common.prototypes["class"].vectors.tolist() == [[2.0]]


def test_class_that_nobody_reports_keeps_its_prototype():
    """Bit for bit: b x + (1 - b) x would not be x for some of these."""
    row = tuple(1 / n for n in range(1, 51))
    known, reported = {4: row, 2: (0.0,) * 50}, {0: {2: (1.0,) * 50}}
    after = aggregated(make("gldp", beta=0.3), known, reported)
    assert torch.equal(after[4], torch.tensor(row))


def test_class_means_are_taken_in_evaluation_mode(digits):
    """With batch normalisation the means of training mode would differ."""
    results = []
    for batch_size in (7, 100):
        tables = {"net": "resnet20", "training": {"batch_size": batch_size, "lr": 1e-12}}
        experiment = gldp(tables, t=0, s=1)
        ctx = context_of(experiment, digits)
        method = make("gldp", **experiment.method.hyper_parameters())
        results.append(train_locally(method, ctx, *payload_of(experiment, ctx)).upload)
    one, other = (r.prototypes["class"].vectors for r in results)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    y = ctx.stream.train(0)[1]
    assert results[0].prototypes["class"].labels.tolist() == sorted(set(y.tolist()))
    assert results[0].prototypes["class"].counts.sum() == len(y)


def test_running_means_are_those_of_the_last_epoch(digits):
    """With the base frozen last and no augmentation both ways see the same embeddings."""
    for order, same in (("base_first", True), ("head_first", False)):
        found = []
        for how in ("eval", "running"):
            experiment = gldp(proto_pass=how, order=order)
            ctx = context_of(experiment, digits)
            method = make("gldp", **experiment.method.hyper_parameters())
            result = train_locally(method, ctx, *payload_of(experiment, ctx))
            found.append(result.upload.prototypes["class"])
        assert torch.equal(found[0].labels, found[1].labels)
        assert torch.equal(found[0].counts, found[1].counts)
        close = torch.allclose(found[0].vectors, found[1].vectors, atol=1e-6)
        assert close == same


# --- prediction -----------------------------------------------------------------------------------

OWN = {0: (0.0, 0.0), 1: (3.0, 0.0), 2: (1.0, 0.5)}


def predicted(own, everyone, *, view="after_downlink", **switches):
    """Predict z = (1, 0) of ten classes; return the winners by rule."""
    experiment = gldp(**switches)
    run = RunFacts(experiment, Problem((2,), 10))
    base = linear_context(experiment, [[1.0, 0.0]], [0])
    net = base.net
    net.head = torch.nn.Linear(2, 10)
    ctx = ClientContext(run, 0, START, net, base.stream, torch.device("cpu"), view=view)
    method = make("gldp", **experiment.method.hyper_parameters())
    state = Bundle(prototypes={"class": prototypes(own)} if own else {})
    payload = Bundle(prototypes={"class": uncounted(prototypes(everyone))} if everyone else {})
    found = method.predict(ctx, payload, state, torch.tensor([[1.0, 0.0]]))
    return {rule: int(scores.argmax()) for rule, scores in found.items()}


def test_inference_by_hand():
    """Of classes 0 and 1, 0 is nearer (1 against 2); of all three, 2 (.5)."""
    seen = {k: OWN[k] for k in (0, 1)}
    assert predicted(seen, OWN)["gldp_lp"] == 0
    assert predicted(seen, OWN)["gldp_gp"] == 0
    assert predicted(OWN, OWN)["gldp_lp"] == 2


def test_the_rule_without_a_mask_chooses_from_what_other_methods_choose_from():
    seen = {k: OWN[k] for k in (0, 1)}
    assert predicted(seen, OWN)["all_classes"] == 2


@pytest.mark.parametrize("rule", ["gldp_lp", "classifier"])
def test_what_is_said_among_all_classes_is_said_by_the_rule_asked_for(rule):
    """z = (1, 0): by everyone's prototypes class 2, by the client's own class 1."""
    own = {0: (9.0, 0.0), 1: (1.0, 0.0)}
    torch.manual_seed(1)
    found = predicted(own, OWN, inference=rule)
    assert found["gldp_lp"] == 1
    assert found["all_classes"] == found[rule] != 2


def test_each_rule_has_prototypes_of_its_own():
    """z = (1, 0) is the client's class 1, and nearer to everyone's class 0 (1 against 2)."""
    own = {0: (9.0, 0.0), 1: (1.0, 0.0)}
    found = predicted(own, {k: OWN[k] for k in (0, 1)})
    assert (found["gldp_gp"], found["gldp_lp"]) == (0, 1)


def test_client_without_prototypes_uses_the_global_ones():
    found = predicted({}, OWN)
    assert (found["gldp_gp"], found["gldp_lp"]) == (2, 2)


@pytest.mark.parametrize("rule", ["gldp_gp", "gldp_lp", "classifier"])
def test_first_rule_is_the_one_asked_for(rule):
    found = predicted(OWN, OWN, inference=rule)
    assert found.keys() == {"gldp_gp", "gldp_lp", "classifier", "all_classes"}
    rules = make("gldp", inference=rule).rules
    assert rules[0] == rule
    assert {*rules} == found.keys()


def test_the_global_model_has_no_head_unless_heads_go_up():
    assert "classifier" not in predicted(OWN, OWN, view="global")
    assert "classifier" in predicted(OWN, OWN, view="global", eval_upload_head=True)
    assert "global" not in make("gldp", inference="classifier").views
    assert "global" in make("gldp", inference="classifier", eval_upload_head=True).views


def test_prototype_rules_do_not_look_at_the_head(digits):
    experiment = gldp()
    ctx = context_of(experiment, digits)
    method = make("gldp", **experiment.method.hyper_parameters())
    payload, state = payload_of(experiment, ctx)
    state = train_locally(method, ctx, payload, state).state
    payload = Bundle(payload.weights, {"class": state.prototypes["class"]})
    x = ctx.stream.test(0)[0]
    with torch.no_grad():
        before = method.predict(ctx, payload, state, x)
        torch.nn.init.normal_(ctx.net.head.weight)
        after = method.predict(ctx, payload, state, x)
    for rule in ("gldp_gp", "gldp_lp"):
        assert torch.equal(before[rule], after[rule])
    assert not torch.equal(before["classifier"], after["classifier"])


# --- whole runs -----------------------------------------------------------------------------------


def personal(out):
    """Return every client's final model as bytes."""
    found = sorted(out.glob("clients/*/personal.safetensors"))
    assert len(found) == 3
    return [{k: bytes(tensor_bytes(t)) for k, t in load(p)[0].weights.items()} for p in
            (path.with_suffix(".safetensors") for path in found)]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "net"),
    [("base_first", NORMED), ("base_first", TABLES["net"]), ("head_first", TABLES["net"])],
    ids=["base_first-normed", "base_first-mlp", "head_first-mlp"],
)
def test_without_losses_it_is_fedrep(order, net, digits, tmp_path):
    """Bit for bit: representation and heads, with the same phases."""
    training = {"momentum": 0.5, "weight_decay": 1e-3, "batch_size": 8}
    tables = {"training": training, "schedule": {"rounds": 1}, "net": net}
    one = gldp(tables, use_lp=False, use_gp=False, t=1, s=2, order=order)
    phases = {"order": order, "head_epochs": 2, "base_epochs": 1, "bn_of_frozen": "eval"}
    other = tiny_experiment(method={"name": "fedrep", **phases}, **tables)
    run_in_process(one, digits, tmp_path / "gldp")
    run_in_process(other, digits, tmp_path / "fedrep")
    assert personal(tmp_path / "gldp") == personal(tmp_path / "fedrep")


def test_losses_matter(digits, tmp_path):
    found = []
    for number, switches in enumerate([{}, {"use_lp": False}, {"use_gp": False}, {"lam": 0.9}]):
        run_in_process(gldp(**switches), digits, tmp_path / str(number))
        found.append(personal(tmp_path / str(number)))
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_global_and_local_accuracy_agree(digits, tmp_path):
    """Prototype rules ignore the head: everyone's model and a client's are the same one."""
    metrics = run_in_process(gldp(), digits, tmp_path / "out")["metrics"]
    assert metrics["a_glo"] == metrics["a_loc"]
    assert metrics["a_glo_gldp_lp"] == metrics["a_loc_gldp_lp"]
    assert "a_glo_classifier" not in metrics
    assert "a_loc_classifier" in metrics


def test_classifier_of_mean_heads_is_scored_apart(digits, tmp_path):
    """Sending heads up changes neither training nor the method's bytes."""
    plain = run_in_process(gldp(), digits, tmp_path / "plain")
    heads = run_in_process(gldp(eval_upload_head=True), digits, tmp_path / "heads")
    assert "a_glo_classifier" in heads["metrics"]
    assert personal(tmp_path / "plain") == personal(tmp_path / "heads")
    assert heads["bytes"]["up"] == plain["bytes"]["up"]
    assert heads["bytes"]["down"] == plain["bytes"]["down"]
    rows = records_of(tmp_path / "heads")
    for row in rows:
        for counted in row["bytes"]["per_client"].values():
            assert counted["eval_up"] == 4 * (16 * 10 + 10)


@pytest.fixture(scope="module")
def plain_normed(digits, tmp_path_factory):
    """Everybody's final model of one round without further switches."""
    out = tmp_path_factory.mktemp("plain") / "out"
    run_in_process(gldp({"net": NORMED, "schedule": {"rounds": 1}}), digits, out)
    return personal(out)


@pytest.mark.parametrize(
    "switches",
    [
        {"eval_model": "stage_mean", "eval_upload_head": True},
        {"weighting": "examples", "uplink_proto": "ema", "proto_pass": "running"},
    ],
    ids=lambda switches: "-".join(switches),
)
def test_switches_run(switches, plain_normed, digits, tmp_path):
    """And, where they concern what is scored only, train the same models."""
    tables = {"net": NORMED, "schedule": {"rounds": 1}}
    summary = run_in_process(gldp(tables, **switches), digits, tmp_path / "out")
    assert "a_loc" in summary["metrics"]
    assert "a_glo" in summary["metrics"]
    one, other = plain_normed, personal(tmp_path / "out")
    if "eval_model" in switches:  # the model that is scored is stored; heads train as ever
        assert [c["head/weight"] for c in one] == [c["head/weight"] for c in other]
        first = next(key for key in one[0] if key.startswith("base/"))
        assert one[0][first] != other[0][first]


# --- one interaction ------------------------------------------------------------------------------


def trained(experiment, ctx, payload, state):
    method = make("gldp", **experiment.method.hyper_parameters())
    return train_locally(method, ctx, payload, state)


@pytest.mark.parametrize(("t", "s", "moves"), [(1, 0, "base/"), (0, 1, "head/")])
def test_each_phase_leaves_the_other_part_alone(t, s, moves, digits):
    """Buffers included, with momentum and weight decay, and with both prototype losses at work."""
    training = {"momentum": 0.9, "weight_decay": 0.1, "batch_size": 8, "lr": 0.05}
    experiment = gldp({"net": "resnet20", "training": training}, t=t, s=s)
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    first = trained(experiment, ctx, payload, state)
    held = {"class": first.state.prototypes["class"]}
    trained(experiment, ctx, replace(payload, prototypes=held), replace(state, prototypes=held))
    start = payload.weights | state.weights
    for name, tensor in weights_of(ctx.net).items():
        if not name.startswith(moves):
            assert torch.equal(tensor, start[name]), name
        elif "num_batches" not in name:
            assert not torch.equal(tensor, start[name]), name


def test_what_leaves_a_client(digits):
    """The representation and class means, no head, nothing with a row per example."""
    for upload_head in (False, True):
        experiment = gldp(eval_upload_head=upload_head)
        ctx = context_of(experiment, digits)
        payload, state = payload_of(experiment, ctx)
        result = trained(experiment, ctx, payload, state)
        keys = result.upload.by_key().keys()
        heads = {"weights/eval/head/weight", "weights/eval/head/bias"} if upload_head else set()
        base = {f"weights/{k}" for k in payload.weights}
        parts = {f"prototypes/class/{part}" for part in ("vectors", "labels", "counts")}
        assert keys == base | parts | heads
        classes = len(set(ctx.stream.train(0)[1].tolist()))
        assert classes < result.num_examples
        assert len(result.upload.prototypes["class"].labels) == classes


def cifar(**switches):
    tables = {"net": "resnet18", "scenario": {"tasks": 1}}
    return gldp(tables, **switches), Problem((3, 32, 32), 10)


def test_bytes_of_resnet18():
    """Card, section 6: 44,713,888 and 20,520 bytes down; 2,056 for each class up."""
    experiment, problem = cifar()
    run, method = RunFacts(experiment, problem), make("gldp")
    rows = {k: (torch.zeros(512), 5) for k in range(10)}
    common = Bundle(
        method.init_server(run).common.weights, {"class": uncounted(Prototypes.of(rows, 512))}
    )
    ctx = ServerContext(run, START, (0,))
    assert method.broadcast(ctx, ServerState(common))[0].num_bytes() == 44_734_408
    net = run.make_net()
    client = ClientContext(run, 0, START, net, OneTask([[0.0]], [0]), torch.device("cpu"))
    refs = Tables(nowhere(512), nowhere(512))
    refs.fresh = Prototypes.of({k: rows[k] for k in range(4)}, 512)
    upload = method.uplink(client, Bundle(), refs)
    assert upload.num_bytes() == 44_713_888 + 4 * 2_056
    assert upload.num_evaluation_bytes() == 0
    method = make("gldp", eval_upload_head=True)
    upload = method.uplink(client, Bundle(), refs)
    assert upload.num_bytes() == 44_713_888 + 4 * 2_056
    assert upload.num_evaluation_bytes() == 4 * (512 * 10 + 10)


def test_counted_bytes_are_those_of_the_formulas(digits, tmp_path):
    """A 64-16-10 mlp: 4 (64 * 16 + 16) bytes of representation; rows of 4 + 64, and 8 + 64 up."""
    run_in_process(gldp(), digits, tmp_path / "out")
    base, known = 4 * (64 * 16 + 16), set()
    for row in records_of(tmp_path / "out"):
        reported = set()
        for client, counted in row["bytes"]["per_client"].items():
            ctx = context_of(gldp(), digits, int(client), row["task"])
            classes = set(ctx.stream.train(row["task"])[1].tolist())
            assert counted["down"] == base + 68 * len(known)
            assert counted["up"] == base + 72 * len(classes)
            reported |= classes
        known |= reported
    assert len(known) > 5


@pytest.mark.parametrize(
    ("switches", "scored"),
    [
        ({}, ["eval/base/1.weight"]),
        ({"eval_upload_head": True}, ["eval/base/1.weight", "eval/head/weight"]),
        ({"heads": "round"}, ["eval/base/1.weight", "eval/head/weight"]),
    ],
)
def test_mean_over_the_interactions_of_a_round(switches, scored):
    """Models 1, 2, 6 in one round mean 3; the next round starts anew. Training gets the newest.

    A head that belongs to what is scored is averaged with its representation, however it travels.
    """
    method = make("gldp", eval_model="stage_mean", **switches)
    run = RunFacts(tiny_experiment(net={"name": "mlp", "hidden": [1]}), Problem((1, 2, 2), 10))
    state, means = method.init_server(run), []
    for interaction, value in enumerate([1.0, 2.0, 6.0, 10.0]):
        weights = {k: torch.full_like(t, value) for k, t in state.common.weights.items()}
        ctx = ServerContext(run, Position(interaction, interaction // 3, interaction % 3), (0,))
        upload = Bundle(weights, {"class": prototypes({0: (0.0,)})})
        state = method.aggregate(ctx, state, as_uploads(method, {0: upload}))
        common, parts = evaluation(method, ctx, state)
        assert common.weights["base/1.weight"].flatten()[0] == value
        assert parts.keys() == {0, 1, 2, EVALUATOR}
        assert len({id(part) for part in parts.values()}) == 1
        means.append([parts[0].weights[name].flatten()[0].item() for name in scored])
        sent, own = method.broadcast(ctx, state)
        assert not own
        assert not any(k.startswith("eval/") for k in sent.weights)
    assert means == [[pytest.approx(mean)] * len(scored) for mean in (1.0, 1.5, 3.0, 10.0)]


def test_theta_does_not_depend_on_who_comes_first_or_on_counts(digits):
    experiment = gldp(weighting="uniform")
    uploads = {}
    for client in range(2):
        ctx = context_of(experiment, digits, client)
        uploads[client] = trained(experiment, ctx, *payload_of(experiment, ctx)).upload
    method, server = make("gldp"), ServerContext(ctx.run, START, (0, 1))
    after = method.aggregate(
        server, method.init_server(ctx.run), as_uploads(method, uploads)
    ).common.weights
    for name, tensor in after.items():
        mean = (uploads[0].weights[name].double() + uploads[1].weights[name].double()) / 2
        torch.testing.assert_close(tensor, mean.float())
    assert all("num_examples" not in u.scalars for u in uploads.values())


def test_what_leaves_can_be_clipped_blurred_and_held_back():
    x = [[3.0, 4.0]] * 2 + [[0.3, 0.4]]
    method, ctx = client_with(x, [0, 0, 1], clip_norm=1.0)
    kept, sent = kept_after(method, ctx, {5: (9.0, 9.0)})
    assert sent[0] == pytest.approx([0.6, 0.8])
    assert sent[1] == pytest.approx([0.3, 0.4])
    assert kept[0] == [3.0, 4.0]  # what stays is not touched
    method, ctx = client_with(x, [0, 0, 1], min_count=2)
    assert kept_after(method, ctx, {5: (9.0, 9.0)})[1].keys() == {0}
    method, ctx = client_with(x, [0, 0, 1], noise_std=0.1)
    noisy = [kept_after(method, ctx, {5: (9.0, 9.0)})[1] for _ in range(2)]
    assert noisy[0] == noisy[1] != {0: [3.0, 4.0], 1: [0.3, 0.4]}
    assert noisy[0][0] == pytest.approx([3.0, 4.0], abs=1.0)


@pytest.mark.parametrize("order", ["base_first", "head_first"])
def test_own_prototypes_move_once_an_epoch_of_the_representation(order):
    """From (0, 8) half-way to the class mean (1, 0): once with t = 1, whatever the head does."""
    experiment = gldp(
        {"training": {"batch_size": 1, "lr": 1e-12}},
        reading={"own_moves": "epoch", "order": order},
    )
    ctx = linear_context(experiment, [[1.0, 0.0], [1.0, 0.0]], [0, 0])
    base = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(base.weight)
    ctx.net = SplitNet(base, torch.nn.Linear(2, 2, bias=False), 2)
    own = {"class": Prototypes.of({0: (torch.tensor([0.0, 8.0]), 2)}, 2)}
    weights = weights_of(ctx.net)
    base, head = (
        {k: v for k, v in weights.items() if k.startswith(part)} for part in ("base/", "head/")
    )
    payload = Bundle(base, {"class": Prototypes.of({}, 2)})
    state = train_locally(method_of(experiment), ctx, payload, Bundle(head, own)).state
    torch.testing.assert_close(state.prototypes["class"].vectors, torch.tensor([[0.5, 4.0]]))


@pytest.mark.parametrize(("min_count", "counts"), [(1, [1.0, 0.0]), (5, [1.0, 1.0])])
def test_a_client_without_examples_does_not_count(min_count, counts):
    """Its weights are those it received. Where prototypes are withheld, nobody can tell."""
    rows = Prototypes.of({0: (torch.ones(4), 5)}, 4), Prototypes.of({}, 4)
    method = make("gldp", **SHORT, min_count=min_count)
    assert [method.count(Bundle({}, {"class": each})) for each in rows] == counts
