"""What a site announces of a new task, to a coordinator that may not read one of its columns."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attacks.lying_columns import ALLOWED, HONEST, config, problem_of, table
from benchmarks.attacks.lying_coordinator import Ask, Liar, leaks, told_to
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedpb.v1 import coordinator_pb2 as rpc

pytestmark = pytest.mark.loopback


@dataclass
class Patient(Liar):
    """Ends the run once the site has announced a task."""

    announced: threading.Event = field(default_factory=threading.Event)

    def Join(self, request: Any, context: Any) -> rpc.JoinResponse:  # noqa: N802
        reply = super().Join(request, context)
        reply.beat_every_s = 0.2
        return reply

    def Announce(self, request: Any, context: Any) -> rpc.AnnounceResponse:  # noqa: N802
        self.heard.append(("Announce", request))
        self.announced.set()
        return rpc.AnnounceResponse()

    def Pull(self, request: Any, context: Any) -> Any:  # noqa: N802
        assert self.announced.wait(30)
        yield from super().Pull(request, context)


def heard_by(root: Path, secret: int, rules: Rules) -> Any:
    """Return what a coordinator hears of a site to which a table comes."""
    states = root / str(secret)
    data, incoming = table(states / "data", secret), states / "incoming"
    incoming.mkdir()
    run = config(HONEST)
    schedule = run.schedule.model_copy(update={"open": True, "order": "tasks_outer"})
    run = run.model_copy(update={"schedule": schedule})
    (week,) = table(states / "made", secret + 10).glob("*/*.csv")
    head, *rows = week.read_text().splitlines()  # other rows than the site has already
    (incoming / "week.csv").write_text("\n".join([head, *(f"1{row}" for row in rows)]))

    def joins(address: str, data: Path, states: Path, rules: Rules, ledger: Any) -> None:
        cpu, how = torch.device("cpu"), {"incoming": incoming, "give_up_after": 20.0}
        host_of([0], address, data, states, cpu, rules=rules, **how).run()  # type: ignore[arg-type]

    liar = Patient(run, [Ask("the end", {}, 0.0, rpc.ORDER_KIND_FINISH)], problem_of(run))
    return told_to([liar], rules, data, states, joins)


def test_an_announcement_tells_nothing_of_a_column_that_is_not_allowed(tmp_path):
    sites = {(n, 0): heard_by(tmp_path, n, Rules.of(allow_column=ALLOWED)) for n in range(2)}
    assert all("Announce" in one.calls for one in sites.values())
    assert leaks(sites, ()) == []
