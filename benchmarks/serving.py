"""``fedcli serve-model`` beside a bare loop: uvicorn over the same model, without any check.

    python -m benchmarks.serving [--callers 1 8 64] [--seconds 0.1] [--turns 100] [--keep]

Each server is a process, and callers are another one: connections that stay open, and a request as
soon as the one before is answered. The servers take many short turns, so that other work on the
machine slows both of a pair alike; a turn lasts until each caller has an answer. Rows have answers
a second, the median and the slowest hundredth of milliseconds, how many were told to come later,
how many callers were cut off, and the processor's time for an answer. ``slower`` is the median over
pairs of turns of the ratio of their median latencies; ``from`` and ``to`` bound it in 95 of 100
draws of the pairs (bootstrap).
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedmodels.tensors.archive import PERSONAL
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

    from fedcli.predicting.live_model import LiveModel
    from fedplugins.serving.model_server import ModelServer

    torch.set_num_threads(1)
    server = ModelServer("127.0.0.1", 0, {"it": LiveModel([model], "it")})
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


@dataclass(frozen=True)
class Asked:
    """What came of a turn."""

    seconds: float
    took: list[float]
    """Of each answer, in seconds."""
    ends: Counter[str]
    """How many answers had each status, and how many callers were ``cut`` off."""


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


async def asked(port: int, callers: int, seconds: float) -> Asked:
    """Let so many callers ask for some seconds; return what they were answered, and how fast."""
    took, ends = list[float](), Counter[str]()
    begun_at = time.perf_counter()
    await asyncio.gather(*(_caller(port, begun_at + seconds, took, ends) for _ in range(callers)))
    return Asked(time.perf_counter() - begun_at, took, ends)


def measured(model: Path, callers: int, seconds: float, turns: int) -> list[dict[str, Any]]:
    """Return a row for each server, over all of its turns."""
    servers = {"bare loop": begun(bare, model), "serve-model": begun(ours, model)}
    try:
        found: dict[str, list[Asked]] = {name: [] for name in servers}
        for _, port in servers.values():
            asyncio.run(asked(port, callers, seconds))
        before = {name: _processor_s(child) for name, (child, _) in servers.items()}
        for turn in range(turns):
            order = [*servers.items()]
            for name, (_, port) in order if turn % 2 else order[::-1]:
                found[name].append(asyncio.run(asked(port, callers, seconds)))
        spent = {name: _processor_s(child) - before[name] for name, (child, _) in servers.items()}
    finally:
        for child, _ in servers.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    rows = [_row_of(name, callers, each, spent[name]) for name, each in found.items()]
    medians = ([statistics.median(one.took) for one in each] for each in found.values())
    return [rows[0], {**rows[1], **in_pairs(*medians)}]


def _row_of(name: str, callers: int, turns: list[Asked], spent_s: float) -> dict[str, Any]:
    """Return what a server did in all of its turns."""
    ends = sum((turn.ends for turn in turns), Counter[str]())
    taken = sorted(seconds for turn in turns for seconds in turn.took)
    return {
        "server": name,
        "callers": callers,
        "answers": ends["200"],
        "answers_s": ends["200"] / sum(turn.seconds for turn in turns),
        "p50_ms": 1000 * statistics.median(taken),
        "p99_ms": 1000 * taken[int(0.99 * len(taken))],
        "later": ends["503"],
        "cut": ends["cut"],
        "cpu_ms": 1000 * spent_s / max(ends["200"], 1),
    }


def in_pairs(bare: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return the median ratio of pairs of turns, and the bounds of 95 % of its bootstrap draws."""
    ratios = np.asarray(ours) / np.asarray(bare)
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return {"slower": float(np.median(ratios)), "from": float(low), "to": float(high)}


def _processor_s(child: int) -> float:
    """Return the processor's seconds that a process has taken."""
    times = psutil.Process(child).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure each number of callers."""
    parser = parser_of("serving", __doc__, "serving")
    parser.add_argument("--callers", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=0.1, help="of a turn")
    parser.add_argument("--turns", type=int, default=100)
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
