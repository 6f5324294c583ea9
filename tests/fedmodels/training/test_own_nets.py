"""Clients with nets of their own: who has which, what must be the same, and two methods by hand."""

import math

import pytest
import torch

from fedmodels.config.experiment import ClientsNet, NetTable
from fedmodels.config.sent import without_places
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.facts.resolution import received_experiment
from fedmodels.methods import make, names
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.contexts import START, ClientContext, ServerContext
from fedmodels.training.hooks import as_uploads
from fedmodels.training.loop import train_locally
from fedmodels.training.own_nets import check_own_nets
from fedmodels.training.run import RunFacts
from fedtide.testing import check_method
from tests.conftest import OneTask, tiny_experiment

CODE = """
import torch
from torch import nn

def of(*layers):
    net = nn.Module()
    maps = [nn.Linear(len(w[0]), len(w), bias=False) for w in layers]
    for each, w in zip(maps, layers):
        each.weight.data = torch.tensor(w)
    net.features, net.head = nn.Sequential(*maps), nn.Linear(2, 2, bias=False)
    nn.init.zeros_(net.head.weight)
    return net

def plain(num_classes, input_shape):
    return of([[1.0, 0.0], [0.0, 1.0]])

def twice(num_classes, input_shape):
    return of([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
"""
FROZEN = """    net.features.requires_grad_(False)
    return net
"""
MLP = {"name": "mlp", "hidden": [16]}
OTHER = {"name": "mlp", "hidden": [8, 16]}


def facts(method="fedproto", *others, **net):
    table = {**MLP, **({"by_client": [*others]} if others else {}), **net}
    return RunFacts(tiny_experiment(method=method, net=table), Problem((1, 8, 8), 10))


# --- who has which --------------------------------------------------------------------------------


def nets_of(clients, *others):
    net = facts("local", *others).experiment.net
    return [net.number_of(client) for client in range(clients)]


def test_nets_without_clients_take_turns_with_the_first():
    assert nets_of(5, OTHER) == [0, 1, 0, 1, 0]
    assert nets_of(5, OTHER, {"name": "digits-cnn"}) == [0, 1, 2, 0, 1]


def test_a_client_that_a_net_names_has_it_and_others_take_turns():
    named = {"name": "digits-cnn", "clients": [0]}
    assert nets_of(5, named) == [1, 0, 0, 0, 0]
    assert nets_of(5, named, OTHER) == [1, 2, 0, 2, 0]


def test_the_evaluator_has_the_first():
    assert facts("local", OTHER).experiment.net.number_of("evaluator") == 0


def test_facts_of_a_client_are_those_of_its_net_alone():
    run = facts("local", OTHER)
    assert run.of_client(1).make_net().tensors()["base/1.weight"].shape == (8, 64)
    assert run.of_client(1).experiment.net.by_client is None
    assert run.of_client(0).forms.keys() == run.forms.keys()
    plain = facts("local")
    assert plain.of_client(1) is plain


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "more", "line"),
    [
        ([{**OTHER, "clients": [1]}, {**OTHER, "clients": [1]}], {}, "names client 1 twice"),
        ([{**OTHER, "clients": [3]}], {}, "they go from 0 to 2"),
        ([{**OTHER, "clients": []}], {}, "at least 1 item"),
        ([{**OTHER, "clients": ["1"]}], {}, "valid integer"),
        ([{**OTHER, "clients": [0, 1, 2]}], {}, "leaves no client for net 'mlp', number 0"),
        ([OTHER, OTHER, OTHER], {}, "leaves no client for net 'mlp', number 3"),
        ([OTHER], {"weights": "some.safetensors"}, "weights is of one net"),
        ([OTHER], {"begin_from": "run"}, "begin_from is of one net"),
        ([{"name": "mpl"}], {}, "unknown net 'mpl'"),
        ([{"name": "mlp", "hiden": [1]}], {}, "unknown option 'hiden' of net 'mlp'"),
        ([{"hidden": [1]}], {}, "'name' is missing in [net.by_client.0]"),
        (["mlp"], {}, "should be a table"),
        ([], {}, "at least 1 item"),
        (3, {}, "should be a list"),
        ([{**OTHER, "weights": "some.safetensors"}], {}, "by_client]] has no weights"),
        ([{**OTHER, "weights_sha256": "00"}], {}, "by_client]] has no weights_sha256"),
        ([{**OTHER, "begin_from": "run"}], {}, "by_client]] has no begin_from"),
        ([{**OTHER, "by_client": [OTHER]}], {}, "by_client]] has no by_client"),
    ],
)
def test_configs_that_cannot_be(others, more, line):
    with pytest.raises(ConfigError) as error:
        tiny_experiment(net={**MLP, "by_client": others, **more})
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_methods_that_train_one_net_are_refused_in_a_line():
    for name in names():
        if name in {"fedproto", "fedtgp", "lg-fedavg", "local"}:
            check_own_nets(make(name), facts(name, OTHER))
        else:
            with pytest.raises(ConfigError, match=f"method '{name}' trains one net over clients"):
                facts(name, OTHER)


