"""The calls of the Open Inference Protocol over gRPC.

A call costs no thread until its request is whole, which has as much time and as many bytes as one
over HTTP; what it says is then answered as over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError, FedtideError
from fedmodels.host.machine import cores
from fedmodels.times import BODY_S, LAST_ANSWERS_S
from fedplugins.serving.grpc_messages import CLASSES, SERVICE
from fedplugins.serving.grpc_tensors import answer_of, body_of
from fedplugins.serving.model_server import MAX_BODY, MAX_WAITING, MAX_WORKERS, ModelServer, Told
from fedplugins.serving.open_inference import metadata, version_of
from fedplugins.serving.services import Ending

CODES: Mapping[HTTPStatus, grpc.StatusCode] = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
"""How a call ends where HTTP would refuse; in any other case of a fault it is INTERNAL."""
EXTENSIONS = ("model_repository(index)",)
HEAD = 64 << 10
"""Bytes of a message beside its tensors."""
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_BODY + HEAD),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", MAX_WAITING),
)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
log = logging.getLogger(__name__)


class Refused(Exception):
    """A call that ends with a code, and a line that says why."""

    def __init__(self, code: grpc.StatusCode, line: str) -> None:
        super().__init__(line)
        self.code = code


class InferenceCalls:
    """What each call answers, by the models of a server; it may take long."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def answers(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return what answers each call, by its name."""
        return {
            "ServerLive": lambda request: CLASSES["ServerLiveResponse"](live=True),
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._index,
        }

    def _server_ready(self, request: Any) -> Any:
        ready = all(map(self._is_ready, self._server.models))
        return CLASSES["ServerReadyResponse"](ready=ready)

    def _server_metadata(self, request: Any) -> Any:
        return CLASSES["ServerMetadataResponse"](
            name="fedtide", version=version("fedtide"), extensions=EXTENSIONS
        )

    def _model_ready(self, request: Any) -> Any:
        self._check_known(request.name)
        ready = self._is_ready(request.name, request.version)
        return CLASSES["ModelReadyResponse"](ready=ready)

    def _is_ready(self, name: str, of_version: str = "") -> bool:
        try:
            live = version_of(self._server.models[name].now().model)
        except FedtideError:
            return False
        return of_version in ("", live)

    def _model_metadata(self, request: Any) -> Any:
        self._check_known(request.name)
        try:
            model = self._server.models[request.name].now().model
        except FedtideError as error:  # there is none yet
            raise Refused(grpc.StatusCode.UNAVAILABLE, printable(str(error))) from None
        if request.version not in ("", live := version_of(model)):
            line = f"version {printable(request.version, 60)} is not live: {live} is"
            raise Refused(grpc.StatusCode.NOT_FOUND, line)
        told = metadata(request.name, model)
        told.pop("classes")  # the message has no place for them
        return CLASSES["ModelMetadataResponse"](**told)

    def _model_infer(self, request: Any) -> Any:
        self._check_known(request.model_name)
        body, json_bytes = body_of(request)
        found = self._server.infer(
            request.model_name, request.model_version or None, body, json_bytes
        )
        if found.status != HTTPStatus.OK:
            line = json.loads(found.body)["error"]
            raise Refused(CODES.get(found.status, grpc.StatusCode.INTERNAL), line)
        return answer_of(found.body, found.json_bytes if isinstance(found, Told) else None)

    def _index(self, request: Any) -> Any:
        if request.repository_name:
            line = "the models are of one repository, which has no name: leave it out"
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, line)
        known = self._server.index()
        models = [one for one in known if one["state"] == "READY" or not request.ready]
        return CLASSES["RepositoryIndexResponse"](models=models)

    def _check_known(self, name: str) -> None:
        if name not in self._server.models:
            known = ", ".join([*self._server.models][:8])
            line = f"there is no model {printable(name, 60)!r}; there are {known}"
            raise Refused(grpc.StatusCode.NOT_FOUND, line)


def begin(server: ModelServer, host: str, port: int) -> tuple[int, Ending]:
    """Answer at a place, on port 0 at any that is free; return the port, and what ends that.

    Raises:
        ConfigError: the place cannot be used.
    """
    bound: Future[tuple[int, Callable[[], None]]] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(server, host, port, bound)), name="open-inference"
    )
    thread.start()
    try:
        found, stop = bound.result()
    except ConfigError:
        thread.join()
        raise

    def end() -> None:
        stop()
        thread.join()

    return found, end


async def _serve(
    models: ModelServer, host: str, port: int, bound: Future[tuple[int, Callable[[], None]]]
) -> None:
    """Serve until told to stop; tell the port and what stops it, or why it cannot be bound."""
    workers = min(cores(), MAX_WORKERS)
    pool = ThreadPoolExecutor(workers, "open-inference")
    server = grpc.aio.server(maximum_concurrent_rpcs=workers + MAX_WAITING, options=OPTIONS)
    handlers = {
        name: grpc.stream_unary_rpc_method_handler(_handled(pool, CLASSES[f"{name}Request"], call))
        for name, call in InferenceCalls(models).answers().items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    shown = f"[{host}]" if ":" in host else host
    try:
        found = server.add_insecure_port(f"{shown}:{port}")
    except RuntimeError:
        found = 0
    if not found:
        line = f"nothing can listen at {shown}:{port} for gRPC: give another port"
        bound.set_exception(ConfigError(line))
        return
    await server.start()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    bound.set_result((found, lambda: loop.call_soon_threadsafe(ended.set)))  # type: ignore[arg-type]
    await ended.wait()
    await server.stop(LAST_ANSWERS_S)
    pool.shutdown(wait=False, cancel_futures=True)


def _handled(pool: ThreadPoolExecutor, kind: Any, call: Callable[[Any], Any]) -> Any:
    """Return the handler of a call: it waits for the one request, and has a worker answer it."""

    def answered(data: bytes) -> bytes:
        return bytes(call(kind.FromString(data)).SerializeToString())

    async def handle(requests: AsyncIterator[bytes], context: Context) -> bytes:
        code, line = grpc.StatusCode.INTERNAL, "the model cannot answer this"
        try:
            data = await asyncio.wait_for(anext(requests), BODY_S)
            return await asyncio.get_running_loop().run_in_executor(pool, answered, data)
        except TimeoutError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            line = f"the request did not come within {BODY_S:.0f} seconds"
        except StopAsyncIteration:
            code, line = grpc.StatusCode.INVALID_ARGUMENT, "no request came"
        except DecodeError:
            code, line = grpc.StatusCode.INVALID_ARGUMENT, f"it is no {kind.DESCRIPTOR.name}"
        except Refused as error:
            code, line = error.code, str(error)
        except DataError as error:
            code, line = grpc.StatusCode.INVALID_ARGUMENT, printable(str(error))
        except Exception:  # a caller sees no traceback, and others are answered
            log.exception("a call failed")
        await context.abort(code, line)
        raise AssertionError("abort raises")

    return handle
