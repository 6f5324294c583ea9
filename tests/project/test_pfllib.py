"""The splits of PFLlib's leaderboard, on made-up labels, and its net."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.pfllib import split as splits
from benchmarks.pfllib.net import Cnn4
from benchmarks.pfllib.theirs import SERVERS

LABELS = np.repeat(np.arange(splits.CLASSES), 700)


@pytest.mark.parametrize("deal", [splits.practical, splits.pathological])
def test_all_rows_are_dealt_once_a_quarter_of_them_for_testing(deal):
    dealt = deal(y=LABELS)
    rows = np.concatenate([part for parts in dealt for part in parts])
    assert sorted(rows) == [*range(len(LABELS))]
    for train, test in dealt:
        assert len(train) == int(0.75 * (len(train) + len(test)))
    assert min(len(train) + len(test) for train, test in dealt) >= splits.LEAST


def test_a_share_is_the_first_rows_of_the_whole():
    for (train, test), (own, own_test) in zip(
        splits.practical(y=LABELS), splits.practical(share=10, y=LABELS), strict=True
    ):
        assert len(own) == max(min(20, len(train)), len(train) // 10)
        assert len(own_test) == max(min(10, len(test)), len(test) // 4)
        assert np.array_equal(own, train[: len(own)])
        assert np.array_equal(own_test, test[: len(own_test)])


def test_the_pathological_split_has_five_groups_of_two_classes():
    for client, (train, test) in enumerate(splits.pathological(y=LABELS)):
        first = client // 4 * 2
        assert set(LABELS[np.append(train, test)]) == {first, first + 1}


def test_the_net_has_the_parameters_that_it_says():
    net = Cnn4(10, (1, 28, 28))
    assert sum(p.numel() for p in net.parameters()) == 582_026
    assert net.head(net.features(torch.zeros(2, 1, 28, 28))).shape == (2, 10)


def test_both_sides_have_the_same_rows():
    from benchmarks.pfllib.__main__ import AT_THE_END, OURS, VIEWS

    assert OURS.keys() == SERVERS.keys() >= VIEWS.keys() >= {*AT_THE_END}
