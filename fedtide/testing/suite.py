"""The checks of the conformance suite, by name."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import tomli_w
import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.methods import make, method_class, settings_of
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import weights_of
from fedmodels.numerics.metric_tables import is_known, metric
from fedmodels.tensors.archive import load, load_named, save, save_named
from fedmodels.tensors.bundle import Bundle, Problem, Weights, check_finite, state_digest
from fedmodels.training.asked import HOOKS, global_weights, keeps_state
from fedmodels.training.contexts import ClientContext
from fedmodels.training.hooks import as_uploads, broadcast, reduce
from fedmodels.training.loop import train_locally
from fedmodels.training.method import Method
from fedmodels.training.returned import check_upload
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output, in_steps
from fedpb.codec import merged
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process, transported
from fedtide.testing.case import Case, Finished, Trained, bytes_of, newest_states, states_of
from fedtide.testing.trial import (
    TABLES,
    context_of,
    few_in,
    method_of,
    scored_by_the_evaluator,
    server_context,
)

Check = Callable[[Case], None]
CHECKS: dict[str, Check] = {}
"""Every check by its name."""
ALIKE = 0.9
"""From 0 to 1: two names that are at least as alike count as one name, misspelt."""
RANDOM = (
    "two equal runs differ: draw by ctx.generator() or by torch, not by numpy or random, and keep "
    "nothing outside of the states"
)
ARRIVAL = "the order in which uploads come changes a run: keep nothing of check_upload's calls"


def check(function: Check) -> Check:
    """Add a check to the suite under its name."""
    CHECKS[function.__name__] = function
    return function


# --- what a method is -----------------------------------------------------------------------------


@check
def hyper_parameters_survive_toml(case: Case) -> None:
    """A method is the same after its fields were written into a config and read back."""
    method = make(case.name, **case.switches)
    given = {k: v for k, v in settings_of(method).items() if v is not None}  # left out there
    text = tomli_w.dumps({"method": given})
    assert make(case.name, **tomllib.loads(text)["method"]) == method


@check
def its_views_are_known(case: Case) -> None:
    """There are models to score, in views that the engine knows."""
    views = set(make(case.name, **case.switches).views)
    assert views
    assert views <= {"global", "after_local", "after_downlink"}, views


@check
def its_functions_are_spelt_as_known(case: Case) -> None:
    """No public function has nearly the name of one that fedtide calls: nothing would call it."""
    cls = method_class(case.name)
    known = {name for owner in cls.__mro__[1:] for name in vars(owner)} | vars(FedAvg).keys()
    known |= HOOKS.keys()
    for name, value in vars(cls).items():
        is_public = inspect.isfunction(value) and not name.startswith("_")
        if is_public and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)
            assert not near, f"{name} is never called: did you mean {near[0]}? Helpers begin with _"


# --- a whole run ----------------------------------------------------------------------------------


@check
def arrival_does_not_matter(case: Case) -> None:
    """Two runs of one seed agree to the bit, whatever the order in which uploads come."""
    first = _end(case.finished)
    if _end(case.again(arrival=random.Random(3))) == first:
        return
    raise AssertionError(ARRIVAL if _end(case.again()) == first else RANDOM)


def _end(run: Finished) -> tuple[str, dict[str, float]]:
    """Return what two runs that are the same have in common."""
    return run.summary["state_sha256"], run.summary["metrics"]


@check
def the_seed_matters(case: Case) -> None:
    """Another seed gives another state after one interaction."""
    other = train_locally(*case.begun(experiment=case.experiment(seed=1)))
    one = case.interaction.results[0]
    assert bytes_of(one.upload, one.state) != bytes_of(other.upload, other.state)


@check
def bfloat16_stays_within_the_net(case: Case) -> None:
    """What travels is checked against the method's spec, which knows float32 alone."""
    experiment = case.experiment(training={"precision": "bfloat16"})
    made = case.trained(experiment=experiment)
    _check_travels(made)
    plain, rounded = (context_of(e, case.data) for e in (case.experiment(), experiment))
    x = plain.stream.test(0)[0][:8]  # type: ignore[attr-defined]
    method, _, payload, state = case.begun(experiment=experiment)
    method.load(rounded, payload, state)
    _check_scores(method, rounded, payload, made.results[0].state, x)
    assert rounded.run.make_net().mixed_precision
    assert not plain.run.make_net().mixed_precision
    assert not torch.equal(*(ctx.run.make_net().eval()(x) for ctx in (plain, rounded)))


