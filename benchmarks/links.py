"""What slow links carry: an order and an upload over a link of some kbit/s, by the kernel's shaper.

    python -m benchmarks.links [--kbit 20 50 100 200] [--megabytes 1.2] [--within 1500]

Each rate has a network namespace of its own, whose loopback a token bucket limits for both ways
together, with packets of 1500 bytes and a queue of two seconds, behind which they are lost. It
needs root, ``ip`` and ``tc``. All rates are measured at once: they wait, and compute little.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fedcli.runtime.link import Link, Membership
from fedcli.runtime.worker import Result
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb import PROTOCOL
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import Trip, UploadForm
from fedsrv.progress.events import EventLog
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.server import start_server
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool

COUNTS = [1, 1]
PROFILE = json.dumps(
    {
        "format": 1, "input_shape": [4], "num_classes": 2,
        "tasks": [{"train": COUNTS, "test": COUNTS}],
    }
)  # fmt: skip


class Lost(logging.Handler):
    """Counts the times that the link was lost, and those that it was called slow."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.breaks = self.slow = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.breaks += line.startswith("lost the server")
        self.slow += "slow link" in line


def crossed(size: int) -> dict[str, Any]:
    """Let an order of so many bytes and the same upload cross; return the seconds of both."""
    model = Bundle(weights={"w": torch.arange(size // 4, dtype=torch.float32)})
    lost = Lost()
    logging.getLogger("fedcli").addHandler(lost)
    with tempfile.TemporaryDirectory() as place:
        events = EventLog()
        cohort = RemoteCohort(1, Spool(Path(place), 1 << 28), events, admission=Admission({}))
        server, port = start_server(Service("run", {}, cohort, events), "127.0.0.1:0", None)
        link, engine = Link(f"127.0.0.1:{port}"), ThreadPoolExecutor(1)
        asked = rpc.JoinRequest(
            client_id="0", description=description_of(PROFILE), token=b"own", protocol=PROTOCOL
        )
        member = Membership(0, "run", link.join(asked).token)
        order = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id="0", trip=9)
        form = UploadForm(BundleSpec.of(model))
        answers = engine.submit(cohort.send_and_receive, Trip({0: order}, model, form=form))
        waiting = rpc.Waiting(client_id="0", token=member.token, durable=-1)
        begun = time.monotonic()
        spec = {"common": BundleSpec.of(model)}
        ((order, payload),) = link.pull(lambda: [waiting], lambda _: spec)
        down_s = time.monotonic() - begun
        print(json.dumps({"down_s": round(down_s)}), flush=True)
        begun = time.monotonic()
        link.push(member, Result(order, payload, rpc.Report()))
        up_s = time.monotonic() - begun
        (answer,) = answers.result(60).by_client.values()
        assert torch.equal(answer.upload.weights["w"], model.weights["w"])
        link.close()
        server.stop(0)
    lines = {"breaks": lost.breaks, "slow_lines": lost.slow}
    return {"down_s": round(down_s), "up_s": round(up_s), **lines}


def shaped(kbit: int, size: int, within_s: float) -> dict[str, Any]:
    """Measure one rate in a namespace of its own."""
    shaper = f"tbf rate {kbit}kbit burst 3000 latency 2s"
    inside = f"{sys.executable} -m benchmarks.links --inside {size}"
    script = (
        f"ip link set lo mtu 1500; ip link set lo up; tc qdisc add dev lo root {shaper} && "
        f"exec {inside}"
    )
    row: dict[str, Any] = {"kbit_s": kbit, "MB": size / 1e6}
    try:
        command = ["unshare", "-n", "sh", "-c", script]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=within_s)
        said = done.stdout
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode()
        row["ended"] = False
    for line in said.splitlines():
        row |= json.loads(line)
    return {"ended": "up_s" in row, **row}


def main() -> None:
    """Measure all rates at once, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kbit", type=int, nargs="*", default=[20, 50, 100, 200])
    parser.add_argument("--megabytes", type=float, default=1.2)
    parser.add_argument("--within", type=float, default=1500.0, help="seconds that a rate has")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(crossed(options.inside)), flush=True)
        return
    size = int(options.megabytes * 1e6)
    with ThreadPoolExecutor(len(options.kbit)) as pool:
        for row in pool.map(lambda kbit: shaped(kbit, size, options.within), options.kbit):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
