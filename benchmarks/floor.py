"""The floor of a round: bare gRPC between long-lived processes, and nothing else.

One blocking Pull per client, frames of 1 MiB as raw bytes, a broadcast shared by all, numpy's mean;
no validation, no persistence, no metrics. What fedtide takes longer is what it does beside.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fedpb.heap import keep_large_blocks

FRAME = 1 << 20
DIGITS = 5
"""Of a port, as children read it from their common pipe."""


def floor_seconds(clients: int, parameters: int, rounds: int) -> list[float]:
    """Return the seconds of each round with so many forked clients and float32 parameters."""
    listening, address = os.pipe()
    children = []
    for _ in range(clients):
        pid = os.fork()
        if pid == 0:
            os.close(address)
            _client(os.read(listening, DIGITS).decode(), rounds)
            os._exit(0)
        children.append(pid)
    os.close(listening)
    server = _Server(clients, parameters)
    port = server.start()
    os.write(address, f"{port:0{DIGITS}d}".encode() * clients)
    os.close(address)
    seconds = server.run(rounds)
    for pid in children:
        os.waitpid(pid, 0)
    server.stop()
    return seconds


class _Server:
    def __init__(self, clients: int, parameters: int) -> None:
        self.clients = clients
        self.weights = np.zeros(parameters, np.float32)
        self.uploads = [np.empty(parameters, np.float32) for _ in range(clients)]
        self.frames: list[bytes] = []
        self.round, self.arrived = -1, 0
        self.changed = threading.Condition()

    def start(self) -> int:
        import grpc

        self.server = grpc.server(ThreadPoolExecutor(2 * self.clients + 8))
        handlers = {
            "Pull": grpc.unary_stream_rpc_method_handler(self.pull),
            "Push": grpc.stream_unary_rpc_method_handler(self.push),
        }
        generic = grpc.method_handlers_generic_handler("floor", handlers)
        self.server.add_generic_rpc_handlers((generic,))
        port: int = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        return port

    def stop(self) -> None:
        self.server.stop(1).wait()

    def pull(self, request: bytes, context: Any) -> Iterator[bytes]:
        wanted = int(request)
        with self.changed:
            self.changed.wait_for(lambda: self.round >= wanted)
        yield from self.frames

    def push(self, stream: Iterator[bytes], context: Any) -> bytes:
        with self.changed:
            buffer = memoryview(self.uploads[self.arrived % self.clients]).cast("B")
            self.arrived += 1
        at = 0
        for frame in stream:
            buffer[at : at + len(frame)] = frame
            at += len(frame)
        with self.changed:
            self.finished += 1
            self.changed.notify_all()
        return b""

    def run(self, rounds: int) -> list[float]:
        seconds = []
        for number in range(rounds):
            begun = time.perf_counter()
            payload = memoryview(self.weights).cast("B")
            frames = [bytes(payload[i : i + FRAME]) for i in range(0, len(payload), FRAME)]
            with self.changed:
                self.frames, self.round = frames, number
                self.arrived = self.finished = 0
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.finished == self.clients)
            total = self.uploads[0].copy()
            for upload in self.uploads[1:]:
                total += upload
            total /= self.clients
            self.weights = total
            seconds.append(time.perf_counter() - begun)
        return seconds


def _client(port: str, rounds: int) -> None:
    import grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{int(port)}")
    pull, push = channel.unary_stream("/floor/Pull"), channel.stream_unary("/floor/Push")
    for number in range(rounds):
        frames = list(pull(str(number).encode(), wait_for_ready=True))
        push(iter(frames))
    channel.close()


if __name__ == "__main__":
    keep_large_blocks()
    print(json.dumps(floor_seconds(*map(int, sys.argv[1:]))))
