"""No key of an experiment that crosses the wire names a path, a module or a host at the client."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from fedmodels.config.bounds import HERE, NAMED
from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import tables_in, without_places
from fedmodels.errors import ConfigError
from fedmodels.facts.resolution import received_experiment
from fedmodels.methods import method_class
from fedmodels.methods import names as method_names
from fedmodels.nets import check_net, net_names
from fedmodels.nets.alp import ALP
from fedmodels.tensors.bundle import Problem
from fedmodels.training.asked import reported
from fedmodels.training.hooks import init_client
from fedmodels.training.run import RunFacts
from tests.conftest import gone_keys, method_of, tiny_experiment

PLACES = ("data.root", "net.weights", "net.begin_from", "schedule.availability",
          "schedule.arrivals", "evaluate.reference")  # fmt: skip
NAMES = ("data.name", "net.name", "net.by_client.name", "method.name", "scenario.kind",
         "evaluate.detector")  # fmt: skip
WORDS = {
    **dict.fromkeys(("net.weights_sha256", "net.code_sha256"), "a digest"),
    "net.by_client.code_sha256": "a digest",
    **dict.fromkeys(("method.code_sha256", "schedule.availability_sha256"), "a digest"),
    "evaluate.detector_sha256": "a digest",
    "scenario.code_sha256": "a digest",
    **dict.fromkeys((f"data.columns.{key}" for key in ("label", "client", "split")), "a column"),
    **dict.fromkeys(
        (f"data.columns.{key}" for key in ("session", "group", "time", "file", "task")), "a column"
    ),
    **dict.fromkeys(
        (f"data.columns.{key}" for key in ("delimiter", "encoding", "sheet", "date_formats")),
        "of a file",
    ),
    **dict.fromkeys((f"data.columns.{key}" for key in ("features", "target", "labels")), "columns"),
    **dict.fromkeys(("tracking.name", "tracking.model"), "what a tracker calls it"),
    "data.columns.categories": "columns and texts in their cells",
    "data.columns.missing_values": "cells",
    "training.optimizer_options": "arguments of a class of torch",
    **dict.fromkeys(("data.classes", "data.columns.classes"), "classes"),
    **dict.fromkeys((f"scenario.{key}.show" for key in ("domains", "concepts")), "listed steps"),
    "schedule.participants": "a word and a number",
    "privacy.allow": "of what leaves a client",
}
"""Keys that take any text, which names nothing on a machine."""
SWITCHES = {
    **dict.fromkeys(
        ("FedPer.private", "FedRep.private", "Ifca.common", "LgFedAvg.private"),
        "beginnings of names of tensors",
    ),
    "FedMLPReading.share": "a beginning of names of blocks",
    **dict.fromkeys(("torchvision.model", "timm.model"), "a name of the library's own list"),
    **dict.fromkeys(("torchvision.head", "timm.head"), "a name of a layer"),
    **dict.fromkeys(("torchvision.frozen", "timm.frozen"), "beginnings of names of tensors"),
    **dict.fromkeys(("cnn5.norm", "digits_cnn.norm", "vit_tiny.pool", "hart.lite_conv"), "a word"),
    **dict.fromkeys(("torchvision.adapter_a", "timm.adapter_a"), "a word"),
    **dict.fromkeys(("hart.alignment", "vit_tiny.alignment"), "options of ALP"),
    **dict.fromkeys((f"ALP.{key}" for key in ("sets", "match", "solver", "topk")), "a word"),
    **dict.fromkeys(("ALP.ema_features", "ALP.ema_weights", "ALP.update", "ALP.last"), "a word"),
}
"""The same of hyper-parameters and of options of nets."""


def fields(model: type[BaseModel] = Experiment, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key that a config may have, with what checks it."""
    for name, field in model.model_fields.items():
        tables = tables_in(field.annotation)
        if not tables:
            yield path + name, field
        for table in tables:
            yield from fields(table, f"{path}{name}.")


def parts(annotation: Any) -> list[Any]:
    """Return a type and all types within it; the values of a Literal are none."""
    if get_origin(annotation) is Literal:
        return []
    return [annotation, *(each for arg in get_args(annotation) for each in parts(arg))]


def takes_any_text(annotation: Any) -> bool:
    return any(kind in (str, object, Any, Path, bytes) for kind in parts(annotation))


def test_every_key_that_takes_text_is_a_place_a_name_or_a_known_word():
    """A new key that takes text has to say here what it is."""
    found = {key: field for key, field in fields() if takes_any_text(field.annotation)}
    marks = {key: set(field.metadata) & {HERE, NAMED} for key, field in found.items()}
    assert {key for key, mark in marks.items() if HERE in mark} == {*PLACES}
    assert {key for key, mark in marks.items() if NAMED in mark} == {*NAMES} - gone_keys()
    assert {key for key, mark in marks.items() if not mark} == WORDS.keys() - gone_keys()


