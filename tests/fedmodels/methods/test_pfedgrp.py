"""pFedGRP: hand-computed anchors, and properties that every setting keeps."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.errors import PayloadError
from fedmodels.methods import make, method_class
from fedmodels.methods.pfedgrp import PERSONAL
from fedmodels.numerics.metric_tables import metric
from fedmodels.techniques import server_replay
from fedmodels.techniques.aggregation_weights import BestWeights, LearnedWeights, find_all
from fedmodels.techniques.class_replay import Judge, Rehearsal, ReplayedExamples
from fedmodels.techniques.generators import public
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Problem, tensor_bytes
from fedmodels.training.contexts import START, Position, ServerContext
from fedmodels.training.hooks import as_uploads, evaluation
from fedmodels.training.loop import train_locally
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import keys_of
from fedmodels.training.stepped import Batch, Output
from fedtide.inprocess import InProcessCohort, run_in_process, transported
from tests.conftest import context_of, method_of, payload_of, records_of, tiny_experiment
from tests.runs import dies, ends_as, killed

SMALL = {
    "generator_width": 4,
    "generator_epochs": 2,
    "n_check": 16,
    "server_volume": 12,
    "w_epochs": 2,
}


def experiment_of(*, training=None, scenario=None, schedule=None, net=None, seed=0, **switches):
    more = {"training": training, "scenario": scenario, "schedule": schedule, "net": net}
    tables = {key: table for key, table in more.items() if table}
    return tiny_experiment(method={"name": "pfedgrp", **SMALL, **switches}, seed=seed, **tables)


def same(one, other):
    one, other = one.by_key(), other.by_key()
    return one.keys() == other.keys() and all(
        tensor_bytes(one[k]) == tensor_bytes(other[k]) for k in one
    )


def trained(root, clients=(0, 1, 2), task=0, interaction=0, states=None, payloads=None, **switches):
    """Return method, run and each client's result of one interaction."""
    experiment, results = experiment_of(**switches), {}
    method = method_of(experiment)
    for client in clients:
        ctx = context_of(experiment, root, client, task, interaction)
        payload, state = payload_of(experiment, ctx)
        state = (states or {}).get(client, state)
        payload = (payloads or {}).get(client, payload)
        results[client] = train_locally(method, ctx, payload, state)
    return method, ctx.run, results


# --- the local loss -------------------------------------------------------------------------------


def refs_of(teacher, replayed=1, soft=None):
    nothing = torch.zeros(replayed, 1, 1, 1)
    rep = ReplayedExamples(nothing, torch.ones(replayed, dtype=torch.int64), soft)
    none = torch.zeros(2, dtype=torch.int32)
    judge = Judge(torch.nn.Linear(1, 1))
    return Rehearsal(
        judge, Histogram(none, none), (nothing[:1], torch.zeros(1)), rep, None, teacher
    )


def on_gpu(method):
    """Return the method with its search for weights on a GPU, where there is one."""
    return replace(method, learned=replace(method.learned, w_device="auto"))


def loss_of(refs, logits=((2.0, 0.0), (0.0, 1.0)), labels=(0, 1), **switches):
    logits, y = torch.tensor(logits), torch.tensor(labels)
    batch = Batch(torch.zeros(len(y), 1), y, torch.arange(len(y)))
    return float(make("pfedgrp", **switches).loss(None, batch, Output(logits, logits), refs))


def test_card_loss():
    """CE .126928 and .313262; teacher (0, 3) -> (1/2)·4 = 2; lambda .3 (anchor 2)."""
    refs = refs_of(torch.tensor([[0.0, 3.0]]))
    assert loss_of(refs) == pytest.approx(0.520095, abs=1e-6)


def test_loss_without_alignment_is_cross_entropy():
    assert loss_of(refs_of(None)) == pytest.approx((0.126928 + 0.313262) / 2, abs=1e-6)
    assert loss_of(refs_of(torch.tensor([[0.0, 3.0]])), lam=0.0) == pytest.approx(
        0.220095, abs=1e-6
    )


def test_loss_with_soft_labels():
    """CE of (0, 1) under (.5, .5) is 1.313262 / 2 + .313262 / 2 = .813262."""
    refs = refs_of(None, soft=torch.tensor([[0.5, 0.5]]))
    found = loss_of(refs, replay_labels="soft")
    assert found == pytest.approx((0.126928 + 0.813262) / 2, abs=1e-6)


