"""The floor of a round: bare gRPC between long-lived processes, and nothing else.

One blocking Pull per client, frames of 1 MiB as raw bytes, a broadcast shared by all, numpy's mean;
no validation, no persistence, no metrics. What fedtide takes longer is what it does beside.

With duties, the floor does that work too, in the fewest lines: weights go into a net (here one
array) and out of it, frames have checksums that both ends compute, what arrives is searched for
NaN, the mean is taken in float64, and each round ends with its state and a row in files.

Clients have a process each, or share some as those of a host do: a process pulls once for all of
its clients, and works for one while the upload of the one before is under way.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
from zlib_ng import zlib_ng

from fedmodels.host.machine import keep_large_blocks

FRAME = 1 << 20
DIGITS = 5
"""Of a port, as children read it from their common pipe."""
LEFT_OUT = 2
"""First rounds, which are not measured."""


def floor(
    clients: int, parameters: int, rounds: int, hosts: int, *, duties: bool = False
) -> dict[str, Any]:
    """Run rounds with so many clients in so many forked processes.

    Weights have that number of float32 parameters.

    Returns:
        The seconds of each round but the first ones, and a round's CPU seconds of the server and
        of the clients.
    """
    listening, address = os.pipe()
    children = []
    for host in range(hosts):
        pid = os.fork()
        if pid == 0:
            os.close(address)
            port, own = os.read(listening, DIGITS).decode(), len(range(host, clients, hosts))
            _host(port, own, rounds, parameters if duties else 0)
            os._exit(0)
        children.append(pid)
    os.close(listening)
    server = _Server(clients, parameters, duties)
    port = server.start()
    os.write(address, f"{port:0{DIGITS}d}".encode() * hosts)
    os.close(address)
    server.run(LEFT_OUT)
    before = _cpu_s(os.getpid()), sum(map(_cpu_s, children))
    seconds = server.run(rounds - LEFT_OUT)
    after = _cpu_s(os.getpid()), sum(map(_cpu_s, children))
    for pid in children:
        os.waitpid(pid, 0)
    server.stop()
    spent = [(now - then) / len(seconds) for then, now in zip(before, after, strict=True)]
    return {"seconds": seconds, "server_cpu_s": spent[0], "hosts_cpu_s": spent[1]}


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


class _Server:
    def __init__(self, clients: int, parameters: int, duties: bool) -> None:
        self.clients, self.duties = clients, duties
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
            upload = self.uploads[self.arrived % self.clients]
            self.arrived += 1
        buffer, at = memoryview(upload).cast("B"), 0
        for frame in stream:
            if self.duties:
                zlib_ng.crc32(frame)
            buffer[at : at + len(frame)] = frame
            at += len(frame)
        if self.duties and not np.isfinite(np.dot(upload, upload)):
            raise ValueError("NaN")
        with self.changed:
            self.finished += 1
            self.changed.notify_all()
        return b""

    def run(self, rounds: int) -> list[float]:
        seconds = []
        for number in range(self.round + 1, self.round + 1 + rounds):
            begun = time.perf_counter()
            frames = _frames(self.weights, self.duties)
            with self.changed:
                self.frames, self.round = frames, number
                self.arrived = self.finished = 0
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.finished == self.clients)
            total = self.uploads[0].astype(np.float64 if self.duties else np.float32)
            for upload in self.uploads[1:]:
                total += upload
            total /= self.clients
            self.weights = total.astype(np.float32, copy=False)
            if self.duties:
                self.commit(number)
            seconds.append(time.perf_counter() - begun)
        return seconds

    def commit(self, number: int) -> None:
        if number == 0:
            self.place = tempfile.TemporaryDirectory()
            self.db = sqlite3.connect(f"{self.place.name}/run.db", isolation_level=None)
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=NORMAL")
            self.db.execute("CREATE TABLE rounds (number INTEGER, record TEXT)")
        self.weights.tofile(f"{self.place.name}/.new")
        os.replace(f"{self.place.name}/.new", f"{self.place.name}/state-{number}")
        self.db.execute("INSERT INTO rounds VALUES (?, ?)", (number, json.dumps({"n": number})))
        if number:
            os.unlink(f"{self.place.name}/state-{number - 1}")


def _frames(weights: np.ndarray[Any, Any], duties: bool) -> list[bytes]:
    payload = memoryview(weights).cast("B")
    frames = [bytes(payload[i : i + FRAME]) for i in range(0, len(payload), FRAME)]
    if duties:
        for frame in frames:
            zlib_ng.crc32(frame)
    return frames


def _host(port: str, clients: int, rounds: int, parameters: int) -> None:
    import grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{int(port)}")
    pull, push = channel.unary_stream("/floor/Pull"), channel.stream_unary("/floor/Push")
    net = np.zeros(parameters, np.float32)  # empty without duties
    with ThreadPoolExecutor(1) as pool:
        for number in range(rounds):
            frames = list(pull(str(number).encode(), wait_for_ready=True))
            pushing = deque[Future[bytes]]()
            for client in range(clients):
                upload = _trained(net, frames, is_first=not client) if parameters else frames
                if pushing:
                    pushing.popleft().result()
                if client < clients - 1:
                    pushing.append(pool.submit(push, iter(upload)))
                else:
                    push(iter(upload))
    channel.close()


def _trained(net: np.ndarray[Any, Any], frames: list[bytes], *, is_first: bool) -> list[bytes]:
    """Do a client's duties; the first client of a process checks what came for all of them."""
    held = memoryview(net).cast("B")
    for i, frame in enumerate(frames):
        if is_first:
            zlib_ng.crc32(frame)
        held[FRAME * i : FRAME * i + len(frame)] = frame
    if is_first and not np.isfinite(np.dot(net, net)):
        raise ValueError("NaN")
    net[-1] += 1e-3
    return _frames(net.copy(), duties=True)


if __name__ == "__main__":
    keep_large_blocks()
    counts = [int(word) for word in sys.argv[1:5]]
    print(json.dumps(floor(*counts, duties=sys.argv[5:] == ["duties"])))
