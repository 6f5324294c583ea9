"""A client that brings one upload and is gone for good: the run goes on while enough live."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest

from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.coordinator import _tell_the_beginning, write_facts
from fedsrv.progress.event_lines import EventFormatter
from fedsrv.progress.events import EventLog
from fedsrv.progress.run_status import RunStatus
from fedsrv.report.frame import group_runs
from fedsrv.report.story import story
from fedsrv.state.run_record import read_run
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.transport.test_cohort import until
from tests.liars import Gone, Stage

QUORUM = {"min_clients": 2, "deadline_s": 0.3}


class FirstDies:
    """The client that brings the first upload of the run is gone after it."""

    client, stage = -1, None

    def __call__(self, client, order, answer):
        if self.client < 0:
            self.client = client
        elif client == self.client:
            raise Gone
        else:
            until(self.has_come)
        return answer

    def has_come(self):
        events = [*self.stage.service.events._kept]
        return any((e.kind, e.client) == ("upload", str(self.client)) for e in events)


def run_without_the_first(experiment, digits, out):
    """Return the client that died, and the summary."""
    lie = FirstDies()
    lie.stage = Stage(experiment, digits, out, lie, liars=range(3))
    summary = lie.stage.run()
    return lie.client, summary


def cannot_score(client, order, answer):
    if order.kind == rpc.ORDER_KIND_EVALUATE:
        return Bundle(), rpc.Report(), "no memory"
    return answer


def test_every_mean_says_over_whom_it_is(digits, tmp_path, capsys):
    """Client 2 brings no score: the record, the log, the status and the report name it."""
    experiment = tiny_experiment(
        schedule={"rounds": 1}, server={**QUORUM, "deadline_s": 60}, method="fedavg"
    )
    run = tmp_path / "run"
    stage = Stage(experiment, digits, run, cannot_score, liars=[2])
    summary = stage.run()
    record = records_of(run)[-1]
    assert record["unscored"] == [2]
    events = [*stage.service.events._kept]
    (*_, scores) = (event for event in events if event.kind == "scores")
    assert (scores.detail["scored"], scores.detail["unscored"]) == (2, ["2"])
    assert EventFormatter().line(scores).endswith(" (mean over 2 clients, without 2)")
    write_facts(run, experiment)
    (run / "summary.json").write_text(json.dumps(summary))
    with closing(Store(run, experiment, True)) as store:
        log, present = EventLog(), SimpleNamespace(present=dict)
        _tell_the_beginning(log, store, present, "host:1", [], "")
    (resumed,) = (event for event in log._kept if event.kind == "resumed")
    assert (resumed.detail["scored"], resumed.detail["unscored"]) == (2, ["2"])
    lines = RunStatus.of_directory(run).lines()
    assert [line for line in lines if "mean over 2 clients, without 2" in line]
    said = " ".join(story(group_runs([read_run(run)])))
    assert "these scores are means over 2 clients, without client 2" in said


@pytest.fixture
def briefly(monkeypatch):
    """A client is dead as soon as it was not heard of for a moment."""
    monkeypatch.setattr(RemoteCohort, "lease_s", 0.6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("at_once", "buffer"),
    [(3, 2), (2, 2), (1, 1)],
    ids=["all at once", "two at once", "nobody is left to score"],
)
def test_an_asynchronous_run_goes_on_without_it(at_once, buffer, digits, tmp_path, briefly):
    schedule = {"order": "asynchronous", "rounds": 2, "buffer": buffer, "per_round": at_once}
    server = {**QUORUM, "min_clients": buffer}
    experiment = tiny_experiment(schedule=schedule, server=server)
    dead, summary = run_without_the_first(experiment, digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert [r["interaction"] for r in records] == [0, 1, 2, 3]
    assert all(len(r["cohort"]) == buffer for r in records)
    assert dead in records[0]["cohort"]
    assert summary["clients_missing"] == [str(dead)]
    follows = tiny_experiment(
        schedule={**schedule, "arrivals": str(tmp_path / "run")}, server=server
    )
    run_in_process(follows, digits, tmp_path / "again")
    again = records_of(tmp_path / "again")
    assert [r["metrics"]["loss"] for r in again] == [r["metrics"]["loss"] for r in records]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("order", ["rounds_outer", "tasks_outer"])
def test_a_synchronous_run_goes_on_without_it(order, digits, tmp_path, briefly):
    experiment = tiny_experiment(schedule={"order": order, "rounds": 2}, server=QUORUM)
    dead, summary = run_without_the_first(experiment, digits, tmp_path / "run")
    living = sorted({0, 1, 2} - {dead})
    assert [r["cohort"] for r in records_of(tmp_path / "run")[1:]] == [living] * 3
    assert summary["clients_missing"] == [str(dead)]


def test_one_that_cannot_score_ends_no_asynchronous_run(digits, tmp_path):
    """Two score after a round, as many as ``min_clients`` says."""
    schedule = {"order": "asynchronous", "rounds": 2, "buffer": 2}
    experiment = tiny_experiment(schedule=schedule, server={"min_clients": 2})
    summary = Stage(experiment, digits, tmp_path / "run", cannot_score, liars=(0,)).run()
    assert summary["state_sha256"]
    assert len(records_of(tmp_path / "run")) == 4