@check
def metrics_are_fractions(case: Case) -> None:
    """Every metric is finite, and a share unless it is declared as a number."""
    summary, out = case.finished.summary, case.finished.out
    assert {"a_glo", "a_loc"} & summary["metrics"].keys()
    for key, value in summary["metrics"].items():
        assert math.isfinite(value), key
        is_number = is_known(key) and not metric(key).unit
        assert is_number or -1 <= value <= 1, f"{key} = {value}"
    assert len((out / "rounds.jsonl").read_text("utf-8").splitlines()) == 2


@check
def who_is_not_selected_keeps_its_state(case: Case) -> None:
    """One of three clients trains in a round; the newest private state of the others stays."""
    tiny = case.experiment()
    stateful = keeps_state(method_of(tiny), RunFacts(tiny, Problem((1, 8, 8), 10)))
    schedule = {**TABLES["schedule"], "rounds": 2 if stateful else 1, "per_round": 1}
    experiment = case.experiment(schedule=schedule, scenario={"tasks": 1}, evaluate={"every": 0})
    seen: list[tuple[str | None, dict[str, bytes]]] = []
    out = case.fresh()

    def before(order: rpc.Order) -> None:
        if order.kind in (rpc.ORDER_KIND_TRAIN, rpc.ORDER_KIND_FINISH):
            trains = order.client_id if order.kind == rpc.ORDER_KIND_TRAIN else None
            seen.append((trains, newest_states(out / "clients")))

    run_in_process(experiment, case.data, out, before=before)
    assert bool(seen[-1][1]) == stateful
    for (trains, states), (_, later) in itertools.pairwise(seen):
        for client in states:
            assert client == trains or later[client] == states[client], client


@check
def a_class_may_come_later(case: Case) -> None:
    """A run with a class more goes on from what was learnt, unless its method or net takes none."""
    from fedmodels.parts.class_growth import StateGrowth, check_grows

    made, client = case.interaction, 0
    method, cohort = made.method, (0, 1)
    try:
        check_grows(method, made.run)
    except ConfigError:
        return  # an open run refuses this method or net from the start
    now = made.run.for_classes(made.run.problem.num_classes + 1)
    growth = StateGrowth(method, made.run, now)
    state = growth.server(made.after(server_context(made.run, 0, cohort)))
    private = growth.client(client, made.results[client].state)
    server = server_context(now, 1, cohort)
    common, own = broadcast(method, server, state)
    ctx = context_of(case.experiment(), case.data, client, interaction=1)
    ctx = replace(ctx, run=now, net=now.make_net())
    payload = merged({"common": common, "personal": own.get(client, Bundle())})
    trained = train_locally(method, ctx, payload, private)
    check_upload(method, method.upload_spec(now), trained.upload)
    reduce(method, server, state, as_uploads(method, {client: trained.upload}))


@check
def clients_with_little_data_take_part(case: Case) -> None:
    """One class, one example, nothing at all: everybody still takes part and is scored."""
    _run_with_little(case, case.tables.get("net", "mlp"))


@check
def one_example_makes_no_batch_statistics(case: Case) -> None:
    """Clients with so little train a net with batch normalisation, unless the net is given.

    Its last one normalises vectors: of one example alone it raises an error, which one of pictures
    does not.
    """
    if "net" not in case.tables:
        _run_with_little(case, {"name": "digits-cnn", "norm": "batch"})


