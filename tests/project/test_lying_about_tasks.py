"""What a site announces of a new task: nothing of a column or of inputs that it holds back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attacks.lying_columns import ALLOWED, HONEST, config, problem_of, table
from benchmarks.attacks.lying_coordinator import Ask, Liar, leaks, told_to
from fedcli.gate.gate import Gate
from fedcli.gate.rules import Rules
from fedcli.joining import host_of
from fedmodels.facts.resolution import experiment_of
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


def same(rows: Sequence[str], old: Sequence[str]) -> Sequence[str]:
    """Return rows as they are."""
    return rows


def heard_by(
    root: Path, secret: int, rules: Rules, privacy: Any = None,
    comes: Callable[[Sequence[str], Sequence[str]], Sequence[str]] = same, unusual: str = "tell",
) -> Any:  # fmt: skip
    """Return what a coordinator hears of a site to which a table comes."""
    states = root / str(secret)
    data, incoming = table(states / "data", secret), states / "incoming"
    incoming.mkdir()
    made = config(HONEST).to_dict()
    made["schedule"] |= {"open": True, "order": "tasks_outer"}
    made["data"] |= {"unusual": unusual}
    run = experiment_of(made | ({"privacy": privacy} if privacy else {}))
    (week,) = table(states / "made", secret + 10).glob("*/*.csv")
    (first,) = data.glob("*/*.csv")
    old = first.read_text().splitlines()[1:]
    head, *rows = week.read_text().splitlines()
    rows = [f"1{row}" for row in rows]  # other rows than the site has already
    (incoming / "week.csv").write_text("\n".join([head, *comes(rows, old)]))

    def joins(address: str, data: Path, states: Path, rules: Rules, ledger: Any) -> None:
        cpu, how = torch.device("cpu"), {"incoming": incoming, "give_up_after": 20.0}
        host_of([0], address, data, states, cpu, rules=rules, **how).run()  # type: ignore[arg-type]

    liar = Patient(run, [Ask("the end", {}, 0.0, rpc.ORDER_KIND_FINISH)], problem_of(run))
    return told_to([liar], rules, data, states, joins)


def other_than_digests(found: list[Any]) -> list[Any]:
    """Leave out digests of tasks: their key never leaves the site, and other rows have others."""
    return [each for each in found if not each.what.endswith("TaskCounts.digest")]


def test_an_announcement_tells_nothing_of_a_column_that_is_not_allowed(tmp_path):
    sites = {(n, 0): heard_by(tmp_path, n, Rules.of(allow_column=ALLOWED)) for n in range(2)}
    assert all("Announce" in one.calls for one in sites.values())
    assert other_than_digests(leaks(sites, ())) == []


LEVELS = ("client", "example")


def odd(rows: Sequence[str], old: Sequence[str]) -> Sequence[str]:
    """Return rows under the same labels, far from the others or known from the first task."""
    far = [",".join(["900", "77.5", *row.split(",")[2:]]) for row in rows]
    return [*old[:30], *far[30:]]


@pytest.mark.parametrize("level", LEVELS)
def test_with_a_floor_an_announcement_tells_numbers_of_examples_and_nothing_of_inputs(
    level, tmp_path, monkeypatch
):
    """Moments, what is unusual, and how many examples came before would follow from inputs."""
    floor = f"level={level},epsilon=1e6,delta=1e-3"
    where = {"where": "clients"} if level == "client" else {}
    privacy = {"level": level, "noise_multiplier": 4.0, "delta": 1e-3, **where,
               "allow": ["announced", "examples", "loss"]}  # fmt: skip
    told = {}
    for n, comes in enumerate((same, odd)):
        told[n, 0] = heard_by(tmp_path, n, Rules.of(require_privacy=floor), privacy, comes)
        assert "Announce" in told[n, 0].calls, told[n, 0].ended
    assert other_than_digests(leaks(told, ())) == []
    fields = {place.rpartition("/")[2] for place in told[1, 0].fields if "Announce" in place}
    assert {"TaskCounts.train", "TaskCounts.test"} <= fields
    monkeypatch.setattr(Gate, "look", lambda gate, message: None)  # so it would notice
    told[1, 0] = heard_by(tmp_path / "bare", 1, Rules.of(require_privacy=floor), privacy, odd)
    assert any("TaskCounts.unusual" in one.what for one in leaks(told, ()))


def test_with_a_floor_no_config_sets_tasks_aside_by_their_inputs(tmp_path):
    """Whether a task is set aside would tell whether it is unusual."""
    privacy = {"level": "client", "noise_multiplier": 4.0, "delta": 1e-3, "where": "clients",
               "allow": ["announced", "examples", "loss"]}  # fmt: skip
    rules = Rules.of(require_privacy="level=client,epsilon=1e6,delta=1e-3")
    told = {
        (n, 0): heard_by(tmp_path, n, rules, privacy, comes, "set-aside")
        for n, comes in enumerate((same, odd))
    }
    assert leaks(told, ()) == []
    for one in told.values():
        assert "which tasks are unusual" in str(one.ended)
        assert "Join" not in one.calls
