"""Several models of one server, the Open Inference Protocol (V2), and the description of both."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcli.runtime.deployed import Deployed
from fedcli.serving.figures import Figures
from fedcli.serving.live_model import LiveModel
from fedcli.serving.model_server import ModelServer
from fedcli.serving.open_inference import metadata
from tests.fedcli.test_serving import facts, put_live, typed

ROUND = 'fedtide_live_model_round{model="client-3"} '
ROWS = [[1.0, 0.0], [-1.0, 0.0], [0.5, 2.0]]


class Served:
    """A server of two clients' models that say the opposite of each other."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, path: str, told: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            body = told if told is None or isinstance(told, bytes) else json.dumps(told).encode()
            headers = {"Content-Type": "application/json", **headers}
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, text if path == "/metrics" else json.loads(text)
        finally:
            connection.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    states = tmp_path_factory.mktemp("served")
    for client, sign in ((0, 1.0), (1, -1.0)):
        put_live(Deployed(states / str(client)), client, sign)
    models = {f"client-{n}": LiveModel.of(states, n) for n in (0, 1)}
    server = ModelServer("127.0.0.1", 0, models)
    end = server.begin("serve-model")
    yield Served(server.port)
    end()


def tensor(data: Any = ROWS, shape: Any = (3, 2), **more: Any) -> dict[str, Any]:
    return {"name": "input", "shape": [*shape], "datatype": "FP32", "data": data, **more}


def test_an_inference_is_a_prediction_in_the_protocols_form(served):
    for name, classes in (("client-0", ["yes", "no", "yes"]), ("client-1", ["no", "yes", "no"])):
        _, plain = served(f"/models/{name}/predict", ROWS)
        status, found = served(f"/v2/models/{name}/infer", {"id": "x", "inputs": [tensor()]})
        assert status == 200
        probabilities, named = found.pop("outputs")
        assert named == {"name": "class", "datatype": "BYTES", "shape": [3], "data": classes}
        each = [one["probabilities"] for one in plain["predictions"]]
        assert probabilities["data"] == [share for row in each for share in row]
        assert (probabilities["shape"], probabilities["datatype"]) == ([3, 2], "FP32")
        version = str(plain["model"]["round"])
        by = {key: plain["model"][key] for key in ("sha256", "run")}
        about = {"model_name": name, "model_version": version, "id": "x", "parameters": by}
        assert found == about
        flat = tensor([x for row in ROWS for x in row], datatype="FP64")
        wanted = {"inputs": [flat], "outputs": [{"name": "class"}]}
        _, same = served(f"/v2/models/{name}/versions/{version}/infer", wanted)
        assert same["outputs"] == [named]
        whole = {"inputs": [tensor([[1, 0], [-1, 0], [127, 2]], datatype="INT8")]}
        assert served(f"/v2/models/{name}/infer", whole)[1]["outputs"][1]["data"] == classes
        bits = {"inputs": [tensor([[True, False]], (1, 2), datatype="BOOL")]}
        assert served(f"/v2/models/{name}/infer", bits)[0] == 200
        assert served(f"/v2/models/{name}/ready") == (200, {"name": name, "ready": True})


def test_what_the_protocol_tells_of_servers_and_models(served):
    assert served("/v2/models/client-1")[1] == {
        "name": "client-1", "versions": ["2"], "platform": "fedtide", "classes": ["no", "yes"],
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "class", "datatype": "BYTES", "shape": [-1]},
        ],
    }  # fmt: skip
    assert served("/v2/health/live")[0] == served("/v2")[0] == 200
    ready = (200, {"ready": True, "models": ["client-0", "client-1"]})
    assert served("/v2/health/ready") == served("/health") == ready
    of_targets = SimpleNamespace(facts=facts(), class_names=["glucose"], targets=object())
    told = metadata("it", of_targets)  # type: ignore[arg-type]
    assert told["outputs"] == [{"name": "values", "datatype": "FP32", "shape": [-1, 1]}]


REFUSED: list[tuple[Any, str]] = [
    (b"nonsense", "with one tensor"),
    ({"inputs": ROWS}, "with one tensor"),
    ({"inputs": [tensor(), tensor()]}, "with one tensor"),
    ({"inputs": [tensor(name="x")]}, "named 'input'"),
    ({"inputs": [tensor(datatype="BYTES")]}, "its datatype is none of BOOL, UINT8"),
    ({"inputs": [{**tensor(), "data": 3}]}, "no JSON array of numbers"),
    ({"inputs": [tensor(["a"], (1,))]}, "no JSON array of numbers"),
    ({"inputs": [tensor([["1", 0.0]], (1, 2))]}, "no JSON array of numbers"),
    ({"inputs": [tensor([[True, 0.0]], (1, 2))]}, "true or false, which is no FP32"),
    ({"inputs": [tensor([[1, False]], (1, 2), datatype="INT8")]}, "which is no INT8"),
    ({"inputs": [tensor()], "id": 7}, "the id of a request is a text"),
    ({"inputs": [tensor(shape=())]}, "it has 6 numbers, and its shape is []"),
    ({"inputs": [tensor(shape=(-1, 2))]}, "its shape is no list of sizes, such as [1, 2]"),
    ({"inputs": [tensor(shape=(1.5, 4))]}, "its shape is no list of sizes"),
    ({"inputs": [tensor(shape=("3", 2))]}, "its shape is no list of sizes"),
    ({"inputs": [tensor(shape=(2, 2))]}, "it has 6 numbers, and its shape is [2, 2]"),
    ({"inputs": [tensor(shape=(2, 3))]}, "nested as [3, 2], and its shape is [2, 3]"),
    ({"inputs": [tensor([1.0] * 6, (2, 3))]}, "the model takes [2]"),
    ({"inputs": [tensor([1.0, 0.0], [1] * 70 + [2])]}, "its shape is no list of sizes"),
    ({"inputs": [tensor([[float("nan"), 1]], (1, 2))]}, "not finite"),
    ({"inputs": [{"name": "input", "shape": [1, 2], "datatype": "FP32"}]}, "binary_data=False"),
    ({"inputs": [tensor()], "outputs": [{"name": "y"}]}, "outputs are probabilities and class"),
    ({"inputs": [tensor()], "outputs": "class"}, "outputs are probabilities and class"),
    (
        {"inputs": [tensor()], "outputs": [{"name": "class", "parameters": {"binary_data": True}}]},
        "neither binary_data nor classification",
    ),
    *(
        ({"inputs": [tensor(datatype=kind, data=[[value, 0.0]], shape=(1, 2))]}, f"is no {kind}")
        for kind, value in (
            ("BOOL", 2),
            ("UINT8", 256),
            ("INT8", -129),
            ("INT32", 1.5),
            ("UINT64", -1),
            ("FP16", 65505),
            ("FP32", 1e39),
            ("INT64", float("nan")),
            ("INT16", float("inf")),
        )
    ),
    (b"[" + b"0," * (1 << 18) + b"0]", "send it in parts"),
]