def _run_with_little(case: Case, net: Any) -> None:
    training = {**TABLES["training"], "batch_size": 8}
    schedule = {"rounds": 1, "clients": 3}
    experiment = case.experiment(
        training=training, schedule=schedule, scenario={"tasks": 1}, net=net
    )
    made = case.run(experiment, data=few_in(case.fresh(), case.data))
    assert all(map(math.isfinite, made.summary["metrics"].values()))
    for line in (made.out / "rounds.jsonl").read_text("utf-8").splitlines():
        json.loads(line, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


# --- one interaction ------------------------------------------------------------------------------


@check
def one_upload_is_its_own_mean(case: Case) -> None:
    """What one client sends is what everybody gets."""
    made = replace(case.interaction, results={1: case.interaction.results[1]})
    upload = made.sent[1]
    after = made.method.aggregate(server_context(made.run, 0, (1,)), made.state, made.uploads)
    for name, tensor in after.common.weights.items():
        assert name not in upload.weights or torch.equal(tensor, upload.weights[name]), (
            f"aggregate makes another {name!r} of one upload: what goes beyond a mean is finish's"
        )
    assert after.common.weights.keys() == made.state.common.weights.keys()


@check
def server_half_leaves_inputs_alone(case: Case) -> None:
    """No function of the server half changes what it is given."""
    made = case.interaction
    ctx = replace(server_context(made.run, 0, (0, 1)), before=made.state)
    before = states_of(made.state), bytes_of(*made.sent.values())
    reduced = made.method.aggregate(ctx, made.state, made.uploads)
    middle = states_of(reduced)
    after, _ = made.method.finish(ctx, reduced, made.uploads)
    assert (states_of(made.state), bytes_of(*made.sent.values())) == before, "aggregate"
    assert states_of(reduced) == middle, "finish"
    middle = states_of(after)
    made.method.broadcast(ctx, after)
    assert states_of(after) == middle, "broadcast"


@check
def client_half_leaves_inputs_alone(case: Case) -> None:
    """Training changes neither payload, state nor data; what leaves is a copy of the net."""
    method, ctx, payload, state = case.begun()
    x, y = ctx.stream.train(ctx.task)
    before = bytes_of(payload, state), x.clone(), y.clone()
    result = train_locally(method, ctx, payload, state)
    assert bytes_of(payload, state) == before[0], "payload or state"
    assert torch.equal(x, before[1]), "inputs"
    assert torch.equal(y, before[2]), "labels"
    leaves = bytes_of(result.upload, result.state)
    with torch.no_grad():
        for parameter in ctx.net.parameters():
            parameter.add_(1.0)
    assert bytes_of(result.upload, result.state) == leaves, "the upload is a view of the net"


@check
def loss_leaves_inputs_alone(case: Case) -> None:
    """A loss is a scalar with a gradient, and changes neither its batch nor the net."""
    method, ctx, payload, state = case.begun()
    method.load(ctx, payload, state)
    refs = method.prepare(ctx, payload, state)
    x, y = (t[:8] for t in method.training_data(ctx, refs))
    taught = in_steps(method).taught(ctx, x, refs)
    batch = Batch(x.clone(), y.clone(), torch.arange(8), taught=taught)
    features = ctx.net.features(batch.x)
    out = Output(features, ctx.net.head(features))
    weights = bytes_of(Bundle(weights=_parameters(ctx)))
    kept = out.features.clone(), out.logits.clone()
    loss = in_steps(method).loss(ctx, batch, out, refs)
    assert loss.shape == (), loss.shape
    assert loss.requires_grad
    assert torch.equal(batch.x, x), "it changes batch.x"
    assert torch.equal(batch.y, y), "it changes batch.y"
    assert torch.equal(out.features, kept[0]), "it changes out.features"
    assert torch.equal(out.logits, kept[1]), "it changes out.logits"
    assert bytes_of(Bundle(weights=_parameters(ctx))) == weights, "it changes the net's weights"


def _parameters(ctx: ClientContext) -> Weights:
    return {key: p.detach() for key, p in ctx.net.named_parameters()}


@check
def references_stay_while_the_net_trains(case: Case) -> None:
    """No tensor that ``prepare`` returns is a parameter of the net that trains.

    A distance from the net to itself is zero at every step, and nothing else shows it.
    """
    method, ctx, payload, state = case.begun()
    method.load(ctx, payload, state)
    held = {t.data_ptr() for t in _tensors(method.prepare(ctx, payload, state)) if t.numel()}
    for key, parameter in ctx.net.parameters_by_key().items():
        assert parameter.data_ptr() not in held, (
            f"what prepare returns holds {key!r} of ctx.net itself, which moves while it trains: "
            "return a copy, such as tensor.detach().clone()"
        )


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested references; what holds none has none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_tensors, value))
    elif dataclasses.is_dataclass(value):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        yield from itertools.chain.from_iterable(map(_tensors, fields))