def test_no_hyper_parameter_takes_any_text():
    def check(table: Any) -> None:
        hints = get_type_hints(table)
        for field in dataclasses.fields(table):
            for kind in filter(dataclasses.is_dataclass, parts(hints[field.name])):
                check(kind)
            key = f"{table.__name__}.{field.name}"
            assert not takes_any_text(hints[field.name]) or key in SWITCHES, key

    for name in method_names():
        check(method_class(name))


def test_no_option_of_a_net_takes_any_text():
    builders = [(build, build) for build in (check_net(name, ()) for name in net_names())]
    for build, function in [*builders, (ALP, ALP.__init__)]:
        hints = get_type_hints(function)
        for option in [*inspect.signature(build).parameters]:
            key = f"{build.__name__}.{option}"
            assert not takes_any_text(hints[option]) or key in SWITCHES, key


def tables_with(value: str) -> dict[str, Any]:
    """Return the tables of an experiment with private parts, in which each place is the value."""
    tables = tiny_experiment(method="fedrep").to_dict()
    for key in PLACES:
        table, name = key.split(".")
        tables.setdefault(table, {})[name] = value
    tables["data"]["columns"] = {"label": "y"}
    return tables


def test_what_is_sent_has_no_place_and_all_the_rest():
    tables = tables_with("/at/somebody/secret")
    tables["net"] |= {"name": "/at/somebody/nets.py:Net", "width": 8}
    sent = without_places(tables)
    assert "somebody" not in repr(sent)
    assert sent["net"]["name"] == "nets.py:Net"
    for key in PLACES:
        table, name = key.split(".")
        del tables[table][name]
    tables["net"]["name"] = "nets.py:Net"
    assert sent == tables


@pytest.mark.parametrize("tables", [{"net": 3}, {"net": {"name": 3}}, {"data": None}, {"x": {}}])
def test_tables_of_anybody_are_taken_as_they_are(tables):
    assert without_places(tables) == tables


OPENED: list[str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if OPENED is not None and event in ("open", "os.listdir", "os.scandir"):
        OPENED.append(str(arguments[0]))


sys.addaudithook(_hear)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Return what is opened meanwhile."""
    global OPENED
    OPENED = []
    yield OPENED
    OPENED = None


def test_a_client_opens_nothing_that_a_server_names(opened, tmp_path):
    """Of the initial weights it says that it wants them, and takes the user's own file alone."""
    secret = tmp_path / "secret"
    secret.write_text("what stays here")
    opened.clear()
    tables = tables_with(str(secret)) | {"tracking": {"mlflow": False}}
    tables["data"]["name"] = f"{secret}.py:load"
    tables["net"]["weights_sha256"] = "0" * 64
    experiment = received_experiment(tables, "the server's experiment", ())
    run = RunFacts(experiment, Problem((1, 8, 8), 10))
    method = method_of(experiment)
    method.payload_spec(run)
    method.upload_spec(run)
    with pytest.raises(ConfigError, match=r"join with --weights FILE, where FILE is your copy"):
        init_client(method, run, 0)
    assert str(secret) not in opened
    own = tmp_path / "own"
    own.write_text("mine")
    again = received_experiment(tables, "the server's experiment", (), [own])
    with pytest.raises(ConfigError, match="join with --weights FILE") as caught:
        init_client(method, RunFacts(again, run.problem), 0)
    assert "own" in "".join(opened)
    assert "sha256 0000" in str(caught.value), "no digest of a file that is here"


def test_what_travels_is_known_without_the_initial_weights():
    """So a relay, and a client whose weights all come from the server, need no file of them."""
    for name in method_names():
        experiment = tiny_experiment(method=name, net=NETS.get(name, "mlp"))
        net = experiment.net.model_copy(update={"weights_sha256": "0"})
        method, run = method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10))
        lacking = RunFacts(experiment.model_copy(update={"net": net}), run.problem)
        wanted, found = (
            (*method.payload_spec(r), method.upload_spec(r), reported(method, r))
            for r in (run, lacking)
        )
        assert found == wanted, name


NETS: dict[str, Any] = {
    "fedali": {"name": "vit-tiny", "alp": True},
    "fedbn": {"name": "digits-cnn", "norm": "batch"},
    "pilora": {"name": "mlp", "adapters": 8},
}


def test_code_that_a_file_only_imports_is_not_to_be_named(tmp_path):
    """A function with any options, such as torch.load, would open what the server names."""
    file = tmp_path / "mine.py"
    text = (
        "from torch import load\nfrom fedmodels.nets.mlp import mlp\n__all__ = ['mlp']\n"
        "def net(*, num_classes, input_shape):\n    return mlp(num_classes, input_shape)\n"
    )
    file.write_text(text)
    from fedmodels.host.files import sha256_of

    def receive(inside: str) -> Experiment:
        net = {"name": f"mine.py:{inside}", "code_sha256": sha256_of(file)}
        return received_experiment(
            {**tiny_experiment().to_dict(), "net": net}, "the server's experiment", [file]
        )

    for offered in ("net", "mlp"):
        assert receive(offered).net.name == f"{file.resolve()}:{offered}"
    with pytest.raises(ConfigError, match=r"mine\.py only imports 'load'"):
        receive("load")
