"""Clients that are excluded while a run goes on: by hand and by rule, and again after a crash."""

import json
import re
from contextlib import ExitStack

import pytest

from fedmodels.config.server import Server
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.facts.config_file import read_experiment
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.parts.exclusions import Exclusions, warned_in_a_row
from fedsrv.progress.events import EventLog
from fedsrv.state.decisions import EXCLUDE
from fedsrv.state.store import Store
from fedtide.inprocess import launch_in_process, run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.runs import Killed, killed
from tests.sizes import ROOT

ROUNDS = {"rounds": 3}
"""Six interactions of three clients."""


@pytest.fixture
def running(monkeypatch):
    """The exclusions of the run that was begun last."""
    made = []
    init = Exclusions.__init__
    monkeypatch.setattr(
        Exclusions, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1]
    )
    return made


def asks(running, interaction, client=2, dies=None):
    """Return what asks for an exclusion in the middle of an interaction, and maybe dies in one."""

    def before(order):
        if order.kind != rpc.ORDER_KIND_TRAIN:
            return
        if order.interaction == interaction:
            running[-1].ask([client])
        if order.interaction == dies:
            raise Killed

    return before


@pytest.mark.parametrize("method", ["fedper", "scaffold"])
def test_an_excluded_client_takes_no_part_from_the_next_interaction_on(
    method, digits, tmp_path, running
):
    """The bits are those of a run that is resumed without the client, also after kills."""
    experiment, out = tiny_experiment(method=method, schedule=ROUNDS), tmp_path / "run"
    whole = run_in_process(experiment, digits, out, before=asks(running, 1))
    assert [r["cohort"] for r in records_of(out)] == [[0, 1, 2]] * 2 + [[0, 1]] * 4
    assert whole["clients_set_aside"] == [2]
    for place, dies in (("one", 1), ("four", 4)):
        again = tmp_path / place
        killed(experiment, digits, again, before=asks(running, 1, dies=dies))
        cohorts = [[0, 1, 2]] + [[0, 1, 2] if dies == 4 else [0, 1]] + [[0, 1]] * 4
        resumed = run_in_process(experiment, digits, again, resume=True)
        assert [r["cohort"] for r in records_of(again)] == cohorts
        assert (resumed["state_sha256"] == whole["state_sha256"]) == (dies == 4)
    killed(experiment, digits, tmp_path / "other", before=asks(running, 9, dies=2))
    without = run_in_process(experiment, digits, tmp_path / "other", resume=True, without=[2])
    assert without["state_sha256"] == whole["state_sha256"]


def test_an_asynchronous_run_goes_on_without_it(digits, tmp_path, running):
    schedule = {"order": "asynchronous", "rounds": 3, "buffer": 1}
    experiment = tiny_experiment(schedule=schedule)
    found = run_in_process(experiment, digits, tmp_path / "run", before=asks(running, 1))
    records = records_of(tmp_path / "run")
    assert [r["cohort"] for r in records] == [[0], [1], [2], [0], [1], [0]]
    orders = [dict(r["under_way"]).keys() for r in records]
    assert [2 in clients for clients in orders[3:]] == [True, False, False], "asked in the fourth"
    assert found["clients_set_aside"] == [2]