@pytest.mark.parametrize(("told", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_a_request_that_does_not_fit_is_told_why_in_one_line(served, told, line):
    status, found = served("/v2/models/client-0/infer", told)
    assert (status, [*found]) == (400, ["error"])
    assert line in found["error"]


def test_a_binary_request_and_another_model_or_version_are_refused(served):
    head = {"Inference-Header-Content-Length": "20"}
    assert "binary_data=False" in served("/v2/models/client-0/infer", b"{}", **head)[1]["error"]
    several = "there are several models: ask at /models/NAME/…, NAME one of client-0, client-1"
    for path, line in (
        ("/v2/models/7", "there is no model '7'; there are client-0, client-1"),
        ("/v2/models/client-0/versions/7/ready", "version 7 is not live: 1 is"),
        ("/schema", several),
    ):
        assert served(path) == (404, {"error": line})
    assert served("/predict", ROWS) == (404, {"error": several})
    assert served("/health/")[0] == served("/models/client-0/predict/", ROWS)[0] == 404
    request = {"inputs": [tensor()]}
    assert served("/v2/models/client-0/versions/7/infer", request)[0] == 404


def test_the_description_has_every_path_and_each_of_them_answers(served):
    paths = served("/openapi.json")[1]["paths"]
    assert len({json.dumps(one) for one in paths.values()}) == len(paths) == 19
    for path, methods in paths.items():
        place = path.replace("{model}", "client-0").replace("{version}", "1")
        ((method, about),) = methods.items()
        infers = {"inputs": [tensor()]}
        told = (infers if place.endswith("infer") else ROWS) if method == "post" else None
        status, _ = served(place, told)
        several = path in ("/predict", "/schema")  # of two models
        none = several or "feedback" in path  # they take no labels back
        assert status == (404 if none else 501 if status == 501 else 200)
        assert str(status) in about["responses"]


def test_a_scrape_reads_no_model(tmp_path):
    pytest.importorskip("prometheus_client")
    place, models = Deployed(tmp_path / "3"), dict[str, LiveModel]()
    place.folder.parent.mkdir()
    models["client-3"] = live = LiveModel.of(tmp_path, 3)
    figures = Figures()

    def round_told() -> str:
        page = figures.page("", models, {})
        assert page is not None
        (line,) = (x for x in page.body.decode().splitlines() if x.startswith(ROUND))
        return line.removeprefix(ROUND)

    assert round_told() == "0.0"
    for number in (4, 5):
        put_live(place, number)
        assert [round_told(), round_told()] == [f"{number + 1}.0"] * 2
    assert live.reads == 0
    assert live.now().model.facts.round == 5
    place.current.write_bytes(b"half")  # the model before goes on to answer
    assert round_told() == "6.0"


def test_a_method_that_a_path_does_not_have_is_told_which_it_has(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    for method, path, allowed in (
        ("GET", "/v2/models/client-0/infer", "POST"),
        ("PUT", "/v2", "GET"),
    ):
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status == 405
        assert allowed in answer.headers["Allow"].split(", ")
        answer.read()
    connection.close()


def test_a_command_serves_the_models_of_several_clients(tmp_path, monkeypatch, capsys):
    for client in (3, 4):
        put_live(Deployed(tmp_path / str(client)), 0)
    served = list[tuple[str, ...]]()

    def serve(server: ModelServer) -> None:
        served.append((*server.models,))
        server._socket.close()

    monkeypatch.setattr(ModelServer, "serve", serve)
    words = "serve-model", "--run", tmp_path, "--listen", "0", "--client"
    assert typed(*words, "3-4") == typed(*words, "3") == 0
    assert served == [("client-3", "client-4"), ("client-3",)]
    told = capsys.readouterr().out
    assert "/models/NAME/predict" in told
    assert "NAME is one of client-3, client-4" in told
    assert typed("serve-model", "--model", Path("my model.safetensors"), "--listen", "0") == 0
    assert served[2] == ("my-model",)
    for wrong in ("4-3", "0-1000", "x"):
        assert typed(*words, wrong) == 2
        assert "no id, and no range" in capsys.readouterr().err
