"""``fedcli serve-model`` beside a bare loop: uvicorn over the same model, without any check.

    python -m benchmarks.serving [--callers 1 8 64] [--seconds 3] [--turns 3] [--keep]

Each server is a process, and callers are another one: connections that stay open, and a request as
soon as the one before is answered. The servers take turns, so that a busy machine slows both. Rows
have answers a second, the median and the slowest hundredth of milliseconds, how many were told to
come later, how many callers were cut off, and the processor's time for an answer, which other work
on the machine hardly moves; ``slower`` compares the medians of turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedcli.runtime.state import PERSONAL
from fedtide import run

INPUT = (1, 8, 8)


def trained(place: Path) -> Path:
    """Return the file of a client's model of digits."""
    tables = {
        "data": {"name": "digits"},
        "scenario": {"kind": "iid", "tasks": 1},
        "net": {"name": "digits-cnn"},
        "method": {"name": "fedavg"},
        "schedule": {"clients": 2, "rounds": 1},
    }
    run(tables, out=place / "run", backend="inprocess")
    return place / "run" / "clients" / "0" / PERSONAL


def bare(model: Path, tell_port: Callable[[int], None]) -> None:
    """Answer with a model in an application that trusts everybody."""
    import socket

    import torch
    import uvicorn

    from fedmodels.nets.trained import TrainedModel

    found = TrainedModel.load(model)
    torch.set_num_threads(1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        shares = found.probabilities(np.array(json.loads(body), dtype=np.float32))
        said = json.dumps({"predictions": shares.tolist()}).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": said})

    # asyncio sends small parts at once on sockets that say that they are of TCP
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(512)
    tell_port(bound.getsockname()[1])
    config = uvicorn.Config(app, http="h11", lifespan="off", access_log=False, log_config=None)
    uvicorn.Server(config).run(sockets=[bound])


def ours(model: Path, tell_port: Callable[[int], None]) -> None:
    """Answer with a model as the command does."""
    import torch

    from fedcli.serving.live_model import LiveModel
    from fedcli.serving.model_server import ModelServer

    torch.set_num_threads(1)
    server = ModelServer("127.0.0.1", 0, LiveModel([model], "it"))
    tell_port(server.port)
    server.serve()


def begun(server: Callable[..., None], model: Path) -> tuple[int, int]:
    """Start a server in a process; return the process and the port."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            server(model, lambda port: os.write(write, b"%d\n" % port) and None)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        return child, int(told.readline())


async def _caller(port: int, until: float, took: list[float], ends: Counter[str]) -> None:
    """Ask once, and again as long as there is time."""
    body = json.dumps(np.zeros((1, *INPUT)).tolist()).encode()
    head = (
        f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        begun_at = time.perf_counter()
        while True:
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            lines = answer.decode("latin-1").lower().split("\r\n")
            size = next(int(n[16:]) for n in lines if n.startswith("content-length: "))
            await reader.readexactly(size)
            ends[lines[0].split()[1]] += 1
            now = time.perf_counter()
            took.append(now - begun_at)
            if now >= until:
                break
            begun_at = now
    except (OSError, EOFError):
        ends["cut"] += 1
    finally:
        writer.close()


async def asked(port: int, callers: int, seconds: float) -> dict[str, Any]:
    """Let so many callers ask for some seconds; return what they were answered, and how fast."""
    took, ends = list[float](), Counter[str]()
    until = time.perf_counter() + seconds
    await asyncio.gather(*(_caller(port, until, took, ends) for _ in range(callers)))
    taken = sorted(took) or [float("nan")]
    return {
        "answers_s": ends["200"] / seconds,
        "p50_ms": 1000 * statistics.median(taken),
        "p99_ms": 1000 * taken[int(0.99 * len(taken))],
        "later": ends["503"],
        "cut": ends["cut"],
    }


def measured(model: Path, callers: int, seconds: float, turns: int) -> list[dict[str, Any]]:
    """Return a row for each server: the median of its turns."""
    servers = {"bare loop": begun(bare, model), "serve-model": begun(ours, model)}
    try:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for port in (port for _, port in servers.values()):
            asyncio.run(asked(port, callers, seconds / 4))
        for _ in range(turns):
            for name, (child, port) in servers.items():
                before = _processor_s(child)
                row = asyncio.run(asked(port, callers, seconds))
                spent = _processor_s(child) - before
                answers = max(row["answers_s"] * seconds, 1.0)
                found[name].append({**row, "cpu_ms": 1000 * spent / answers})
    finally:
        for child, _ in servers.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    rows = []
    for name, each in found.items():
        row = {key: statistics.median(one[key] for one in each) for key in each[0]}
        rows.append({"server": name, "callers": callers, **row})
    ratio = rows[0]["answers_s"] / max(rows[1]["answers_s"], 1e-9)
    return [{**rows[0], "slower": 1.0}, {**rows[1], "slower": ratio}]


def _processor_s(child: int) -> float:
    """Return the processor's seconds that a process has taken."""
    times = psutil.Process(child).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure each number of callers."""
    parser = parser_of("serving", __doc__, "serving")
    parser.add_argument("--callers", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = trained(Path(name))
        for callers in options.callers:
            rows += measured(model, callers, options.seconds, options.turns)
            tell("serving", rows[-2:])
    if options.keep:
        keep(options.keep, given_as("serving"), {"A served model beside a bare loop": rows})


if __name__ == "__main__":
    main()