def test_a_batch_without_replay_is_plain():
    refs = refs_of(None, replayed=0)
    found = loss_of(refs, logits=((2.0, 0.0),), labels=(0,))
    assert found == pytest.approx(0.126928, abs=1e-6)


# --- a first round --------------------------------------------------------------------------------


@pytest.mark.parametrize("switches", [{"lam": 0.0}, {"lam": 0.3}])
def test_first_round_without_history_is_fedavg(switches, digits):
    """Property 5: nothing to replay, so C_i and C_g are uniform FedAvg's, bit for bit."""
    method, run, mine = trained(digits, **switches)
    plain = tiny_experiment(method={"name": "fedavg", "weighting": "uniform"})
    fedavg, theirs = method_of(plain), {}
    for client in range(3):
        ctx = context_of(plain, digits, client)
        theirs[client] = train_locally(fedavg, ctx, *payload_of(plain, ctx))
    ctx = ServerContext(run, START, (0, 1, 2))
    means = [
        m.aggregate(
            ctx, m.init_server(run), as_uploads(m, {c: r.upload for c, r in found.items()})
        ).common
        for m, found in ((method, mine), (fedavg, theirs))
    ]
    assert same(*means)


def test_what_goes_up(digits):
    """The model, public tensors of the trained generators, S; no critic, no Y (section 5)."""
    _, run, results = trained(digits, clients=(0,))
    upload, state = results[0].upload, results[0].state
    classes = state.histogram.round.nonzero().flatten().tolist()
    assert set(upload.generators) == {str(c) for c in classes} == set(state.generators)
    assert all(
        k.startswith(("net/", "affine/")) for g in upload.generators.values() for k in g.tensors
    )
    assert any(k.startswith("critic/") for g in state.generators.values() for k in g.tensors)
    assert upload.histogram.round.numel() == 0
    assert torch.equal(upload.histogram.total, state.histogram.total)
    assert upload.weights.keys() == run.initial_weights.keys()


def rounds_of(root, out, **switches):
    """Run, and return the orders' server states as the engine left them, and the records."""
    run_in_process(experiment_of(**switches), root, out)
    return records_of(out)


# --- generators -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "trainings"),
    [({"th_g": 0.0}, 1), ({"th_g": 1.5}, 3), ({"generator_update": "always"}, 3)],
)
def test_how_often_generators_train(switches, trainings, digits):
    """Property 7: TH_G = 0 trains each class once, TH_G > 1 at every encounter (ablation AS2)."""
    states, payloads = {}, {}
    for interaction in range(3):
        _, _, results = trained(digits, (0,), 0, interaction, states, payloads, **switches)
        states = {0: results[0].state}
        uploaded = set(results[0].upload.generators)
        assert uploaded == (set(states[0].generators) if interaction < trainings else set())
    assert {g.version for g in states[0].generators.values()} == {trainings}


def test_a_threshold_calibrated_by_the_fresh_generator(digits):
    """What is hardly recognised at its best is not trained for ever; what got worse is."""
    method, run, results = trained(digits, (0,), th_g_of="fresh", th_g=0.5)
    state = results[0].state
    assert state.scalars.keys() == {f"fresh/{key}" for key in state.generators}
    assert all(0 <= share <= 1 for share in state.scalars.values())
    relative, plain = (m.replay.of(run) for m in (method, make("pfedgrp", th_g=0.5)))
    assert not relative.has_drifted(0.06, fresh=0.1)
    assert relative.has_drifted(0.04, fresh=0.1)
    assert plain.has_drifted(0.06, fresh=0.1)
    # A generator that nobody ever recognised cannot get worse: it is left as it is.
    hopeless = replace(state, scalars=dict.fromkeys(state.scalars, 0.0))
    _, _, again = trained(digits, (0,), 0, 1, {0: hopeless}, th_g_of="fresh", th_g=0.5)
    assert {g.version for g in again[0].state.generators.values()} == {1}


def test_restart_begins_from_scratch(digits):
    found = []
    for restart in (False, True):
        switches = {"generator_update": "always", "generator_restart": restart}
        first = trained(digits, (0,), **switches)[2]
        again = trained(digits, (0,), interaction=1, states={0: first[0].state}, **switches)[2]
        found.append((first[0].state, again[0].state))
    assert same(found[0][0], found[1][0])
    assert not same(found[0][1], found[1][1])


