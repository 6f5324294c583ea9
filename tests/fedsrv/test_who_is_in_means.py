"""Each mean says over how many clients it is, and from when on it is over others."""

from __future__ import annotations

import json

import pytest

from fedcli.data.store.growing import add_task
from fedsrv.coordinator import write_facts
from fedsrv.dashboard.live import LivePage
from fedsrv.parts.stages import RunPaused
from fedsrv.progress.event_lines import EventFormatter
from fedsrv.progress.events import Event
from fedsrv.progress.run_status import RunStatus
from fedsrv.report.frame import group_runs
from fedsrv.report.page import page
from fedsrv.report.story import story
from fedsrv.state.record import MeansOver, means_of
from fedsrv.state.run_record import read_run
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own

SINCE = "since round 2 without 2"


def record(round_, cohort, metrics=("a_loc", "a_sel"), **views):
    rows = {name: {"views": {view: {} for view in some}} for name, some in views.items()}
    return {
        "round": round_, "cohort": cohort, "metrics": dict.fromkeys(metrics, 0.5),
        "clients": {name.lstrip("c"): row for name, row in rows.items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    """An open run of three sites, of which one retires before the second month of another."""
    place = tmp_path_factory.mktemp("shrunk")
    for client in range(3):
        own(place / "data", client, class_names=["a", "b"])
    schedule = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 3}
    experiment = tiny_experiment(
        method="fedrep", net={"name": "mlp", "hidden": [4]},
        schedule={**schedule, "participants": "new"},
    ).model_copy(update={"scenario": None, "data": None})  # fmt: skip
    run, heard = place / "run", list[Event]()
    with pytest.raises(RunPaused):
        run_in_process(experiment, place / "data", run, at_rest="pause")
    add_task(place / "data", 0, images(place / "may", "a", "b"))
    options = {"resume": True, "at_rest": "close", "retired": [2], "hear": heard.append}
    summary = run_in_process(experiment, place / "data", run, **options)
    write_facts(run, experiment)
    (run / "summary.json").write_text(json.dumps(summary))
    return run, summary, heard


def test_the_log_and_the_status_say_over_whom_and_since_when(shrunk):
    """The log said that a_sel, of the one client that trained, was a mean over all."""
    run, _, heard = shrunk
    (scores,) = (event for event in heard if event.kind == "scores")
    text = f" (mean over 2 clients, a_sel over 1; {SINCE})"
    assert EventFormatter().line(scores).endswith(text)
    for status in (RunStatus.of([scores]), RunStatus.of_directory(run)):
        assert [line for line in status.lines() if line.startswith("scores") and text in line]
        told = status.to_dict()
        assert (told["means"]["a_loc"], told["means"]["a_sel"]) == (2, 1)
        assert told["changed"] == SINCE


def test_the_summary_and_the_report_say_it_too(shrunk):
    run, summary, _ = shrunk
    assert summary["means_over"]["a_loc"] == 2
    assert summary["means_changed"] == [(1, ["2"], [])]
    groups = group_runs([read_run(run)])
    said = " ".join(story(groups))
    assert f"the mean is over other clients than before {SINCE}. " in said
    assert "it is over 2 clients now" in said
    assert "round 2: the mean is over other clients" in page(groups)
    assert f"<p>mean over 2 clients, a_sel over 1; {SINCE}</p>" in LivePage(run).html()


def test_each_accuracy_has_the_clients_of_its_own_view():
    both, received = ("after_downlink", "after_local"), ("after_downlink",)
    metrics = ("a_loc", "a_loc_received", "a_loc_trained", "a_sel")
    found = record(0, [0, 7], metrics, c0=both, c1=received, c2=received)
    assert means_of(found) == {"a_loc_received": 3, "a_loc_trained": 1, "a_loc": 3, "a_sel": 1}
    found["metrics"]["a_loc"] = 0.7
    assert means_of(found)["a_loc"] == 1
    assert means_of({"round": 0}) == {}


def test_a_cohort_that_alone_is_scored_changes_no_population():
    rounds = [
        record(0, [0, 1], c0=("global",), c1=("global",)),
        {"round": 1, "clients": {"0": {"loss": 0.5}}},
        record(2, [0], c0=("after_local",)),
        record(3, [1, 2], c1=("global",), c2=("global",)),
    ]
    assert MeansOver(rounds).changes == [(3, ["0"], ["2"])]


def test_where_clients_come_and_go_each_round_the_last_changes_are_kept():
    """Else a summary would grow with rounds times clients."""
    rounds = [record(n, [n], **{f"c{n}": ("global",)}) for n in range(50)]
    changes = MeansOver(rounds).changes
    assert (len(changes), changes[-1]) == (20, (49, ["48"], ["49"]))
