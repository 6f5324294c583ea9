"""Who is in a cohort: by examples, by who is there, and by whose upload came first."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from fedmodels.errors import ConfigError
from fedsrv.engine.availability import is_there, read_availability, with_digest
from fedsrv.engine.rounds import Engine
from fedsrv.engine.schedule import draw_cohort, steps
from fedsrv.parts import parts_of
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import records_of, tiny_experiment

TRACE = "client,from,until\n0,0,2\n0,4,5\n1,1,3\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "there.csv"
    path.write_text(TRACE)
    return path


def test_clients_with_more_examples_are_drawn_more_often():
    """One of three clients with 1, 1 and 8 examples: expected 200, 200 and 1600 of 2000 rounds."""
    weights = {0: 1, 1: 1, 2: 8}
    found = Counter(draw_cohort(0, round, [0, 1, 2], 1, weights)[0] for round in range(2000))
    assert 1520 < found[2] < 1680
    assert abs(found[0] - found[1]) < 80
    assert draw_cohort(0, 3, [2, 1, 0], 2, weights) == draw_cohort(0, 3, [0, 1, 2], 2, weights)
    assert draw_cohort(0, 3, [0, 1, 2], 2, {0: 0, 1: 5, 2: 0}) == (1,)


def test_cohorts_hold_only_clients_that_the_trace_has(trace):
    experiment = tiny_experiment(schedule={"rounds": 6, "availability": str(trace)})
    availability = read_availability(experiment)
    assert [is_there(availability, 0, r) for r in range(6)] == [True] * 2 + [False] * 2 + [
        True,
        False,
    ]
    assert is_there(availability, 2, 5)  # no row names it
    found = steps(experiment, [0, 1, 2], dict.fromkeys(range(3), 1))
    assert [s.cohort for s in found] == [(0, 2), (0, 1, 2), (1, 2), (2,), (0, 2), (2,)]


def test_rounds_without_anybody_are_left_out(trace):
    trace.write_text(TRACE + "2,0,1\n")
    experiment = tiny_experiment(schedule={"rounds": 6, "availability": str(trace)})
    found = steps(experiment, [0, 1, 2], dict.fromkeys(range(3), 1))
    assert [(s.interaction, s.round) for s in found] == [(0, 0), (1, 1), (2, 2), (3, 4)]
    trace.write_text("client,from,until\n0,9,10\n1,9,10\n2,9,10\n")
    with pytest.raises(ConfigError, match="no client is there in any round"):
        steps(experiment, [0, 1, 2], dict.fromkeys(range(3), 1))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", r"must begin with client,from,until"),
        ("a" * 200_000, r"is no CSV: field larger than field limit"),
        ("client,from,until\n3,0,1\n", "line 2: '3,0,1' is not a client of the run and two rounds"),
        ("client,from,until\n0,0,1\n0,5,5\n", "line 3: '0,5,5' is not"),
        ("client,from,until\n0,0\n", "line 2: '0,0' is not"),
        ("client,from,until\nx,0,1\n", "line 2: 'x,0,1' is not"),
    ],
)
def test_a_wrong_trace_is_one_line(trace, text, line):
    trace.write_text(text)
    with pytest.raises(ConfigError, match=line):
        read_availability(tiny_experiment(schedule={"availability": str(trace)}))


def test_a_run_goes_on_with_the_trace_it_began_with(trace):
    begun = with_digest(tiny_experiment(schedule={"availability": str(trace)}))
    assert with_digest(begun) == begun
    trace.write_text(TRACE + "2,0,1\n")
    with pytest.raises(ConfigError, match="is not the file this run began with"):
        with_digest(begun)
    trace.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        with_digest(begun)


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({"over_select": 1}, "over_select needs per_round below clients"),
        ({"sampling": "weighted"}, 'sampling = "weighted" needs per_round below clients'),
        (
            {"order": "asynchronous", "buffer": 1, "per_round": 2, "over_select": 1},
            'over_select has no meaning with order = "asynchronous"',
        ),
    ],
)
def test_keys_of_sampling_without_effect_are_refused(schedule, line):
    with pytest.raises(ConfigError, match=line):
        tiny_experiment(schedule=schedule)


def test_a_replay_counts_the_uploads_that_counted_before(digits, tmp_path):
    """Two of three get orders for one place; other arrivals would give other cohorts."""
    out = tmp_path / "run"
    experiment = tiny_experiment(
        method="local",
        schedule={"rounds": 8, "per_round": 1, "over_select": 1},
        server={"max_rollback": 99},
    )
    first = run_in_process(experiment, digits, out, arrival=random.Random(1))
    before = records_of(out)
    assert all(len(record["cohort"]) == 1 for record in before)  # type: ignore[arg-type]
    other = tmp_path / "other"
    run_in_process(experiment, digits, other, arrival=random.Random(2))
    assert [r["cohort"] for r in records_of(other)] != [r["cohort"] for r in before]
    store = Store(out, experiment, resume=True)
    store.roll_back(-1)
    cohort = InProcessCohort(experiment, digits, tmp_path / "fresh", arrival=random.Random(2))
    again = Engine(experiment, cohort, store, EventLog(), parts_of(store, EventLog())).run()
    store.close()
    assert [r["cohort"] for r in records_of(out)] == [r["cohort"] for r in before]
    assert again["state_sha256"] == first["state_sha256"]
