"""A coordinator process, honest client processes, and a client that lies in every value."""

import os
import random

import psutil
import pytest

from tests.conftest import records_of
from tests.fuzz.liar import ANSWERS, EXPECTED, Liar, every_lie, takes_part
from tests.fuzz.live import honest_upload
from tests.integration.conftest import tables

pytestmark = pytest.mark.loopback

SAMPLE = 30
MAX_RSS = 700 << 20
"""Of a coordinator whose net takes kilobytes; torch alone takes 250 MB of it."""


def test_a_liar_neither_ends_nor_swells_a_run(loopback):
    """Lies are a sample of all there are; FEDTIDE_LIES=all tells every one."""
    lies = every_lie()
    if os.environ.get("FEDTIDE_LIES") != "all":
        lies = random.Random(7).sample(lies, SAMPLE)
    pushes = sum(method in ANSWERS for method, _ in lies)
    schedule = {"clients": 3, "rounds": max(2, pushes // 2)}
    run = loopback(
        tables("fedavg", schedule=schedule, server={"min_clients": 2}, evaluate={"every": 5})
    )
    server = run.serve()
    honest = run.join("0-1")
    description = (run.partition / "2" / "client.json").read_text()
    liar = Liar(f"127.0.0.1:{run.port}", "2", description, honest_upload(run.experiment))
    process, sizes = psutil.Process(server.process.pid), [0]
    outcomes = takes_part(liar, lies, lambda: sizes.append(process.memory_info().rss))
    liar.close()
    summary = run.finish(server, honest)
    assert len(outcomes) == len(lies)
    assert [(lie, code) for lie, code in outcomes if code not in EXPECTED] == []
    assert summary["state_sha256"]
    assert max(sizes) < MAX_RSS
    assert len(records_of(run.out)) == 2 * run.experiment.schedule.rounds
    assert sum(path.stat().st_size for path in run.out.glob("run.db*")) < 20 << 20
    assert "Traceback" not in server.log.read_text()
    assert "Traceback" not in honest.output()