def test_by_rule_whoever_stands_out_again_and_again(tmp_path):
    """Clients 7 to 9 point against all others; two such uploads in a row are enough."""
    attackers = ROOT / "benchmarks" / "attacks"
    lies = [f"method.name={attackers}/attackers.py:AttackedFedAvg", "method.attack=min_max"]
    lies += ["method.deviation=unit", "method.attackers=3"]
    more = ["schedule.rounds=3", "server.exclude_after=2"]
    experiment = read_experiment(attackers / "digits.toml", lies + more)
    launch_in_process(experiment, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    cohorts = [record["cohort"] for record in records_of(tmp_path / "run")]
    assert cohorts == [[*range(10)], [*range(10)], [*range(7)]]
    assert summary["clients_set_aside"] == [7, 8, 9]


@pytest.mark.parametrize(
    ("liars", "deviation", "found"),
    [(2, "unit", {8, 9}), (4, "unit", {6, 7, 8, 9}), (4, "std", set())],
)
def test_attackers_who_stay_as_near_as_honest_uploads_exclude_no_honest_one(
    liars, deviation, found, tmp_path
):
    """Min-max of Shejwalkar and Houmansadr: lies that are alike, four times those of one client."""
    attackers = ROOT / "benchmarks" / "attacks"
    lies = [f"method.name={attackers}/attackers.py:AttackedFedAvg", "method.attack=min_max"]
    lies += [f"method.deviation={deviation}", f"method.attackers={liars}"]
    more = ["schedule.rounds=2", "server.exclude_after=2"]
    experiment = read_experiment(attackers / "digits.toml", lies + more)
    launch_in_process(experiment, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert {int(c) for record in records for c in record.get("warned", {})} == found
    agreed = {client for record in records for client in record.get("agreed", ())}
    assert agreed == (found if liars < 4 else set()), "four of ten could aim an exclusion"


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"server": {"exclude_after": 2}}, "exclude_after needs 5 uploads in a round to tell"),
        (
            {
                "server": {"exclude_after": 2, "reduce": "trimmed_mean", "attackers": 4},
                "schedule": {"clients": 10},
            },
            "attackers = 4 of 10 uploads could aim exclude_after at an honest client, 3 could not",
        ),
        (
            {
                "server": {"exclude_after": 2},
                "schedule": {"clients": 10},
                "privacy": {"secure_sum": True},
            },
            "exclude_after looks at single uploads, and [privacy] secure_sum hides them",
        ),
    ],
)
def test_an_exclusion_that_liars_could_aim_or_that_nobody_could_see_is_refused(tables, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        tiny_experiment(**tables)


def warned(*clients, cohort=(0, 1, 2)):
    return {"cohort": list(cohort), "agreed": list(clients), "warned": {"2": ""}}


@pytest.mark.parametrize(
    ("records", "times", "found"),
    [
        ([], 1, set()),
        ([warned(0)], 1, {0}),
        ([warned(0)], 2, set()),
        ([warned(0, 1), warned(1)], 2, {1}),
        ([warned(0), warned(), warned(0)], 2, set()),
        ([warned(0), warned(cohort=(1, 2)), warned(0)], 2, {0}),  # it was not asked in between
        ([warned(), warned(0), warned(0)], 2, set()),
    ],
)
def test_a_row_is_of_the_interactions_that_a_client_took_part_in(records, times, found):
    assert warned_in_a_row(records, times) == found


@pytest.fixture
def exclusions(tmp_path):
    """Makes the exclusions of a new run, or of the same one again."""
    with ExitStack() as stack:

        def made(**server):
            stack.close()
            resume = (tmp_path / "run").exists()
            store = Store(tmp_path / "run", tiny_experiment(server=server), resume)
            stack.callback(store.close)
            return Exclusions(store, EventLog())

        yield made


@pytest.mark.parametrize(
    ("server", "clients", "line"),
    [
        ({}, [0, 1, 2], "0 of 3 clients would be left, and the run needs 1"),
        ({"min_clients": 2}, [0, 1], "1 of 3 clients would be left, and the run needs 2"),
        ({"reduce": "trimmed_mean", "attackers": 1}, [0], "2 of 3 .* and the run needs 3"),
    ],
)
def test_enough_clients_stay(server, clients, line, exclusions):
    made = exclusions(**server)
    with pytest.raises(PayloadError, match=line):
        made.ask(clients)
    assert made.store.decided(EXCLUDE) == []


def test_what_was_asked_outlives_a_crash(exclusions):
    exclusions().ask([1])
    assert exclusions()._asked == {1}


def test_a_count_of_zero_is_refused():
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Server(exclude_after=0)
