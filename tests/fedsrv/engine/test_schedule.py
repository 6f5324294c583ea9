from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.errors import ConfigError
from fedsrv.engine.schedule import draw_cohort, independent_cohort, steps
from tests.conftest import tiny_experiment

EVERYBODY = (0, 1, 2)


def visits(tasks, trainers=EVERYBODY, **schedule):
    experiment = tiny_experiment(schedule={"clients": len(tasks), **schedule})
    return steps(experiment, trainers, dict(enumerate(tasks)))


def places(found):
    return [(s.round, s.task) for s in found]


def test_rounds_outer_visits_every_task_in_each_round():
    found = visits([2, 2, 2], rounds=3)
    assert places(found) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [s.interaction for s in found] == list(range(6))
    assert [s.ends_round for s in found] == [False, True] * 3
    assert [s.ends_run for s in found] == [False] * 5 + [True]
    assert {s.cohort for s in found} == {EVERYBODY}


def test_tasks_outer_stays_on_each_task():
    found = visits([2, 2, 2], rounds=3, order="tasks_outer")
    assert places(found) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert all(s.ends_round for s in found)


def test_unequal_numbers_of_tasks_rounds_outer():
    found = visits([1, 3, 2], rounds=1)
    assert [(s.task, s.cohort) for s in found] == [(0, (0, 1, 2)), (1, (1, 2)), (2, (1,))]
    assert [s.ends_round for s in found] == [False, False, True]


def test_unequal_numbers_of_tasks_tasks_outer():
    found = visits([1, 3, 2], rounds=1, per_round=2, order="tasks_outer")
    assert [s.task for s in found] == [0, 1, 2]
    assert len(found[0].cohort) == 2
    assert [s.cohort for s in found[1:]] == [(1, 2), (1,)]


def test_round_whose_cohort_has_only_few_tasks():
    """A cohort of the client with one task makes a round of one interaction, which ends it."""
    found = visits([1, 3], trainers=(0, 1), rounds=20, per_round=1)
    assert {s.cohort for s in found} == {(0,), (1,)}
    for s in found:
        assert s.ends_round == (s.task == (0 if s.cohort == (0,) else 2))


def test_only_trainers_are_drawn():
    found = visits([2, 2, 2], trainers=(0,), rounds=2)
    assert {s.cohort for s in found} == {(0,)}


def test_one_cohort_for_all_tasks_of_a_round():
    found = visits([3] * 10, trainers=range(10), rounds=5, per_round=4)
    for round in range(5):
        assert len({s.cohort for s in found if s.round == round}) == 1
    assert len({s.cohort for s in found}) > 1


@given(st.integers(0, 2**62), st.integers(0, 1000), st.integers(1, 30), st.integers(1, 30))
def test_cohorts(seed, round, candidates, size):
    ids = [3 * c for c in range(candidates)]
    cohort = draw_cohort(seed, round, ids, size)
    assert cohort == draw_cohort(seed, round, ids[::-1], size), "depends on the order of candidates"
    assert list(cohort) == sorted(set(cohort)), "ascending, without replacement"
    assert len(cohort) == min(size, candidates)
    assert set(cohort) <= set(ids)


def test_cohorts_differ_between_rounds_and_seeds():
    assert len({draw_cohort(0, r, range(100), 10) for r in range(20)}) == 20
    assert len({draw_cohort(s, 0, range(100), 10) for s in range(20)}) == 20


def test_cohorts_are_fair():
    drawn = Counter(c for r in range(1000) for c in draw_cohort(0, r, range(10), 3))
    assert all(240 < drawn[c] < 360 for c in range(10)), drawn


@pytest.mark.parametrize(("order", "tasks"), [("rounds_outer", 3), ("tasks_outer", 1)])
def test_more_rounds_keep_the_earlier_steps(order, tasks):
    """A finished run may be extended: what was done stays the beginning of the longer run."""
    one, more = (
        visits([tasks] * 8, trainers=range(8), per_round=3, order=order, rounds=rounds)
        for rounds in (3, 7)
    )
    kept = [(s.interaction, s.round, s.task, s.cohort, s.ends_round) for s in one]
    assert kept == [
        (s.interaction, s.round, s.task, s.cohort, s.ends_round) for s in more[: len(one)]
    ]


def test_nobody_to_visit():
    assert visits([0, 0, 0], rounds=2) == []


def test_independent_chances_by_hand():
    chances = {0: 0.1, 1: 0.5, 2: 0.3}
    assert independent_cohort(lambda _, c: chances[c], 0, [2, 1, 0], 0.4) == (0, 2)
    assert independent_cohort(lambda _, c: 1.0, 0, [2, 1], 0.4) == ()


@pytest.mark.parametrize("order", ["rounds_outer", "tasks_outer"])
def test_independent_chances_favour_nobody(order):
    """Each of 6 clients with a chance of 1/6 in 3,000 interactions: 500 times each, with a standard
    deviation of 20.4; nobody in (5/6)^6 of them, 1,005, with one of 25.9."""
    found = visits([5] * 6, range(6), rounds=600, per_round=1, sampling="poisson", order=order)
    assert len(found) == 3000
    assert [s.interaction for s in found] == [*range(3000)]
    times = Counter(c for s in found for c in s.cohort)
    assert all(abs(times[c] - 500) < 5 * 20.4 for c in range(6))
    assert abs(sum(not s.cohort for s in found) - 1004.7) < 5 * 25.9


def test_independent_chances_are_drawn_anew_for_each_task_of_a_round():
    """A client is in both of two tasks of a round by a chance of 1/9, and not of 1/3: in 222 of
    2,000 rounds, with a standard deviation of 14.1."""
    found = visits([2] * 3, rounds=2000, per_round=1, sampling="poisson")
    both = Counter(c for one, two in zip(found[::2], found[1::2], strict=True)
                   for c in {*one.cohort} & {*two.cohort})  # fmt: skip
    assert all(abs(both[c] - 222.2) < 5 * 14.1 for c in range(3))


def test_a_client_that_is_set_aside_changes_nobody_elses_chances():
    experiment = tiny_experiment(
        schedule={"clients": 4, "rounds": 200, "per_round": 1, "sampling": "poisson"}
    )
    every = steps(experiment, range(4), dict.fromkeys(range(4), 1))
    left = steps(experiment, range(4), dict.fromkeys(range(4), 1), aside={0: 50})
    for one, other in zip(every, left, strict=True):
        gone = {0} if one.interaction >= 50 else set()
        assert {*other.cohort} == {*one.cohort} - gone
    with pytest.raises(ConfigError, match="none is left"):
        steps(experiment, range(4), dict.fromkeys(range(4), 1), aside=dict.fromkeys(range(4), 0))
