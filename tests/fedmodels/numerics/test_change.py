"""What a change costs and how soon it is told, by hand-computed numbers."""

from __future__ import annotations

import pytest

from fedmodels.numerics.change import changes, detections, recoveries, transfer_by_domain


def test_recovery_counts_rounds_from_the_first_of_the_new_task():
    shown = ["a", "a", "b", "c"]
    assert changes(shown) == [2, 3]
    scored = [
        (0, 0, {0: 0.9}),
        (1, 1, {0: 0.9, 1: 0.8}),
        (2, 2, {2: 0.3}),
        (3, 2, {2: 0.74}),
        (4, 2, {2: 0.75}),  # 0.05 below the level: recovered in three rounds
        (5, 3, {3: 0.2}),
        (6, 3, {3: 0.5}),
    ]
    began = {0: 0, 1: 1, 2: 2, 3: 5}
    assert recoveries(scored, shown, began) == [(3, True), (2, False)]
    assert recoveries(scored[:3], shown, began) == [(1, False)]
    assert recoveries(scored[:2], shown, began) == []
    # a next change before the client recovered ends the count
    assert recoveries([*scored[:3], *scored[5:]], shown, began)[0] == (1, False)


def test_rounds_without_a_score_count_from_the_first_of_the_task():
    """Every second round is scored; and task 1 of the second client has nothing to test on."""
    scored = [(1, 0, {0: 0.9}), (3, 1, {1: 0.5}), (5, 1, {1: 0.9})]
    assert recoveries(scored, "ab", {0: 0, 1: 2}) == [(4, True)]
    untested = [(0, 0, {0: 0.9}), (1, 1, {0: 0.9}), (2, 2, {0: 0.9, 2: 0.3})]
    assert recoveries(untested[:2], "aba", {1: 1, 2: 2}) == []
    assert recoveries(untested, "aba", {1: 1, 2: 2}) == [(1, False)]


def test_the_first_alarm_since_a_change_detects_it():
    shown = ["a", "a", "b", "b", "b", "a", "a"]  # changes at 2 and 5
    assert detections({3, 4}, shown) == ([1], 1, 1, 4)
    assert detections({1, 2, 6}, shown) == ([0, 1], 0, 1, 4)
    assert detections(set(), shown) == ([], 2, 0, 4)
    assert detections({5}, ["a"]) == ([], 0, 0, 0)


def test_forgetting_and_backward_transfer_by_domain():
    scored = [
        (0, 0, {0: 0.8}),
        (1, 1, {0: 0.7, 1: 0.9}),  # domain 0 again: mean 0.8
        (2, 2, {0: 0.6, 1: 0.6, 2: 0.9}),
        (3, 3, {0: 0.5, 1: 0.5, 2: 0.6, 3: 0.9}),
    ]
    forgotten, transfer = transfer_by_domain(scored, [0, 0, 1, 2])
    assert forgotten == pytest.approx({0: 0.3, 1: 0.3})
    assert transfer == pytest.approx({0: -0.3, 1: -0.3})
    # what the last task shows is not forgotten
    assert transfer_by_domain(scored, [0, 0, 1, 0])[0].keys() == {1}


def test_a_domain_may_be_known_better_than_ever_before():
    """Forgetting is below 0 then: the best *earlier* accuracy, not that of the last task itself."""
    scored = [(0, 0, {0: 0.5}), (1, 1, {0: 0.7, 1: 0.9})]
    forgotten, transfer = transfer_by_domain(scored, [0, 1])
    assert forgotten == pytest.approx({0: -0.2})
    assert transfer == pytest.approx({0: 0.2})


def test_a_domain_without_a_score_at_its_own_tasks_is_left_out():
    """Its task 1 has nothing to test on, and it was away at task 2."""
    scored = [(0, 0, {0: 0.8}), (1, 1, {0: 0.7}), (3, 3, {2: 0.6}), (4, 4, {2: 0.5, 4: 0.9})]
    assert transfer_by_domain(scored, [0, 1, 1, 0, 0]) == ({}, {})
