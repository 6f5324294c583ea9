"""The Open Inference Protocol over gRPC says what it says over HTTP, and refuses in one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from fedcli.predicting.live_model import LiveModel
from fedcli.runtime.deployed import Deployed
from fedmodels.errors import ConfigError
from fedplugins.serving import grpc_service as service
from fedplugins.serving.grpc_messages import CLASSES, SERVICE
from fedplugins.serving.grpc_service import begin
from fedplugins.serving.model_server import ModelServer
from fedplugins.serving.tests.test_open_inference import ROWS, Served, tensor
from fedplugins.serving.tests.test_serving import put_live

CODE = grpc.StatusCode


class Caller:
    """A client of the protocol that knows nothing but its messages."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def __call__(self, name: str, request: bytes | None = None, /, **fields: Any) -> Any:
        sent = (
            CLASSES[f"{name}Request"](**fields).SerializeToString() if request is None else request
        )
        answer = self._channel.unary_unary(f"/{SERVICE}/{name}")(sent, timeout=60)
        return CLASSES[f"{name}Response"].FromString(answer)

    def refused(
        self, name: str, request: bytes | None = None, /, **fields: Any
    ) -> tuple[CODE, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self(name, request, **fields)
        return caught.value.code(), caught.value.details()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    states = tmp_path_factory.mktemp("states")
    for client, sign in ((0, 1.0), (1, -1.0)):
        put_live(Deployed(states / str(client)), client, sign)
    (states / "2").mkdir()
    found = {f"client-{n}": LiveModel.of(states, n) for n in (0, 1, 2)}  # the last has none yet
    server = ModelServer("127.0.0.1", 0, found)
    end = server.begin("serve-model")
    yield server
    end()


@pytest.fixture(scope="module")
def call(models: ModelServer) -> Iterator[Caller]:
    port, end = begin(models, "127.0.0.1", 0)
    caller = Caller(port)
    yield caller
    caller.close()
    end()
    for thread in threading.enumerate():
        if thread.name.startswith("open-inference"):
            thread.join(30)  # a worker that is idle ends by itself
            assert not thread.is_alive()


def typed_input(kind: str = "FP32", field: str = "fp32_contents", **more: Any) -> dict[str, Any]:
    flat = [x for row in ROWS for x in row]
    given = {"name": "input", "datatype": kind, "shape": [3, 2], "contents": {field: flat}}
    return {**given, **more}


def test_the_messages_are_those_of_the_protocol():
    """By bytes written by hand: tag and value, as the numbers of the public files have them."""
    one = {"name": "x", "shape": [1], "contents": {"bool_contents": [1]}}
    request = CLASSES["ModelInferRequest"](
        model_name="m", id="7", inputs=[one],
        outputs=[{"name": "y"}], raw_input_contents=[b"z"],
    )  # fmt: skip
    tensor_in = b"\x0a\x01x\x1a\x01\x01\x2a\x03\x0a\x01\x01"
    assert request.SerializeToString() == (
        b"\x0a\x01m" b"\x1a\x017" b"\x2a" + bytes([len(tensor_in)]) + tensor_in
        + b"\x32\x03\x0a\x01y" b"\x3a\x01z"
    )  # fmt: skip
    told = CLASSES["ModelInferResponse"](parameters={"run": {"string_param": "r"}})
    assert told.SerializeToString() == b"\x22\x0a\x0a\x03run\x12\x03\x1a\x01r"


def test_what_servers_and_models_say_of_themselves(call, models):
    assert call("ServerLive").live
    assert not call("ServerReady").ready, "a model is not live yet"
    about = call("ServerMetadata")
    assert (about.name, [*about.extensions]) == ("fedtide", ["model_repository(index)"])
    http = Served(models.port)
    told, same = call("ModelMetadata", name="client-0"), http("/v2/models/client-0")[1]
    assert (told.name, [*told.versions], told.platform) == ("client-0", same["versions"], "fedtide")
    for tensors in ("inputs", "outputs"):
        found = [(t.name, t.datatype, [*t.shape]) for t in getattr(told, tensors)]
        assert found == [(t["name"], t["datatype"], t["shape"]) for t in same[tensors]]
    assert call("ModelReady", name="client-0").ready
    assert call("ModelReady", name="client-0", version=told.versions[0]).ready
    assert not call("ModelReady", name="client-0", version="99").ready
    assert not call("ModelReady", name="client-2").ready
    index = call("RepositoryIndex").models
    assert [(m.name, m.state) for m in index] == [
        ("client-0", "READY"), ("client-1", "READY"), ("client-2", "UNAVAILABLE"),
    ]  # fmt: skip
    assert [m.name for m in call("RepositoryIndex", ready=True).models] == ["client-0", "client-1"]


@pytest.mark.parametrize("is_raw", [False, True])
def test_an_inference_is_that_over_http(call, models, is_raw):
    http = Served(models.port)
    for name in ("client-0", "client-1"):
        same = http(f"/v2/models/{name}/infer", {"inputs": [tensor()]})[1]
        shares, classes = (one["data"] for one in same["outputs"])
        given = typed_input()
        more: dict[str, Any] = {}
        if is_raw:
            del given["contents"]
            more["raw_input_contents"] = [np.array(ROWS, "<f4").tobytes()]
        told = call("ModelInfer", model_name=name, id="a-7", inputs=[given], **more)
        assert (told.model_name, told.model_version) == (name, same["model_version"])
        assert told.id == "a-7"
        assert told.parameters["sha256"].string_param == same["parameters"]["sha256"]
        first, second = told.outputs
        assert (first.name, first.datatype, [*first.shape]) == ("probabilities", "FP32", [3, 2])
        assert (second.name, second.datatype, [*second.shape]) == ("class", "BYTES", [3])
        if is_raw:
            raw, texts = told.raw_output_contents
            assert np.array_equal(np.frombuffer(raw, "<f4"), np.array(shares, np.float32))
            words = b"".join(len(c).to_bytes(4, "little") + c.encode() for c in classes)
            assert texts == words
            assert not first.HasField("contents")
        else:
            assert np.array_equal(first.contents.fp32_contents, np.array(shares, np.float32))
            assert [c.decode() for c in second.contents.bytes_contents] == classes
            assert not told.raw_output_contents
    wanted = call(
        "ModelInfer", model_name="client-0", inputs=[typed_input()], outputs=[{"name": "class"}]
    )
    assert [one.name for one in wanted.outputs] == ["class"]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("BOOL", "bool_contents"), ("INT8", "int_contents"), ("INT32", "int_contents"),
        ("INT64", "int64_contents"), ("UINT8", "uint_contents"), ("UINT64", "uint64_contents"),
        ("FP64", "fp64_contents"),
    ],
)  # fmt: skip
def test_values_of_each_datatype_are_taken_from_their_place(call, kind, field):
    of = {"name": "input", "datatype": kind, "shape": [1, 2], "contents": {field: [1, 0]}}
    told = call("ModelInfer", model_name="client-0", inputs=[of], outputs=[{"name": "class"}])
    assert [*told.outputs[0].contents.bytes_contents] == [b"yes"]