def test_the_server_caches_what_the_client_holds(digits):
    """Property 6: bitwise, also of generators that came in an earlier round."""
    method, run, first = trained(digits, th_g=0.0)
    ctx = ServerContext(run, START, (0, 1, 2))
    uploads = as_uploads(method, {c: r.upload for c, r in first.items()})
    state = method.aggregate(ctx, method.init_server(run), uploads)
    state, _ = method.finish(ctx, state, uploads)
    states = {c: r.state for c, r in first.items()}
    _, _, second = trained(digits, (0, 1, 2), 1, 1, states, th_g=0.0)
    uploads = {c: r.upload for c, r in second.items()}
    later = method.aggregate(ctx, state, as_uploads(method, uploads))
    kept = 0
    for client, result in second.items():
        cached, held = later.clients[client].generators, result.state.generators
        assert cached.keys() == held.keys()
        for key, generator in held.items():
            assert cached[key].version == generator.version
            expected = Bundle(weights=public(generator.tensors))
            assert same(Bundle(weights=cached[key].tensors), expected)
            if key not in result.upload.generators:
                kept += 1
                assert cached[key] is state.clients[client].generators[key]
            else:  # the receive buffer is given back
                sent = uploads[client].generators[key].tensors
                assert all(cached[key].tensors[k] is not sent[k] for k in sent)
    assert kept


def test_an_incomplete_generator_is_refused(digits):
    method, run, results = trained(digits, clients=(0,))
    upload = results[0].upload
    key, generator = next(iter(upload.generators.items()))
    half = GeneratorState(generator.version, dict(list(generator.tensors.items())[:2]))
    upload = Bundle(upload.weights, {}, {key: half}, upload.histogram, upload.scalars)
    with pytest.raises(PayloadError, match=f"'generators/{key}/tensors/.*' is missing"):
        transported(upload, method.upload_spec(run))


# --- the server -----------------------------------------------------------------------------------


def finished(method, run, uploads, ctx=None):
    ctx = ctx or ServerContext(run, START, tuple(uploads))
    state = method.aggregate(ctx, method.init_server(run), as_uploads(method, uploads))
    return (*method.finish(ctx, state, as_uploads(method, uploads)), ctx)


def test_aggregation_weights(digits):
    method, run, results = trained(digits, replay_filter=False)
    uploads = {c: r.upload for c, r in results.items()}
    state, metrics, ctx = finished(method, run, uploads)
    rows = torch.tensor(ctx.series["aggregation_weights"])
    assert rows.shape == (3, 3)
    assert float(rows.min()) >= 0
    torch.testing.assert_close(rows.sum(1), torch.ones(3), atol=1e-5, rtol=0)
    assert 0 <= metrics["weights_entropy"] <= 1
    assert all(best <= uniform for uniform, best in ctx.series["mixing_loss"])
    assert len(ctx.series["mixing_loss"]) == 3
    common, personal = method.broadcast(ctx, state)
    assert all(k.startswith(f"{PERSONAL}/") for part in personal.values() for k in part.weights)
    assert not any(k.startswith(f"{PERSONAL}/") for k in common.weights)


