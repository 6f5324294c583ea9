"""The same run, whatever carries it: in process, one process per client, several per process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmodels.methods import method_class
from fedmodels.training.asked import needs_server_data
from fedsrv.engine import reduction
from fedtide.testing.trial import digits_in
from tests.fedmodels.methods.test_conformance import CARRIED, CASES, experiment_for
from tests.fuzz.live import Live
from tests.integration.conftest import tables
from tests.runs import assert_same

pytestmark = pytest.mark.loopback

IDS = ["-".join([name, *map(str, switches.values())]) for name, switches in CASES]
ONE_ROUND = {"schedule": {"rounds": 1}}
"""One interaction for each of two tasks: the second begins with what the first one left."""


def figures_in(found: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each figure of a record that no layout changes."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in ("seconds", "wire_down", "wire_up", "peak_rss_bytes"):
                yield from figures_in(value, f"{place}/{key}")
    else:
        yield place, found


def records_that_differ(one: Path, other: Path) -> list[str]:
    """Return the first figures that differ between the records of two run directories."""
    lines = (
        (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines() for out in (one, other)
    )
    for number, pair in enumerate(zip(*lines, strict=True)):
        a, b = (dict(figures_in(json.loads(line))) for line in pair)
        if found := [f"{k}: {a.get(k)} {b.get(k)}" for k in a | b if a.get(k) != b.get(k)]:
            return [f"record {number}", *found[:12]]
    return []


def assert_same_bytes(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_same(one, other)
    for key in ("down", "up"):
        assert one["bytes"][key] == other["bytes"][key]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in CARRIED else [pytest.mark.whole])
        for case, name in zip(CASES, IDS, strict=True)
    ],
)
def test_every_method_over_loopback_is_the_same_run(case, digits, tmp_path, whole_run, monkeypatch):
    """Over loopback uploads are folded into the mean as they come, where the method allows it.

    Of methods that send and keep alike, one is carried; ``make test-whole`` carries them all.

    The coordinator and two hosts are threads of this process. Tests of crashes, relays and faults
    compare some methods over processes.
    """
    experiment = experiment_for(case, **ONE_ROUND)
    if experiment.method.pools_data:
        digits = digits_in(tmp_path / "pooled", gather=True)
    alone = whole_run(experiment, digits)
    monkeypatch.setattr(reduction, "MAX_WHOLE", 0)
    unpooled = experiment_for(case, **ONE_ROUND, server={"upload_memory_mb": 0})
    needs = needs_server_data(method_class(case[0]))
    own = digits / "server" if needs else None
    live = Live(unpooled, digits, tmp_path, "127.0.0.1:0", server_data=own)
    try:
        live.join(0, 1)
        live.join(2)
        found = live.summary()
        assert not records_that_differ(tmp_path / "run", alone.out)
        assert_same_bytes(found, alone.summary)
    finally:
        live.close()


def test_one_process_per_client_is_the_same_run(loopback):
    run = loopback(tables("held"))
    assert_same_bytes(run.run("0", "1", "2"), run.alone)


def test_a_host_fetches_the_common_part_once(loopback):
    experiment = tables("fedavg", evaluate={"every": 0})
    single = loopback(experiment, "single").run("0", "1", "2")
    hosted = loopback(experiment, "hosted").run("0-2")
    assert hosted["bytes"]["down"] == single["bytes"]["down"]
    assert hosted["bytes"]["wire_down"] < 0.5 * single["bytes"]["wire_down"]