WRONG = [
    ({"inputs": []}, CODE.INVALID_ARGUMENT, "with one tensor"),
    ({"inputs": [typed_input(name="x")]}, CODE.INVALID_ARGUMENT, "named 'input'"),
    ({"inputs": [typed_input(shape=[2, 2])]}, CODE.INVALID_ARGUMENT, "its shape is [2, 2]"),
    ({"inputs": [typed_input(shape=[-1, 2])]}, CODE.INVALID_ARGUMENT, "no list of sizes"),
    ({"inputs": [typed_input(datatype="")]}, CODE.INVALID_ARGUMENT, "no datatype"),
    ({"inputs": [typed_input(kind="INT8")]}, CODE.INVALID_ARGUMENT, "they belong in int_contents"),
    ({"inputs": [typed_input(kind="FP16")]}, CODE.INVALID_ARGUMENT, "in raw_input_contents"),
    ({"inputs": [typed_input(contents={})]}, CODE.INVALID_ARGUMENT, "has no data"),
    (
        {"inputs": [typed_input("INT8", contents={"int_contents": [200] * 6})]},
        CODE.INVALID_ARGUMENT, "hold 200, which is no INT8",
    ),
    (
        {"inputs": [typed_input("BYTES", contents={"bytes_contents": [b"1"] * 6})]},
        CODE.INVALID_ARGUMENT, "its datatype is none of",
    ),
    (
        {"inputs": [typed_input(contents={"fp32_contents": [float("nan")] * 6})]},
        CODE.INVALID_ARGUMENT, "not finite",
    ),
    (
        {"inputs": [typed_input()], "raw_input_contents": [b"1"]},
        CODE.INVALID_ARGUMENT, "beside its",
    ),
    (
        {"inputs": [typed_input(contents={})], "raw_input_contents": [b"1", b"2"]},
        CODE.INVALID_ARGUMENT, "raw_input_contents are 2, and the tensors are 1",
    ),
    (
        {"inputs": [typed_input(contents={})], "raw_input_contents": [b"1" * 7]},
        CODE.INVALID_ARGUMENT, "its 7 bytes are no numbers of FP32",
    ),
    (
        {"inputs": [typed_input()], "outputs": [{"name": "y"}]},
        CODE.INVALID_ARGUMENT, "outputs are probabilities and class",
    ),
    ({"inputs": [typed_input()], "model_name": "client-7"}, CODE.NOT_FOUND, "no model 'client-7'"),
    ({"inputs": [typed_input()], "model_version": "9"}, CODE.NOT_FOUND, "version 9 is not live"),
    ({"inputs": [typed_input()], "model_name": "client-2"}, CODE.UNAVAILABLE, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "line"), WRONG, ids=[line for *_, line in WRONG])