def test_the_server_draws_as_many_examples_as_it_is_told(digits, monkeypatch):
    """V of the client's most frequent class, of the others in proportion to S."""
    method, run, results = trained(digits, (0,), replay_filter=False, server_volume=9)
    drawn = []

    def watched(mixer, searches, *settings):
        drawn.extend(search.examples for search in searches)
        return find_all(mixer, searches, *settings)

    monkeypatch.setattr("fedmodels.techniques.aggregation_weights.find_all", watched)
    upload = results[0].upload
    finished(method, run, {0: upload})
    ((_, labels),) = drawn
    total = upload.histogram.total.double()
    assert (
        torch.bincount(labels, minlength=10).tolist() == (9 * total / total.max()).round().tolist()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_finds_the_weights_a_cpu_finds(digits):
    method, run, results = trained(digits, replay_filter=False, w_init="self")
    uploads = {c: r.upload for c, r in results.items()}
    _, _, at_cpu = finished(method, run, uploads)
    _, _, at_gpu = finished(on_gpu(method), run, uploads)
    found = [torch.tensor(ctx.series["aggregation_weights"]) for ctx in (at_cpu, at_gpu)]
    torch.testing.assert_close(*found, atol=1e-3, rtol=0)


def test_without_a_gpu_weights_are_searched_on_the_cpu(digits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    method, run, results = trained(digits, replay_filter=False)
    uploads = {c: r.upload for c, r in results.items()}
    _, _, at_cpu = finished(method, run, uploads)
    _, _, wherever = finished(on_gpu(method), run, uploads)
    assert wherever.series["aggregation_weights"] == at_cpu.series["aggregation_weights"]


def test_without_generated_examples_weights_are_uniform(digits):
    method, run, results = trained(digits)
    uploads = {
        c: Bundle(r.upload.weights, {}, {}, r.upload.histogram, r.upload.scalars)
        for c, r in results.items()
    }
    state, metrics, _ = finished(method, run, uploads)
    assert metrics["weights_entropy"] == pytest.approx(1)
    assert metric("weights_entropy").range == "0 … 1"
    for client in uploads:
        for key, mean in state.common.weights.items():
            torch.testing.assert_close(state.clients[client].weights[f"{PERSONAL}/{key}"], mean)


def test_c_g_does_not_depend_on_the_order_of_clients(digits):
    """Property 9, up to the rounding of the mean."""
    method, run, results = trained(digits)
    uploads = {c: r.upload for c, r in results.items()}
    ctx = ServerContext(run, START, (0, 1, 2))
    start = method.init_server(run)
    one = method.aggregate(ctx, start, as_uploads(method, uploads)).common.weights
    turned = dict(zip((0, 1, 2), [uploads[2], uploads[0], uploads[1]], strict=True))
    other = method.aggregate(ctx, start, as_uploads(method, turned)).common.weights
    for key, tensor in one.items():
        torch.testing.assert_close(other[key], tensor, rtol=1e-6, atol=1e-7)


def test_one_hot_weights_give_that_model(digits, monkeypatch):
    """Property 9: bitwise."""
    method, run, results = trained(digits)
    uploads = {c: r.upload for c, r in results.items()}
    rows = torch.eye(3, dtype=torch.float64)[[1, 2, 0]]
    found = [BestWeights(row, 0.0, 0.0) for row in rows]
    monkeypatch.setattr(LearnedWeights, "found", lambda *_: found)
    state, _, _ = finished(method, run, uploads)
    for client, source in ((0, 1), (1, 2), (2, 0)):
        for key, tensor in uploads[source].weights.items():
            assert torch.equal(state.clients[client].weights[f"{PERSONAL}/{key}"], tensor)


def test_absent_clients_keep_what_the_server_holds(digits):
    method, run, results = trained(digits)
    uploads = {c: r.upload for c, r in results.items()}
    state, _, _ = finished(method, run, uploads)
    ctx = ServerContext(run, Position(1, 1, 0), (1,))
    later = method.aggregate(ctx, state, as_uploads(method, {1: uploads[1]}))
    later, _ = method.finish(ctx, later, as_uploads(method, {1: uploads[1]}))
    assert later.clients[0] is state.clients[0]
    _, personal = evaluation(method, ctx, later)
    assert set(personal) == {0, 1, 2}
    assert set(method.broadcast(ctx, later)[1]) == {1}


# --- switches -------------------------------------------------------------------------------------


def test_initial_model_of_local_training(digits):
    """C_g by default; the personal model in ablation ASP; both are the judge's opposite."""
    for init in ("global", "personal"):
        experiment = experiment_of(init_from=init, lam=0.0)
        method, ctx = method_of(experiment), context_of(experiment, digits)
        payload, state = payload_of(experiment, ctx)
        personal = {f"{PERSONAL}/{k}": t + 1 for k, t in payload.weights.items()}
        payload = Bundle(weights={**payload.weights, **personal})
        method.load(ctx, payload, state)
        refs = method.prepare(ctx, payload, state)
        key = "head.weight"
        start, judge = (n.state_dict()[key] for n in (ctx.net, refs.judge.net))
        common = payload.weights["head/weight"]
        assert torch.equal(judge, common + 1)
        assert torch.equal(start, common if init == "global" else common + 1)
        assert refs.teacher is None


def test_one_generator_for_all_classes(digits):
    """AS3: trained every round, soft labels, drawn anew in each epoch."""
    switches = {"generator_decouple": False, "generator_width_mult": 2, "replay_labels": "soft"}
    _, _, first = trained(digits, (0,), **switches)
    assert set(first[0].upload.generators) == {"all"}
    experiment = experiment_of(training={"local_epochs": 2}, **switches)
    method, ctx = method_of(experiment), context_of(experiment, digits, 0, 1, 1)
    payload, _ = payload_of(experiment, ctx)
    state = first[0].state
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    before = refs.replayed
    assert len(before.y)
    torch.testing.assert_close(before.soft.sum(1), torch.ones(len(before.y)))
    method.fit(ctx, *method.training_data(ctx, refs), refs)
    assert not torch.equal(refs.replayed.x, before.x)
    after = method.after_local(ctx, state, refs)
    assert after.generators["all"].version == 2


@pytest.mark.parametrize(("images", "kinds"), [("round", 1), ("epoch", 3)])
def test_images_serve_a_round_or_an_epoch(images, kinds, digits, monkeypatch):
    """Three epochs of local training, and three of eq. 8, see one set of images or three."""
    switches = {"images": images, "replay_filter": False, "training": {"local_epochs": 3}}
    _, _, first = trained(digits, (0,), **switches)
    experiment = experiment_of(**switches)
    method, ctx = method_of(experiment), context_of(experiment, digits, 0, 1, 1)
    payload, _ = payload_of(experiment, ctx)
    state = first[0].state
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    seen, plain_loss = [], type(method).loss

    def watched(self, ctx, batch, out, refs):
        replayed = refs.replayed.x
        torch.testing.assert_close(refs.teacher, refs.judge(replayed))
        held = batch.index[batch.index >= len(refs.real[1])] - len(refs.real[1])
        assert torch.equal(batch.x[batch.index >= len(refs.real[1])], replayed[held])
        if not any(torch.equal(replayed, before) for before in seen):
            seen.append(replayed)
        return plain_loss(self, ctx, batch, out, refs)

    monkeypatch.setattr(type(method), "loss", watched)
    method.fit(ctx, *method.training_data(ctx, refs), refs)
    assert len(seen) == kinds
    assert [len(x) for x in seen] == [len(refs.replayed.y)] * kinds

    server = ServerContext(ctx.run, Position(1, 1, 1), (0,))
    upload = as_uploads(method, {0: first[0].upload})
    after = method.aggregate(server, method.init_server(ctx.run), upload)
    (search,), _ = server_replay.searches(
        server, method.replay.of(ctx.run), after, upload, 12, "cpu"
    )
    epochs = [search.examples(e) if kinds > 1 else search.examples for e in range(3)]
    assert len({bytes(tensor_bytes(x)) for x, _ in epochs}) == kinds
    assert all(torch.equal(y, epochs[0][1]) for _, y in epochs)


SWITCHES = [
    {"images": "epoch", "shortage": "fill_top"},
    {"generator_decouple": False, "generator_width_mult": 2, "replay_labels": "soft"},
    {"replay_labels": "soft", "shortage": "fill_top", "cap": "generated"},
    {"replay_filter": False, "generator_update": "always", "generator_moments": True},
    {"w_init": "self", "w_entropy_floor": 0.3, "init_from": "personal"},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(s))
def test_every_switch_runs(switches, digits, tmp_path):
    records = rounds_of(digits, tmp_path / "out", schedule={"rounds": 1, "clients": 2}, **switches)
    assert len(records) == 2
    for record in records:
        rows = torch.tensor(record["series"]["aggregation_weights"])
        torch.testing.assert_close(rows.sum(1), torch.ones(2), atol=1e-5, rtol=0)
        assert all(row["generators_trained"] >= 0 for row in record["clients"].values())


@pytest.mark.parametrize(("precision", "mixed"), [("float32", False), ("bfloat16", True)])
def test_diffusion_computes_as_the_net_does(precision, mixed):
    experiment = tiny_experiment(training={"precision": precision})
    run = RunFacts(experiment, Problem((1, 8, 8), 10))
    family = make("pfedgrp", generator_arch="ddpm").replay.of(run).family
    assert family.net().mixed_precision is mixed


def test_diffusion_runs(tmp_path):
    """Two classes of one client: each generator takes seconds."""
    switches = {
        "schedule": {"rounds": 1, "clients": 5, "per_round": 1},
        "scenario": {"kind": "per_class_shards", "shards": 2, "tasks": 1},
        "generator_arch": "ddpm",
        "generator_width": 16,
        "generator_epochs": 1,
        "n_check": 2,
        "server_volume": 2,
        "generator_batch": 4,
        "replay_filter": False,
    }
    made, data = experiment_of(**switches), tmp_path / "data"
    run_partition(made.data, made.scenario, 5, made.seed, data, Console(quiet=True))
    (record,) = rounds_of(data, tmp_path / "out", **switches)
    (client,) = record["cohort"]
    assert record["clients"][str(client)]["generators_trained"] == 2


UNEQUAL = {"kind": "per_class_shards", "shards": 5, "tasks": [1, 3, 2]}


@pytest.mark.parametrize("name", ["pfedgrp", "fedavg-replay", "pfedgraph-replay"])
def test_clients_replay_as_many_tasks_as_they_have(name, tmp_path):
    """One has one task and nothing to replay; the others replay what they met, while they train."""
    known = keys_of(method_class(name))
    switches = {k: v for k, v in SMALL.items() if k in known}
    experiment = tiny_experiment(
        method={"name": name, **switches, "replay_filter": False},
        scenario=UNEQUAL,
        schedule={"rounds": 1, "order": "tasks_outer"},
    )
    data, quiet = tmp_path / "data", Console(quiet=True)
    run_partition(experiment.data, experiment.scenario, 3, experiment.seed, data, quiet)
    run_in_process(experiment, data, tmp_path / "run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    found = {
        client: [int(json.loads(line)["clients"][client]["replay_examples"]) for line in lines[:n]]
        for client, n in (("0", 1), ("1", 3), ("2", 2))
    }
    assert [json.loads(line)["cohort"] for line in lines] == [[0, 1, 2], [1, 2], [1]]
    assert all(counts[0] == 0 for counts in found.values())
    assert all(min(counts[1:]) > 0 for client, counts in found.items() if client != "0")


# --- what is recorded, what is forgotten ----------------------------------------------------------


def test_counters(digits, tmp_path):
    records = rounds_of(digits, tmp_path / "out", th_g=0.0, replay_filter=False)
    for client in ("0", "1", "2"):
        trainings = [r["clients"][client]["generators_trained"] for r in records]
        totals = [r["clients"][client]["generator_trainings"] for r in records]
        assert totals == [sum(trainings[: k + 1]) for k in range(len(trainings))]
    replayed = [r["clients"]["0"].get("replay_acceptance") for r in records]
    assert replayed[0] is None
    assert {a for a in replayed[1:] if a is not None} == {1.0}
    assert all("iaa" in r["metrics"] for r in records[1::2])
    up = [r["bytes"]["per_client"]["0"]["up"] for r in records]
    assert up[3] < up[0]  # no generator travels again


def test_old_examples_are_gone(digits, tmp_path):
    """Property 8: after task 1 was trained on, nothing holds the arrays of task 0."""
    experiment = experiment_of()
    seen = []

    def before(order):
        worker = cohort[0].workers.of(int(order.client_id))
        for task, (x, _) in worker.stream._train.items():
            seen.append((task, order.task, weakref.ref(x)))

    cohort = []
    init = InProcessCohort.__init__

    def remembering(self, *args, **options):
        init(self, *args, **options)
        cohort.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessCohort, "__init__", remembering)
        run_in_process(experiment, digits, tmp_path / "out", before=before)
    held = [worker.stream._train for worker in cohort[0].workers.open().values()]
    tasks = {task for train in held for task in train}
    assert tasks == {1}
    old = [ref for task, _, ref in seen if task == 0]
    assert old
    assert all(ref() is None for ref in old)


def test_a_run_that_was_cut_off_ends_in_the_same_state(digits, tmp_path):
    """Caches, personal models and private generators are taken up from the disk, to the bit."""
    experiment = experiment_of(th_g=0.5, schedule={"rounds": 1})
    whole, out = run_in_process(experiment, digits, tmp_path / "whole"), tmp_path / "cut"
    killed(experiment, digits, out, before=dies(interaction=1, client_id="1"))
    ends_as(whole, experiment, digits, out)


def test_counts_that_cannot_be_do_not_stop_the_server(digits):
    method, run, results = trained(digits, clients=(0, 1))
    told = results[0].upload.histogram
    wrong = Histogram(told.round, -told.total)
    uploads = {c: r.upload for c, r in results.items()}
    uploads[0] = Bundle(uploads[0].weights, {}, uploads[0].generators, wrong, uploads[0].scalars)
    _, _, ctx = finished(method, run, uploads)
    assert ctx.series["aggregation_weights"][0][:2] == [0.5, 0.5]
