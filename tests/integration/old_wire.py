"""A way to a coordinator that speaks the schema of an earlier release, whoever is at its ends.

What that schema does not have is lost on the way, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from fedpb import SERVICE

SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class OldWire(grpc.GenericRpcHandler):
    """Passes all calls on, message by message."""

    def __init__(self, schema: Path, port: int, change: Callable[[str, bytes], bytes]) -> None:
        """Listen at ``self.port`` for calls to a coordinator's port.

        Args:
            schema: the descriptors of the release.
            port: of the coordinator, at loopback.
            change: makes of a method's name and an answer what the client gets.
        """
        pool = DescriptorPool()
        for file in FileDescriptorSet.FromString(schema.read_bytes()).file:
            pool.Add(file)
        methods = pool.FindServiceByName(SERVICE).methods
        self.methods = {f"/{SERVICE}/{method.name}": method for method in methods}
        self.change, self.passed = change, set[str]()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", SIZES)
        self.server = grpc.server(ThreadPoolExecutor(32), [self], options=SIZES)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        """Return who passes a call on: on the wire, each is a call with streams."""
        if details.method not in self.methods:
            return None
        return grpc.stream_stream_rpc_method_handler(
            lambda asked, context: self._pass_on(details.method, asked, context)
        )

    def _pass_on(self, name: str, asked: Iterator[bytes], context: Any) -> Iterator[bytes]:
        method = self.methods[name]
        self.passed.add(method.name)
        sent = (_known(method.input_type, message) for message in asked)
        answers = self.channel.stream_stream(name)(sent)
        context.add_callback(answers.cancel)
        try:
            for message in answers:
                yield self.change(method.name, _known(method.output_type, message))
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())  # type: ignore[attr-defined]
            context.abort(error.code(), error.details())  # type: ignore[attr-defined]

    def close(self) -> None:
        """End all calls."""
        self.server.stop(None).wait()
        self.channel.close()


def _known(kind: Any, message: bytes) -> bytes:
    """Return a message without the fields that a schema does not have."""
    read = GetMessageClass(kind).FromString(message)
    read.DiscardUnknownFields()
    return read.SerializeToString()