def test_a_model_for_all_is_refused_whatever_the_method_is_called():
    with pytest.raises(ConfigError, match="trains one net over clients"):
        facts({"name": "lg-fedavg", "private": []}, {"name": "mlp", "hidden": [16]})


def test_a_client_takes_no_method_that_trains_one_net():
    sent = without_places(facts("local", OTHER).experiment.to_dict())
    with pytest.raises(ConfigError, match="trains one net over clients"):
        received_experiment({**sent, "method": {"name": "fedavg"}}, "the server", [])


def test_a_client_opens_no_file_that_a_server_names_for_a_net(tmp_path):
    (file := tmp_path / "secret").write_text("mine")
    sent = without_places(facts("local", OTHER).experiment.to_dict())
    sent["net"]["by_client"][0]["weights"] = str(file)
    with pytest.raises(ConfigError, match="has no weights"):
        received_experiment(sent, "the server", [])


def test_many_clients_are_named_as_fast_as_few():
    clients = [*range(1, 50_000)]
    net = ClientsNet(name="mlp", clients=clients)
    table = NetTable(name="mlp", by_client=(net,))
    assert [table.number_of(client) for client in (0, *clients)] == [0, *[1] * len(clients)]


def test_a_method_that_trains_whole_nets_takes_no_net_with_a_frozen_part(tmp_path):
    (file := tmp_path / "nets.py").write_text(CODE.replace("    return net", FROZEN, 1))
    net = {"name": "mlp", "hidden": [2], "by_client": [{"name": f"{file}:plain"}]}
    run = RunFacts(tiny_experiment(method="local", net=net), Problem((2,), 2))

    class Whole(type(make("local"))):
        takes_frozen = False

    check_own_nets(make("local"), run)
    with pytest.raises(ConfigError, match=r"a part of .net. .*plain' is frozen"):
        check_own_nets(Whole(), run)


@pytest.mark.parametrize(
    ("method", "key", "one", "other"),
    [
        ("fedproto", "prototypes/class/vectors", "[any, 16]", "[any, 12]"),
        ("fedtgp", "prototypes/class/vectors", "[any, 16]", "[any, 12]"),
        ("lg-fedavg", "weights/head/weight", "[10, 16]", "[10, 12]"),
    ],
)
def test_embeddings_of_two_widths_are_refused(method, key, one, other):
    run = facts(method, {"name": "mlp", "hidden": [12]})
    with pytest.raises(ConfigError) as error:
        check_own_nets(make(method), run)
    assert f"shares '{key}', which is {one} with net 'mlp' and {other} with 'mlp'" in str(error)


def test_what_one_net_lacks_is_refused():
    run = facts("lg-fedavg", OTHER)
    with pytest.raises(ConfigError, match=r"base/3\.\w+', which is missing with net 'mlp'"):
        check_own_nets(make("lg-fedavg", private=("base/1.",)), run)


@pytest.mark.parametrize("way", ["upload", "common", "personal"])
def test_each_way_of_what_travels_is_compared(way):
    def of(run, there):
        return BundleSpec.of(Bundle({k: w for k, w in run.forms.items() if there == way}))

    class Own(type(make("local"))):
        def upload_spec(self, run):
            return of(run, "upload")

        def payload_spec(self, run):
            return of(run, "common"), of(run, "personal")

    with pytest.raises(ConfigError, match=r"shares 'weights/base/1\.\w+'"):
        check_own_nets(Own(), facts("local", OTHER))


def test_an_upload_of_another_width_does_not_fit():
    spec = make("fedproto").upload_spec(facts("fedproto", OTHER))
    spec.check_bundle(Bundle(prototypes={"class": Prototypes.of({3: (torch.ones(16), 2)}, 16)}))
    wide = Bundle(prototypes={"class": Prototypes.of({3: (torch.ones(12), 2)}, 12)})
    with pytest.raises(PayloadError):
        spec.check_bundle(wide)


