"""Recorded arrivals that another run is to follow: what does not fit is one line at the start."""

import json
from types import SimpleNamespace

import pytest

from fedmodels.errors import ConfigError, RunFailed
from fedsrv.parts import check
from fedsrv.parts.buffered_rounds import BufferedRounds
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment


def asynchronous(**schedule):
    """Three clients, two tasks: six interactions."""
    schedule = {"order": "asynchronous", "rounds": 3, "buffer": 1, **schedule}
    return tiny_experiment(schedule=schedule)


@pytest.fixture
def first(digits, tmp_path):
    """Return a run of which each interaction counts one upload."""
    run_in_process(asynchronous(), digits, tmp_path / "first")
    return tmp_path / "first"


def change(run, **changed):
    """Change what a run records of its first interaction."""
    path = run / "rounds.jsonl"
    first, *rest = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(record) + "\n" for record in (first | changed, *rest)))


def test_a_run_without_arrivals_is_refused(first, digits, tmp_path):
    with pytest.raises(ConfigError, match="nothing is no run directory"):
        check(asynchronous(arrivals=str(tmp_path / "nothing")))
    plain = tiny_experiment(schedule={"order": "tasks_outer"})
    run_in_process(plain, digits, tmp_path / "plain")
    with pytest.raises(ConfigError, match="plain records no arrivals"):
        check(asynchronous(arrivals=str(tmp_path / "plain")))
    longer = asynchronous(rounds=4, arrivals=str(first))
    with pytest.raises(ConfigError, match="records 6 interactions, this run has 8"):
        run_in_process(longer, digits, tmp_path / "longer")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "records no arrivals"),
        ("{}", "records no arrivals"),
        ("[]\n5", "interaction 1 of .+ is damaged"),
        ('{"arriv', "rounds.jsonl is damaged"),
        ("[" * 100_000, "rounds.jsonl is damaged"),
    ],
)
def test_a_file_that_holds_no_records_is_one_line(text, why, tmp_path):
    (tmp_path / "rounds.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=why):
        check(asynchronous(arrivals=str(tmp_path)))


@pytest.mark.parametrize(
    "changed",
    [
        {"arrivals": {"7": 0}},
        {"arrivals": "text"},
        {"arrivals": [[0, 0, 0]]},
        {"arrivals": [["0", 0]]},
        {"arrivals": [[0, 1]]},
        {"arrivals": [[-1, 0]]},
        {"arrivals": [[1, 0]]},
        {"under_way": None},
        {"interaction": 7},
    ],
    ids=str,
)
def test_damaged_arrivals_are_one_line(changed, first):
    change(first, **changed)
    with pytest.raises(ConfigError, match=r"interaction 1 of .+ is damaged"):
        check(asynchronous(arrivals=str(first)))


def test_an_order_that_nobody_gave_is_damage(first):
    change(first, under_way=[[1, 0]])  # client 2's order of interaction 0 is counted in 2
    with pytest.raises(ConfigError, match=r"interaction 2 of .+ an order comes from nowhere"):
        check(asynchronous(arrivals=str(first)))


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ({"per_round": 2}, "has 3 clients that train at once; here 2 may"),
        ({"per_round": 2, "clients": 2}, "has client 2; this run's are 0 to 1"),
        ({"buffer": 1}, "ends with 2 uploads; here buffer = 1"),
    ],
)
def test_arrivals_that_the_schedule_does_not_allow_are_refused(schedule, why, digits, tmp_path):
    """Here more clients would train at once, or end a round, than the config says."""
    run_in_process(asynchronous(buffer=2), digits, tmp_path / "pairs")
    follows = asynchronous(**{"buffer": 2, **schedule, "arrivals": str(tmp_path / "pairs")})
    with pytest.raises(ConfigError, match=rf"interaction 1 of .+ {why}"):
        check(follows)


def test_arrivals_of_a_client_that_has_failed_here_cannot_be_followed():
    """Its order was taken back, and no upload answers it any more."""
    rounds = SimpleNamespace(under_way={0: 0})
    step = SimpleNamespace(interaction=1)
    with pytest.raises(RunFailed, match="client 1 has no order of interaction 1"):
        BufferedRounds._flush(rounds, step, {"arrivals": [(1, 0)]}, ())
