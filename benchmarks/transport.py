"""Pull and Push of 45 MB against a raw TCP socket of the same run.

    python -m benchmarks.transport [--megabytes 45] [--repeats 15]

The service is real, in a process of its own: sessions, header checks, checksums and finiteness
included. The socket's receiver keeps its buffer. Socket, Pull and Push alternate.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.measure import tell
from fedcli.link import Link, Member
from fedcli.worker import Result
from fedmodels.errors import RunFailed
from fedmodels.types import Bundle, BundleSpec
from fedpb import coordinator_pb2 as rpc
from fedpb.heap import keep_large_blocks

SERVER = """
import sys, torch
from pathlib import Path
from benchmarks.transport import serve
serve(int(sys.argv[1]), Path(sys.argv[2]))
"""
FACTS = json.dumps(
    {
        "format": 1,
        "input_shape": [1],
        "num_classes": 2,
        "tasks": [{"train": [1, 1], "test": [1, 1]}],
    }
)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--megabytes", type=int, default=45)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    keep_large_blocks()
    torch.set_num_threads(1)
    size = options.megabytes << 20
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", SERVER, str(size), place]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None
        assert server.stdout is not None
        client = _Client(server.stdout.readline().strip(), size)
        kinds: dict[str, Callable[[], None]] = {
            "socket": lambda: _socket_once(size), "pull": client.pull, "push": client.push,
        }  # fmt: skip
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, once in kinds.items():
                begun = time.perf_counter()
                once()
                seconds[kind].append(time.perf_counter() - begun)
        client.close()
        server.stdin.close()
        server.wait()
    rates = {kind: size / 1e6 / statistics.median(s[2:]) for kind, s in seconds.items()}
    tell(
        "transport",
        [{"what": k, "mb_per_s": r, "of_socket": r / rates["socket"]} for k, r in rates.items()],
    )


def _weights(size: int, value: float = 0.0) -> Bundle:
    return Bundle(weights={"base/w": torch.full((size // 4,), value)})


def serve(size: int, place: Path) -> None:
    """Serve one client the same order again and again, until standard input ends."""
    from fedsrv.cohort import Trip
    from fedsrv.events import EventLog
    from fedsrv.profile import Admission
    from fedsrv.remote import RemoteCohort
    from fedsrv.service import Service, start_server, stop_server
    from fedsrv.spool import Spool

    keep_large_blocks()
    torch.set_num_threads(1)
    bundles = [_weights(size, float(number)) for number in range(2)]  # never the one that is held
    cohort = RemoteCohort(1, Spool(place, 1 << 30), EventLog(), admission=Admission({}))
    server, port = start_server(Service("run", "{}", cohort, cohort.events), "127.0.0.1:0", None)
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    ended = threading.Thread(target=sys.stdin.read)
    ended.start()

    def trips() -> None:
        number = 0
        with suppress(RunFailed):  # the end
            while True:
                order = rpc.Order(kind=rpc.ORDER_TRAIN, client_id="0", interaction=number)
                bundle = bundles[number % 2]
                cohort.exchange(Trip({0: order}, bundle, spec=BundleSpec.of(bundle)))
                number += 1

    threading.Thread(target=trips, daemon=True).start()
    ended.join()
    cohort.stop("the benchmark is over")
    stop_server(server, 0.1)


class _Client:
    """Pulls and pushes by turns, as a client does."""

    def __init__(self, address: str, size: int) -> None:
        self.link, self.upload = Link(address), _weights(size)
        self.spec = {"common": BundleSpec.of(self.upload), "personal": BundleSpec()}
        request = rpc.JoinRequest(client_id="0", client_json=FACTS, protocol=1)
        self.member = Member(0, "run", self.link.join(request).token)
        self.order = rpc.Order()

    def pull(self) -> None:
        waiting = rpc.Waiting(
            client_id="0", token=self.member.token, durable=-1, issue=self.order.issue
        )
        self.order, _ = self.link.pull({0: waiting}, lambda client: self.spec)

    def push(self) -> None:
        self.link.push(self.member, Result(self.order, self.upload, rpc.Report()))

    def close(self) -> None:
        self.link.close()


_BUFFER = bytearray()


def _socket_once(size: int) -> None:
    """Send so many bytes over a loopback socket into a kept buffer."""
    if len(_BUFFER) != size:
        _BUFFER.extend(bytes(size - len(_BUFFER)))
    payload = bytes(size) if not _PAYLOAD else _PAYLOAD[0]
    _PAYLOAD[:] = [payload]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send, args=(listener.getsockname(), payload))
        sender.start()
        connection, _ = listener.accept()
        view, at = memoryview(_BUFFER), 0
        with connection:
            while at < size:
                at += connection.recv_into(view[at : at + (1 << 20)])
        sender.join()


_PAYLOAD: list[bytes] = []


def _send(address: tuple[str, int], payload: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(payload)


if __name__ == "__main__":
    main()