@check
def the_classifier_is_the_net(case: Case) -> None:
    """A rule called ``classifier`` is the stored net's own output, as ``predict`` promises."""
    method, ctx, payload, state = case.begun()
    result = train_locally(method, ctx, payload, state)
    x = ctx.stream.test(0)[0]  # type: ignore[attr-defined]
    ctx.net.eval()
    with torch.no_grad():
        found = method.predict(ctx, payload, result.state, x).get("classifier")
        if found is not None:
            same = torch.allclose(found, ctx.net(x), rtol=1e-3, atol=1e-4)
            assert same, (
                "its rule 'classifier' is not ctx.net(x): give it another name, in rules too"
            )


@check
def the_exported_global_model_is_the_scored_one(case: Case) -> None:
    """``global_weights`` names what ``load`` loads as everyone's model."""
    made, ctx = case.interaction, context_of(case.experiment(), case.data)
    if "global" not in made.method.views:
        return
    server = server_context(made.run, 0, (0, 1))
    state = made.after(server)
    ctx, payload = scored_by_the_evaluator(made.method, ctx, server, state)
    made.method.load(ctx, payload, Bundle())
    exported = global_weights(made.method, state.common)
    loaded = weights_of(ctx.net)
    for name in exported.keys() & loaded.keys():  # a net that lacks some is refused
        assert torch.equal(exported[name], loaded[name]), name


@check
def states_survive_the_archive(case: Case) -> None:
    """What is written to disk is what is read back."""
    made, place = case.interaction, case.fresh()
    place.mkdir(parents=True)
    state = made.after(server_context(made.run, 0, (0, 1)))
    save_named(place / "server", dict(state.named()), {})
    loaded = load_named(place / "server")[0]
    kept = [(name, bundle) for name, bundle in state.named() if bundle.by_key()]
    assert state_digest([(n, loaded[n]) for n, _ in kept]) == state_digest(kept)
    save(place / "client", made.results[0].state, {})
    assert bytes_of(load(place / "client")[0]) == bytes_of(made.results[0].state)


@check
def private_state_has_one_shape(case: Case) -> None:
    """A client that was never selected holds what every other one does."""
    made = case.interaction
    initial, later = made.method.init_client(made.run, 0), made.results[0].state
    keeps = keeps_state(made.method, made.run)
    assert bool(initial.by_key()) <= keeps
    assert bool(later.by_key()) <= keeps
    assert not initial.weights.keys() - later.weights.keys()


@check
def what_travels_is_what_is_expected(case: Case) -> None:
    """Payloads and uploads pass the codec under the specs their receivers derive themselves."""
    _check_travels(case.interaction)


def _check_travels(made: Trained) -> None:
    for result in made.results.values():
        arrived = transported(result.upload, made.method.upload_spec(made.run))
        assert bytes_of(arrived) == bytes_of(result.upload)
        check_finite(result.state)
    ctx = server_context(made.run, 1, (0, 1))
    specs = made.method.payload_spec(made.run)
    for now in (made.state, made.after(ctx)):
        common, personal = made.method.broadcast(ctx, now)
        assert bytes_of(transported(common, specs[0])) == bytes_of(common)
        for part in personal.values():
            assert bytes_of(transported(part, specs[1])) == bytes_of(part)


@check
def predictions_are_scores_of_classes(case: Case) -> None:
    """Every rule gives (B, K) scores, also for a single input and for the evaluator.

    The evaluator scores everyone's model, and its private state is empty.
    """
    method, ctx, payload, state = case.begun()
    result = train_locally(method, ctx, payload, state)
    x = ctx.stream.test(0)[0]  # type: ignore[attr-defined]
    _check_scores(method, ctx, payload, result.state, x)
    if "global" in method.views:
        server = server_context(ctx.run, 0, (0,))
        start = method.init_server(ctx.run)
        ctx, payload = scored_by_the_evaluator(method, ctx, server, start)
        method.load(ctx, payload, Bundle())
        _check_scores(method, ctx, payload, Bundle(), x)


def _check_scores(
    method: Method, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
) -> None:
    ctx.net.eval()
    with torch.no_grad():
        for inputs in (x, x[:1]):
            found = method.predict(ctx, payload, state, inputs)
            assert found, "predict returns no rule"
            for rule, scores in found.items():
                assert scores.shape == (len(inputs), 10), f"{rule}: scores {tuple(scores.shape)}"
                assert not torch.isnan(scores).any(), f"{rule}: scores are NaN"
