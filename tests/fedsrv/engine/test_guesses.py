"""The accuracy of answers that look at no example."""

from dataclasses import replace

import numpy as np
import pytest

from fedsrv.engine.client_profile import Profile, accuracy_of_guesses
from tests.fedsrv.engine.test_plan import described


def profile(train: list[list[int]], test: list[list[int]]) -> Profile:
    found = Profile.parse(0, described(len(train)))
    return replace(found, train=np.array(train), test=np.array(test))


def test_the_most_frequent_class_is_of_all_tasks_and_of_training_data():
    """Of (1, 5) the second, which has 6 of 8 tests; of (9, 3) the first, 1 of 4; of all (10, 8)."""
    one = profile([[0, 3], [1, 2]], [[2, 0], [0, 6]])
    other = profile([[9, 3]], [[1, 3]])
    untested = profile([[0, 900]], [[0, 0]])
    found = accuracy_of_guesses([one, other, untested])
    assert found == pytest.approx({"chance": 0.5, "own": (6 / 8 + 1 / 4) / 2, "all": 0.25})
    assert accuracy_of_guesses([untested]) == {}
