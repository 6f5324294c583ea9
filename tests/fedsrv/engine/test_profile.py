import json

import pytest

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import EVALUATOR, Problem
from fedsrv.engine.client_profile import Profile, untrained
from tests.fedsrv.engine.test_admission import FACTS, text


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


def without(key):
    return json.dumps({k: v for k, v in FACTS.items() if k != key})


def test_a_description():
    profile = Profile.parse(0, text())
    assert profile.problem == Problem((3, 8, 8), 2)
    assert profile.num_tasks == 2
    assert profile.train.tolist() == [[3, 1], [0, 5]]
    assert profile.test.tolist() == [[1, 0], [0, 2]]
    assert [profile.labels(task) for task in range(3)] == [(0, 1), (1,), ()]


def test_clients_without_a_training_example_are_named():
    none = text(tasks=[{"train": [0, 0], "test": [1, 0]}])
    profiles = {c: Profile.parse(c, text() if c == 1 else none) for c in range(8)}
    assert untrained({1: profiles[1]}) == ""
    assert untrained({c: profiles[c] for c in (0, 1)}).startswith(
        "no training example at client 0: if that"
    )
    assert untrained(profiles).startswith(
        "no training example at clients 0, 2, 3, 4, 5 and 2 more:"
    )


def test_what_clients_of_a_partition_say_alike_is_held_once():
    names = ["left", "right"]
    one, other = (
        Profile.parse(c, text(partition={"seed": 3}, class_names=names, tasks=FACTS["tasks"][:c]))
        for c in (1, 2)
    )
    assert (one.num_tasks, other.num_tasks) == (1, 2)
    for fact in ("problem", "limits", "class_names", "origin"):
        assert getattr(one, fact) is getattr(other, fact)
    assert Profile.parse(1, text(partition={"seed": 4})).origin == {"seed": 4}


def test_the_evaluator_has_no_tasks():
    assert Profile.parse(EVALUATOR, text(tasks=[])).train.shape == (0, 2)
    assert Profile.parse(EVALUATOR, without("tasks")).num_tasks == 0


def test_what_a_client_announces_is_understood(digits):
    from fedcli.data.store.client_data import ClientData

    data = ClientData(digits / "1")
    profile = Profile.parse(1, data.announcement())
    assert profile.problem == data.problem
    assert profile.train.tolist() == [list(task.train) for task in data.tasks]


@pytest.mark.parametrize(
    "given",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        without("format"),
        without("input_shape"),
        without("num_classes"),
        text(format=2),
        text(input_shape=[]),
        text(input_shape=[3, 0]),
        text(input_shape=[-1]),
        text(input_shape=7),
        text(input_shape=["a"]),
        text(num_classes=0),
        text(num_classes=10**9),
        text(num_classes="many"),
        text(num_classes=2.0),
        text(input_shape=[True]),
        text(input_shape=[3.5]),
        text(input_shape=[1, 1, 1, 1, 1]),
        text(input_shape=[10_000, 10_000]),
        text(tasks=[{"train": [2**31, 2], "test": [1, 2]}]),
        text(tasks=7),
        text(tasks=None),
        text(tasks=[{"train": [1, 2, 3], "test": [1, 2]}]),
        text(tasks=[{"train": [1, 2]}]),
        text(tasks=[{"train": [-1, 2], "test": [1, 2]}]),
        text(tasks=[{"train": [2**70, 2], "test": [1, 2]}]),
        text(tasks=[{"train": [1.5, 2], "test": [1, 2]}]),
        text(tasks=[{"train": [[1], [2]], "test": [1, 2]}]),
        text(num_classes=float("inf")),
        "[" * 100_000,
        text(partition=nested(300)),
    ],
    ids=range(34),
)
def test_what_is_no_description(given):
    with pytest.raises(PayloadError, match=r"client 4: client\.json") as caught:
        Profile.parse(4, given)
    assert "\n" not in str(caught.value)