def test_a_request_that_does_not_fit_ends_with_a_code_and_a_line(call, fields, code, line):
    found, told = call.refused("ModelInfer", **{"model_name": "client-0", **fields})
    assert (found, "\n" in told) == (code, False)
    assert line in told


def test_other_calls_are_refused_in_a_line_too(call):
    assert call.refused("ModelReady", name="x")[0] == CODE.NOT_FOUND
    assert call.refused("ModelMetadata", name="client-0", version="9")[0] == CODE.NOT_FOUND
    assert call.refused("ModelMetadata", name="client-2")[0] == CODE.UNAVAILABLE
    assert call.refused("RepositoryIndex", repository_name="x")[0] == CODE.INVALID_ARGUMENT
    assert call.refused("ModelInfer", b"\xff\xff") == (
        CODE.INVALID_ARGUMENT, "it is no ModelInferRequest",
    )  # fmt: skip
    assert call.refused("ModelInfer", b"\0" * (17 << 20))[0] == CODE.RESOURCE_EXHAUSTED


def test_a_call_without_a_request_holds_no_thread_and_ends(models, monkeypatch):
    """Each of a hundred silent callers would else keep a place for as long as it likes."""
    monkeypatch.setattr(service, "BODY_S", 1.0)
    port, end = begin(models, "127.0.0.1", 0)
    silent, spoken = threading.Event(), Caller(port)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

        def never() -> Iterator[bytes]:
            silent.wait(60)
            yield from ()

        infer = channel.stream_unary(f"/{SERVICE}/ModelInfer")
        calls = [infer.future(never()) for _ in range(100)]
        assert spoken("ServerLive").live
        assert calls[0].exception().code() == CODE.DEADLINE_EXCEEDED
        silent.set()
        for one in calls:
            one.cancel()
    spoken.close()
    end()


def test_a_port_that_is_taken_is_one_line(models):
    with pytest.raises(ConfigError, match=r"nothing can listen at 127\.0\.0\.1:.* for gRPC"):
        begin(models, "127.0.0.1", models.port)


def test_the_option_serves_both_ways(tmp_path, monkeypatch, capsys):
    from fedcli.cli import main

    put_live(Deployed(tmp_path / "3"), 0)
    asked = []

    def serve(server: ModelServer) -> None:
        printed = capsys.readouterr().out
        port = int(printed.rpartition("--grpc answers at 127.0.0.1:")[2])
        caller = Caller(port)
        asked.append(caller("ModelReady", name="client-3").ready)
        caller.close()
        server._socket.close()

    monkeypatch.setattr(ModelServer, "serve", serve)
    words = ["serve-model", "--run", str(tmp_path), "--client", "3", "--listen", "0", "--grpc"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "0"])
    assert asked == [True]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "0.0.0.0:0"])
    assert "--grpc 0.0.0.0:0 can be reached from other machines" in capsys.readouterr().err
