"""Several models of one server, the Open Inference Protocol (V2), and the description of both."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedcli.predicting.live_model import LiveModel
from fedcli.predicting.predicted_targets import TargetPredictions
from fedcli.runtime.deployed import Deployed
from fedplugins.serving.figures import Figures
from fedplugins.serving.inference_stats import Tally
from fedplugins.serving.model_server import ModelServer
from fedplugins.serving.open_inference import inferred, metadata
from fedplugins.serving.tests.test_serving import facts, put_live, typed

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


def test_numbers_come_with_their_intervals(monkeypatch):
    """Of two numbers that miss by 0.5 and by 2 in nine of ten examples."""
    known = replace(facts(), widths=(0.5, 2.0))
    model = SimpleNamespace(facts=known, class_names=["glucose", "pulse"], targets=object())
    shape = {"name": "intervals", "datatype": "FP32", "shape": [-1, 2, 2]}
    assert metadata("it", model)["outputs"][1] == shape  # type: ignore[arg-type]
    found = TargetPredictions(
        SimpleNamespace(x=np.zeros((1, 2))), model.class_names,  # type: ignore[arg-type]
        np.array([[1.0, 60.0]], np.float32), None, widths=known.widths,
    )  # fmt: skip
    monkeypatch.setattr("fedplugins.serving.open_inference.predicted", lambda *given: found)
    asked = json.dumps({"inputs": [tensor([[1.0, 0.0]], (1, 2))]}).encode()
    values, ends = inferred("it", model, asked, None, Tally()).told["outputs"]  # type: ignore[arg-type]
    assert (values["data"], ends["shape"]) == ([1.0, 60.0], [1, 2, 2])
    assert ends["data"] == [0.5, 1.5, 58.0, 62.0]


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
    ({"inputs": [tensor()], "id": 7.5}, "the id of a request must be a string or an integer"),
    ({"inputs": [tensor()], "id": 2**53}, "the id of a request must be a string or an integer"),
    ({"inputs": [tensor(shape=())]}, "it has 6 numbers, and its shape is []"),
    ({"inputs": [tensor(shape=(-1, 2))]}, "its shape is no list of sizes, such as [1, 2]"),
    ({"inputs": [tensor(shape=(1.5, 4))]}, "its shape is no list of sizes"),
    ({"inputs": [tensor(shape=("3", 2))]}, "its shape is no list of sizes"),
    ({"inputs": [tensor(shape=(2, 2))]}, "it has 6 numbers, and its shape is [2, 2]"),
    ({"inputs": [tensor(shape=(2, 3))]}, "nested as [3, 2], and its shape is [2, 3]"),
    ({"inputs": [tensor([1.0] * 6, (2, 3))]}, "the model takes [2]"),
    ({"inputs": [tensor([1.0, 0.0], [1] * 70 + [2])]}, "its shape is no list of sizes"),
    ({"inputs": [tensor([[float("nan"), 1]], (1, 2))]}, "not finite"),
    ({"inputs": [{"name": "input", "shape": [1, 2], "datatype": "FP32"}]}, "no data in JSON"),
    ({"inputs": [tensor()], "outputs": [{"name": "y"}]}, "outputs are probabilities and class"),
    ({"inputs": [tensor()], "outputs": "class"}, "outputs are probabilities and class"),
    (
        {"inputs": [tensor()], "outputs": [{"name": "class", "parameters": {"classification": 1}}]},
        "classification is not answered",
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


def in_bytes(of: Any, data: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a body of JSON with bytes behind it, and its headers."""
    text = json.dumps(of).encode()
    sent = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": ""}
    return text + data, sent