def test_a_clients_own_file_crosses_the_wire_by_its_digest(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(CODE)
    asked = tiny_experiment(
        method="local", net={"name": "mlp", "by_client": [{"name": f"{file}:plain"}]}
    )
    sent = without_places(asked.to_dict())
    assert sent["net"]["by_client"][0]["name"] == "nets.py:plain"
    found = received_experiment(sent, "the server", [file])
    assert found.net.each[1].name == f"{file}:plain"
    with pytest.raises(ConfigError, match=r"nets\.py"):
        received_experiment(sent, "the server", [])
    file.write_text(CODE + "# another one")
    with pytest.raises(ConfigError, match=r"nets\.py"):
        received_experiment(sent, "the server", [file])
    for damaged in (["x"], [3], [None], {"name": "mlp"}):
        with pytest.raises(ConfigError, match="by_client"):
            received_experiment(
                {**sent, "net": {"name": "mlp", "by_client": damaged}}, "the server", []
            )


# --- by hand --------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    """Return what makes the facts of client 0, whose base is x, and of client 1, whose is 2 x."""
    file = tmp_path / "nets.py"
    file.write_text(CODE)

    def facts_of(method, **training):
        net = {"name": f"{file}:plain", "by_client": [{"name": f"{file}:twice"}]}
        experiment = tiny_experiment(method=method, net=net, training=training)
        return RunFacts(experiment, Problem((2,), 2))

    return facts_of


def trained(run, common):
    """Return what two clients make of the same payload: (1, 0), (3, 0) and (0, 1), (0, 3)."""
    method, found = make(run.experiment.method.name), {}
    for client, x in enumerate(([[1.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [0.0, 3.0]])):
        own = run.of_client(client)
        ctx = ClientContext(
            own, client, START, own.make_net(), OneTask(x, [0, 0]), torch.device("cpu")
        )
        found[client] = train_locally(method, ctx, common, method.init_client(own, client))
    return found


def mean(run, state, results):
    method = make(run.experiment.method.name)
    uploads = {client: result.upload for client, result in results.items()}
    ctx = ServerContext(run, START, tuple(uploads))
    return method.aggregate(ctx, state, as_uploads(method, uploads))


def test_fedproto_by_hand(made):
    """Means (2, 0) and (0, 4), so (1, 2); then ln 2, and a pull of 3 and of 4.5.

    From (1, 0), (3, 0): (0 + 4) / 2 = 2 and (4 + 4) / 2 = 4. From (0, 2), (0, 6): (1 + 0) / 2 and
    (1 + 16) / 2. Nobody moves.
    """
    run = made("fedproto", lr=1e-30)
    state = make("fedproto").init_server(run)
    first = trained(run, state.common)
    sent = [first[c].upload.prototypes["class"].vectors.tolist() for c in (0, 1)]
    assert sent == [[[2.0, 0.0]], [[0.0, 4.0]]]
    after = mean(run, state, first)
    assert after.common.prototypes["class"].vectors.tolist() == [[1.0, 2.0]]
    losses = [trained(run, after.common)[c].loss for c in (0, 1)]
    assert losses == pytest.approx([math.log(2) + 3.0, math.log(2) + 4.5])


def test_lg_fedavg_by_hand(made):
    """Heads begin at 0 and step by 1/2 of the mean embedding, (2, 0) and (0, 4); bases stay.

    So row 0 has (1, 0) and (0, 2), whose mean is (1/2, 1); row 1 has minus that.
    """
    run = made("lg-fedavg", lr=1.0, local_epochs=1)
    state = make("lg-fedavg").init_server(run)
    results = trained(run, state.common)
    after = mean(run, state, results)
    assert after.common.weights["head/weight"].tolist() == [[0.5, 1.0], [-0.5, -1.0]]
    assert after.common.weights.keys() == {"head/weight"}
    sizes = [[*t.shape] for c in (0, 1) for t in results[c].state.weights.values()]
    assert sizes == [[2, 2], [3, 2], [2, 3]]


@pytest.mark.parametrize("method", ["gldp", "fedmlp"])
def test_prototypes_alone_travel_where_a_config_says_so(method):
    run = facts({"name": method, "share": "prototypes"}, OTHER)
    made = make(method, share="prototypes")
    check_own_nets(made, run)
    keys = made.upload_spec(run).required.keys() | made.upload_spec(run).optional.keys()
    assert not [key for key in keys if key.startswith("weights/")]
    assert "global" not in made.views
    kept = made.init_client(run.of_client(1), 1).weights
    assert kept.keys() == run.of_client(1).forms.keys()
    others = {"heads": "round", "eval_upload_head": True, "weighting": "examples"}
    if method == "gldp":
        others |= {"eval_model": "stage_mean"}
    for key, value in others.items():
        with pytest.raises(ConfigError, match=f"share.* and {key}.* exclude each other"):
            make(method, share="prototypes", **{key: value})


@pytest.mark.parametrize(
    ("method", "switches"),
    [
        ("fedproto", {}),
        ("fedtgp", {"server_epochs": 4}),
        ("lg-fedavg", {}),
        ("gldp", {"share": "prototypes", "t": 1, "s": 1}),
        ("fedmlp", {"share": "prototypes"}),
    ],
)
def test_the_conformance_suite_holds_with_two_nets(method, switches):
    check_method(method, tables={"net": {**MLP, "by_client": [OTHER]}}, **switches)
