"""Pull and Push of 45 MB against a raw TCP socket and bare gRPC of the same run.

    python -m benchmarks.transport [--megabytes 45] [--repeats 11] [--clients 1 10 50] [--tls]

The service is real, in a process of its own, and so are the clients: sessions, header checks,
checksums and finiteness included. All clients pull one broadcast at a time, then all push; the
socket's receiver keeps its buffer. Bare gRPC moves the same frames as ready bytes that the receiver
drops: what is left is the library, which copies a frame twice on each side. With duties, who pushes
a frame makes it out of a net's memory and sums it up, and who receives one sums it up, looks for
NaN and keeps it. All of them alternate. With ``--tls`` each number of clients is measured with and
without.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import torch
from zlib_ng import zlib_ng

from benchmarks.measure import anonymous_bytes, parser_of, tell
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.own_certificate import channel_credentials
from fedcli.runtime.worker import Result
from fedmodels.errors import RunFailed
from fedmodels.host.machine import keep_large_blocks
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.packed_weights import lease
from fedpb import PROTOCOL
from fedpb.frames import FRAME_BYTES
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.identity.certificates import init_authority, issue

SERVER = """
import sys
from pathlib import Path
from benchmarks.transport import serve
serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "tls")
"""
FACTS = json.dumps(
    {
        "format": 1,
        "input_shape": [1],
        "num_classes": 2,
        "tasks": [{"train": [1, 1], "test": [1, 1]}],
    }
)
KINDS = ("pull", "push", "bpul", "bpus", "dpul", "dpus")
"""What a client can be told to do; over bare gRPC, and over bare gRPC with duties."""
SPOOL_BYTES = 256 << 20
"""As ``[server] upload_memory_mb`` has it."""


def main() -> None:
    """Measure and print the table."""
    parser = parser_of("transport", __doc__)
    parser.add_argument("--megabytes", type=int, default=45)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--tls", action="store_true", help="measure over TLS as well")
    options = parser.parse_args()
    keep_large_blocks()
    torch.set_num_threads(1)
    size = options.megabytes << 20
    rows = []
    for clients in options.clients:
        for tls in (False, True) if options.tls else (False,):
            rows += _measured(clients, size, options.repeats, tls)
    tell("transport", rows)


def _measured(clients: int, size: int, repeats: int, tls: bool) -> list[dict[str, Any]]:
    """Return the rows of so many clients."""
    seconds: dict[str, list[float]] = {kind: [] for kind in ("socket", *KINDS)}
    resident = anonymous = 0
    with tempfile.TemporaryDirectory() as place, _scene(clients, size, Path(place), tls) as scene:
        server, children = scene
        for _ in range(repeats):
            for kind, found in seconds.items():
                begun = time.perf_counter()
                if kind == "socket":
                    _socket_once(size)
                else:
                    for child in children:
                        child.sendall(kind.encode())
                    for child in children:
                        assert child.recv(4) == b"done", "a client died"
                found.append(time.perf_counter() - begun)
            resident = max(resident, psutil.Process(server).memory_full_info().pss)
            anonymous = max(anonymous, anonymous_bytes(server))
    socket_rate = size / statistics.median(seconds["socket"][2:])
    rates = {k: clients * size / statistics.median(seconds[k][2:]) for k in KINDS}
    rows = []
    for kind in ("pull", "push"):
        rate, bare, duties = rates[kind], rates[f"b{kind[:3]}"], rates[f"d{kind[:3]}"]
        row = {"clients": clients, "tls": tls, "what": kind, "mb_per_s": rate / 1e6}
        row |= {"socket_mb_per_s": socket_rate / 1e6, "of_socket": rate / socket_rate}
        row |= {"bare_grpc_mb_per_s": bare / 1e6, "of_bare_grpc": rate / bare}
        row |= {"duties_mb_per_s": duties / 1e6, "of_duties": rate / duties}
        row |= {"server_pss_mb": resident / 1e6, "server_anon_mb": anonymous / 1e6}
        rows.append(row)
    return rows


@contextmanager
def _scene(
    clients: int, size: int, place: Path, tls: bool
) -> Iterator[tuple[int, list[socket.socket]]]:
    """Start a server and clients; yield its process id, and a socket that commands each client."""
    if tls:
        init_authority(place)
        issue(place, "server", ["127.0.0.1"])
    arguments = [str(clients), str(size), str(place), "tls" if tls else "plain"]
    command = [sys.executable, "-c", SERVER, *arguments]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    addresses = server.stdout.readline().split()
    ends, pids = [], []
    for client in range(clients):
        ours, theirs = socket.socketpair()
        pid = os.fork()  # gRPC has not been started in this process
        if pid == 0:
            ours.close()
            _Client(client, *addresses, size, place if tls else None).obey(theirs)
            os._exit(0)
        theirs.close()
        ends.append(ours)
        pids.append(pid)
    try:
        yield server.pid, ends
    finally:
        for end in ends:
            end.close()
        for pid in pids:
            os.waitpid(pid, 0)
        server.stdin.close()
        server.wait()


def _weights(size: int, value: float = 0.0) -> Bundle:
    return Bundle(weights={"base/w": torch.full((size // 4,), value)})


def serve(clients: int, size: int, place: Path, tls: bool) -> None:
    """Give the same order to all clients again and again, until standard input ends."""
    from fedsrv.engine.cohort import Trip, UploadForm
    from fedsrv.identity.tls import server_credentials
    from fedsrv.progress.events import EventLog
    from fedsrv.transport.remote_cohort import RemoteCohort
    from fedsrv.transport.server import start_server, stop_server
    from fedsrv.transport.service import Service
    from fedsrv.transport.spool import Spool

    keep_large_blocks()
    torch.set_num_threads(1)
    credentials = None
    if tls:
        credentials = server_credentials(place / "server.pem", place / "server.key", None)
    bundles = [_weights(size, float(number)) for number in range(2)]  # never the one that is held
    spool = Spool(place, SPOOL_BYTES)
    cohort = RemoteCohort(clients, spool, EventLog(), admission=Admission({}))
    service = Service("run", {}, cohort, cohort.events)
    server, port = start_server(service, "127.0.0.1:0", credentials)
    bare, bare_port = _start_bare_server(size, clients, credentials)
    sys.stdout.write(f"127.0.0.1:{port} 127.0.0.1:{bare_port}\n")
    sys.stdout.flush()
    ended = threading.Thread(target=sys.stdin.read)
    ended.start()

    def trips() -> None:
        number = 0
        with suppress(RunFailed):  # the end
            while True:
                facts = {"kind": rpc.ORDER_KIND_TRAIN, "interaction": number}
                orders = {c: rpc.Order(client_id=str(c), **facts) for c in range(clients)}
                bundle = bundles[number % 2]
                cohort.send_and_receive(
                    Trip(orders, bundle, form=UploadForm(BundleSpec.of(bundle)))
                )
                number += 1

    threading.Thread(target=trips, daemon=True).start()
    ended.join()
    cohort.stop("the benchmark is over")
    for one in (server, bare):
        stop_server(one, 0.1)


def _start_bare_server(
    size: int, clients: int, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.Server, int]:
    """Serve two calls that do nothing but move frames; return the server and its port."""
    frames = _ready_frames(size)
    handlers = {
        "Pull": grpc.unary_stream_rpc_method_handler(lambda request, context: iter(frames)),
        "Push": grpc.stream_unary_rpc_method_handler(_drop),
        "Keep": grpc.stream_unary_rpc_method_handler(lambda stream, context: _keep(stream, size)),
    }
    server = grpc.server(ThreadPoolExecutor(2 * clients + 2), options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    address = "127.0.0.1:0"
    port = (
        server.add_secure_port(address, credentials)
        if credentials
        else server.add_insecure_port(address)
    )
    server.start()
    return server, port


_OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]


def _ready_frames(size: int) -> list[bytes]:
    return [bytes(min(FRAME_BYTES, size - at)) for at in range(0, size, FRAME_BYTES)]


def _drop(stream: Iterator[bytes], context: object = None) -> bytes:
    for _ in stream:
        pass
    return b""


def _made(payload: memoryview) -> Iterator[bytes]:
    """Yield a frame with its checksum, made when it is sent."""
    for at in range(0, len(payload), FRAME_BYTES):
        frame = payload[at : at + FRAME_BYTES]
        zlib_ng.crc32(frame)
        yield bytes(frame)


def _keep(stream: Iterator[bytes], size: int) -> bytes:
    """Do with frames what has to be done: sum up, keep, look for NaN."""
    kept, at = np.frombuffer(lease(size), np.uint8), 0
    for frame in stream:
        zlib_ng.crc32(frame)
        place = kept[at : at + len(frame)]
        place[:] = np.frombuffer(frame, np.uint8)
        words = place.view(np.float32)
        if not np.isfinite(np.dot(words, words)):
            raise ValueError("NaN")
        at += len(frame)
    return b""


class _Client:
    """Pulls and pushes when it is told to."""

    def __init__(
        self, client: int, address: str, bare: str, size: int, authority: Path | None
    ) -> None:
        credentials = channel_credentials(authority / "ca.pem" if authority else None)
        self.client, self.link = client, Link(address, credentials)
        self.channel = (
            grpc.secure_channel(bare, credentials, _OPTIONS)
            if credentials
            else grpc.insecure_channel(bare, _OPTIONS)
        )
        self.bare_pull = self.channel.unary_stream("/bare/Pull")
        self.bare_push = self.channel.stream_unary("/bare/Push")
        self.bare_keep = self.channel.stream_unary("/bare/Keep")
        self.payload = memoryview(bytearray(size))
        self.frames = _ready_frames(size)
        self.upload = _weights(size)
        self.spec = {"common": BundleSpec.of(self.upload), "personal": BundleSpec()}
        request = rpc.JoinRequest(
            client_id=str(client), description=description_of(FACTS), protocol=PROTOCOL
        )
        self.membership = Membership(client, "run", self.link.join(request).token)
        self.order = rpc.Order()

    def obey(self, commands: socket.socket) -> None:
        """Do what is told until nothing more is."""
        work = {
            "pull": self.pull,
            "push": self.push,
            "bpul": lambda: _drop(self.bare_pull(b"")),
            "bpus": lambda: self.bare_push(iter(self.frames)),
            "dpul": lambda: _keep(self.bare_pull(b""), len(self.payload)),
            "dpus": lambda: self.bare_keep(_made(self.payload)),
        }
        while command := commands.recv(4).decode():
            work[command]()
            commands.sendall(b"done")
        self.link.close()
        self.channel.close()

    def pull(self) -> None:
        """Take one order over a call of its own: over an open one, some of it were here already."""
        ((self.order, _),) = self.link.pull(self.waiting, lambda client: self.spec)
        self.link.end_pull()

    def waiting(self) -> list[rpc.Waiting]:
        token, issue = self.membership.token, self.order.issue
        return [rpc.Waiting(client_id=str(self.client), token=token, durable=-1, issue=issue)]

    def push(self) -> None:
        self.link.push(self.membership, Result(self.order, self.upload, rpc.Report()))


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