@pytest.mark.parametrize("kind", ["<f4", "<f8", "<f2", "|i1", "<i2", "|u1", "|b1"])
def test_tensors_travel_as_bytes_where_the_caller_wants_it(served, kind):
    """tritonclient and KServe's client do so unless they are told otherwise, and got 400."""
    x = np.array([[1, 0], [0, 0], [0, 1]]).astype(kind)
    names = {"f": f"FP{8 * x.itemsize}", "i": f"INT{8 * x.itemsize}", "u": "UINT8", "b": "BOOL"}
    head = {"name": "input", "shape": [3, 2], "datatype": names[x.dtype.kind]}
    plain = served("/v2/models/client-0/infer", {"inputs": [tensor(x.astype(float).tolist())]})[1]
    probabilities, classes = (one["data"] for one in plain["outputs"])
    one = {**head, "parameters": {"binary_data_size": x.nbytes}}
    asked = {"id": 7, "inputs": [one], "parameters": {"binary_data_output": True}}
    body, headers = in_bytes(asked, x.tobytes())
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", "/v2/models/client-0/infer", body, headers)
    answer = connection.getresponse()
    sent, size = answer.read(), int(answer.headers["Inference-Header-Content-Length"])
    connection.close()
    assert answer.headers["Content-Type"] == "application/octet-stream"
    told = json.loads(sent[:size])
    assert told["id"] == 7
    first, second = (output["parameters"]["binary_data_size"] for output in told["outputs"])
    assert len(sent) == size + first + second
    shares = np.frombuffer(sent[size : size + first], "<f4")
    assert np.array_equal(shares, np.array(probabilities, np.float32))
    texts, at = [], size + first
    while at < len(sent):
        length = int.from_bytes(sent[at : at + 4], "little")
        texts.append(sent[at + 4 : at + 4 + length].decode())
        at += 4 + length
    assert texts == classes
    asked["outputs"] = [{"name": "class", "parameters": {"binary_data": False}}]
    body, headers = in_bytes(asked, x.tobytes())
    assert served("/v2/models/client-0/infer", body, **headers)[1]["outputs"][0]["data"] == classes


@pytest.mark.parametrize(
    ("size", "data", "more", "line"),
    [
        (16, b"\0" * 8, {}, "not that of the bytes behind"),
        ("8", b"\0" * 8, {}, "not that of the bytes behind"),
        (7, b"\0" * 7, {}, "its 7 bytes are no numbers of FP32"),
        (0, b"", {}, "its 0 bytes are no numbers of FP32"),
        (8, b"\0" * 8, {"data": [1.0, 0.0]}, "of no tensor"),
        (8, b"\0" * 8, {"shape": [2, 2]}, "it has 2 numbers, and its shape is [2, 2]"),
        (8, b"\0\0\xc0\x7f" * 2, {}, "not finite"),
        (2, b"\2\0", {"datatype": "BOOL"}, "is no BOOL"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused_in_one_line(served, size, data, more, line):
    one = {"name": "input", "shape": [1, 2], "datatype": "FP32", **more}
    one["parameters"] = {"binary_data_size": size}
    body, headers = in_bytes({"inputs": [one]}, data)
    status, told = served("/v2/models/client-0/infer", body, **headers)
    assert (status, [*told]) == (400, ["error"])
    assert line in told["error"]


@pytest.mark.parametrize("length", ["-1", "x", "9" * 9, "3", "1" * 5000])
def test_a_length_of_json_that_is_none_is_refused(served, length):
    body = json.dumps({"inputs": [tensor()]}).encode()
    head = {"Inference-Header-Content-Length": length}
    assert served("/v2/models/client-0/infer", body, **head)[0] == 400


def test_configuration_statistics_and_the_index_of_models(served):
    config = served("/v2/models/client-0/config")[1]
    assert (config["name"], config["max_batch_size"]) == ("client-0", 0)
    assert config["input"] == [{"name": "input", "data_type": "TYPE_FP32", "dims": [-1, 2]}]
    assert config["output"][1] == {"name": "class", "data_type": "TYPE_STRING", "dims": [-1]}

    def stats() -> dict[str, Any]:
        (one,) = served("/v2/models/client-1/stats")[1]["model_stats"]
        return dict(one)

    before = stats()
    served("/v2/models/client-1/infer", {"inputs": [tensor()]})
    served("/v2/models/client-1/infer", {"inputs": []})
    after = stats()
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["execution_count"] == before["execution_count"] + 1
    for what in ("success", "fail", "compute_infer"):
        one, two = (x["inference_stats"][what] for x in (before, after))
        assert two["count"] == one["count"] + 1
        assert two["ns"] > one["ns"]
    assert after["last_inference"] > 0
    names = [one["name"] for one in served("/v2/models/stats")[1]["model_stats"]]
    assert names == ["client-0", "client-1"]
    ready = {"name": "client-0", "version": "1", "state": "READY", "reason": ""}
    for asked in ({}, {"ready": True}, b""):
        assert served("/v2/repository/index", asked)[1][0] == ready
    assert served("/v2/repository/index", b"[1")[0] == 400


def test_another_model_or_version_is_refused(served):
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
    assert len({json.dumps(one) for one in paths.values()}) == len(paths) == 25
    for path, methods in paths.items():
        place = path.replace("{model}", "client-0").replace("{version}", "1")
        ((method, about),) = methods.items()
        infers = {"inputs": [tensor()]}
        told = (infers if place.endswith("infer") else ROWS) if method == "post" else None
        told = {} if place.endswith("index") else told
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
    place.current.write_bytes(b"half")  # the previous model continues to answer
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
