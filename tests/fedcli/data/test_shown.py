"""Domains, concepts and borders that overlap: what each example shows, by hand-computed numbers."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from fedcli.data.cuts.cut_input import Partition, TaskIndices
from fedcli.data.cuts.shown import Shown, blurred, shown
from fedcli.data.sets import looks
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedcli.data.store.partition_store import PartitionStore
from fedcli.data.store.partition_writer import Layout
from fedmodels.config.data import Data
from fedmodels.config.scenario import Scenario
from fedmodels.config.timeline import Concepts
from fedmodels.errors import ConfigError
from tests.conftest import tiny_experiment

SCENARIOS: TypeAdapter[Scenario] = TypeAdapter(Scenario)
QUIET = Console(file=io.StringIO())
TURNS = ["plain", "rotate 90", "rotate 180", "rotate 270"]


def scenario(**table: Any) -> Any:
    return SCENARIOS.validate_python({"kind": "iid", **table})


def timeline(**table: Any) -> Concepts:
    return Concepts.model_validate({"show": ["plain", "swap 0 1", "swap 2 3"], **table})


def stream(line: Concepts, client: int, tasks: int) -> list[int]:
    return [line.main(client, task, tasks) for task in range(tasks)]


# --- what is shown when


@pytest.mark.parametrize(
    ("table", "client", "expected"),
    [
        ({}, 0, [0, 0, 1, 1, 2, 2, 2]),  # 7 // 3 = 2 tasks each
        ({"every": 1}, 5, [0, 1, 2, 2, 2, 2, 2]),
        ({"when": "recurring"}, 0, [0, 1, 2, 0, 1, 2, 0]),
        ({"when": "recurring", "every": 2}, 0, [0, 0, 1, 1, 2, 2, 0]),
        ({"every": 1, "waves": 3}, 4, [0, 0, 1, 2, 2, 2, 2]),  # wave 4 mod 3 = 1
        ({"every": 1, "first": "by_client"}, 4, [1, 2, 0, 0, 0, 0, 0]),
        ({"when": "never", "first": "by_client"}, 5, [2] * 7),
        ({"every": 1, "clients": [1]}, 0, [0] * 7),
        ({"order": [[0, 2], [1]]}, 0, [0, 2, 2, 2, 2, 2, 2]),
        ({"order": [[0, 2], [1]]}, 3, [1] * 7),
    ],
)
def test_a_timeline_says_what_each_task_shows(table, client, expected):
    assert stream(timeline(**table), client, 7) == expected


def test_a_gradual_change_is_a_mixture_that_moves():
    line = Concepts(show=("plain", "swap 0 1"), when="gradual", every=4)
    second = [line.shares(0, task, 6)[1] for task in range(6)]
    assert second == [0, 0.25, 0.5, 0.75, 1, 1]
    assert line.main(0, 2, 6) == 1  # of equal ones the later one


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"show": ["swapp 1 2"]}, "Did you mean 'swap'"),
        ({"show": ["swap 1"]}, "takes 2 numbers, not 1"),
        ({"show": ["swap 1 b"]}, "takes numbers, not '1 b'"),
        ({"show": ["noise 2"]}, "a number from 0 to 1, not 2"),
        ({"show": ["swap 0.5 1"]}, "a whole number"),
        ({"show": ["from mnist"]}, "'from' is not known"),
        ({"show": [""]}, "'' is not known"),
        ({"show": ["plain"], "when": "never"}, "by_client"),
        (
            {"show": ["plain"], "when": "never", "first": "by_client", "every": 2},
            "every does nothi",
        ),
        (
            {"show": ["plain"], "when": "never", "first": "by_client", "clients": [1]},
            "clients does",
        ),
        ({"show": ["plain"], "when": "gradual", "every": 1}, "raise every"),
        ({"show": ["plain"], "order": [[1]]}, "show lists 0 to 0"),
        ({"show": ["plain"], "order": [[0]], "waves": 2}, "leave waves out"),
        ({"show": ["plain", "swap 0 1", "plain"]}, "show has 'plain' twice: list it once"),
    ],
)
def test_a_timeline_that_says_nothing_possible_is_refused(table, words):
    with pytest.raises((ConfigError, ValidationError), match=words):
        Concepts.model_validate(table)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"blur": 0.3}, "one task each"),
        ({"kind": "drawn", "tasks": 2, "blur": 0.3}, "tasks share examples"),
        (
            {"kind": "dirichlet_pooled", "domains": {"show": ["from a", "from b"]}},
            "take kind iid",
        ),
        ({"kind": "replay_gradual", "domains": {"show": ["plain", "invert"]}}, "every is needed"),
        ({"domains": {"show": ["plain"], "whole": True}}, "whole = true"),
        ({"domains": {"show": ["from a", "plain"]}}, "give it for all"),
        ({"domains": {"show": ["from a + from b"]}}, "one domain, not several"),
        ({"domains": {"show": ["from a", "from b"], "when": "gradual"}}, "blur for mixed"),
    ],
)
def test_pieces_that_do_not_fit_the_kind_are_refused(table, words):
    with pytest.raises((ConfigError, ValidationError), match=words):
        scenario(**table)


def test_tasks_that_an_open_run_gets_later_change_no_earlier_one():
    table = scenario(tasks=4, concepts={"show": ["plain", "swap 0 1"]})
    assert [show[1] for show in table.shown(0, 9)] == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    table = scenario(tasks=[4, 2], concepts={"show": ["plain", "swap 0 1"]})
    assert [show[1] for show in table.shown(1, 2)] == [0, 1]


def test_a_scenario_without_them_is_the_partition_that_it_was():
    assert not {"domains", "concepts", "blur"} & scenario(tasks=3).identity().keys()
    assert scenario(tasks=3, blur=0.5).identity()["blur"] == 0.5


# --- rows


def two_clients() -> Partition:
    """Client 0 has the examples 0 1 | 2 3, client 1 has 4 5 | 6 7; tests 0 | 1 and 2 | 3 of 5."""
    at = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    tests = [[[0], [1]], [[2], [3]]]
    clients = tuple(
        tuple(TaskIndices(np.array(x), np.array(y)) for x, y in zip(*pair, strict=True))
        for pair in zip(at, tests, strict=True)
    )
    return Partition(clients, np.arange(5))


def test_each_example_is_a_row_of_its_domain_and_its_concept():
    table = scenario(
        tasks=2,
        domains={"show": ["plain", "invert"], "when": "never", "first": "by_client"},
        concepts={"show": ["plain", "swap 0 1"]},
    )
    made, train, test = shown(table, two_clients(), 8, 0)
    assert train.examples.tolist() == list(range(8))
    assert train.domains.tolist() == [0] * 4 + [1] * 4
    assert train.concepts.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [task.train.tolist() for task in made.clients[1]] == [[4, 5], [6, 7]]
    # the test example 4 tests nobody: it is shown in some way that somebody has
    assert test.examples.tolist() == [0, 1, 2, 3, 4]
    assert test.domains.tolist()[:4] == [0, 0, 1, 1]
    assert test.concepts.tolist()[:4] == [0, 1, 0, 1]
    assert made.global_test.tolist() == [0, 1, 2, 3, 4]


def test_what_an_example_of_a_mixture_shows_does_not_follow_from_its_place():
    """Files are often sorted, by class or by time: a look in their order would follow those."""
    table = scenario(
        tasks=3, concepts={"show": ["plain", "swap 0 1"], "when": "gradual", "every": 2}
    )
    tasks = tuple(TaskIndices(np.arange(40 * t, 40 * t + 40), np.array([t])) for t in range(3))
    orders = set()
    for seed in range(3):
        _, train, _ = shown(table, Partition((tasks,), np.arange(3)), 120, seed)
        mixed = train.concepts[(train.examples >= 40) & (train.examples < 80)]
        assert np.bincount(mixed).tolist() == [20, 20]
        for half in (mixed[:20], mixed[20:]):
            assert 3 < half.sum() < 17
        orders.add(tuple(mixed.tolist()))
    assert len(orders) == 3


def test_an_example_of_two_clients_has_a_row_for_each_look():
    both = (TaskIndices(np.array([0, 2]), np.array([0])),)
    table = scenario(domains={"show": ["plain", "invert"], "when": "never", "first": "by_client"})
    made, train, test = shown(table, Partition((both, both), np.arange(2)), 3, 0)
    assert train.examples.tolist() == [0, 0, 2, 2]
    assert train.domains.tolist() == [0, 1, 0, 1]
    assert [tasks[0].train.tolist() for tasks in made.clients] == [[0, 2], [1, 3]]
    assert made.global_test[0] == 0  # as to the first client
    assert test.examples[made.global_test].tolist() == [0, 1]


def test_pooled_partitions_count_through_training_and_test_rows():
    tasks = (TaskIndices(np.array([0, 4]), np.array([1, 3])),)
    table = scenario(domains={"show": ["invert"]})
    made, train, test = shown(table, Partition((tasks,), np.array([3]), pooled=True), 3, 0)
    assert (train.examples.tolist(), test.examples.tolist()) == ([0, 1], [0, 1])
    assert [made.clients[0][0].train.tolist(), made.clients[0][0].test.tolist()] == [[0, 3], [1, 2]]
    assert made.global_test.tolist() == [2]


def test_a_concept_that_nobody_meets_is_refused():
    table = scenario(tasks=2, concepts={"show": ["plain", "swap 0 1", "swap 1 2"]})
    with pytest.raises(ConfigError, match="'swap 1 2' is shown to no client"):
        shown(table, two_clients(), 8, 0)


def test_a_share_of_each_task_comes_from_the_others():
    tasks = tuple(
        TaskIndices(np.arange(20 * t, 20 * t + 20), np.arange(10 * t, 10 * t + 10))
        for t in range(3)
    )
    made = blurred(Partition((tasks, tasks[:1]), np.arange(30)), 0.4, 0)
    for number, task in enumerate(made.clients[0]):
        assert (len(task.train), len(task.test)) == (20, 10)
        came = task.train // 20
        assert [int((came == t).sum()) for t in range(3)] == [
            12 if t == number else 4 for t in range(3)
        ]
        assert (task.test // 10 == number).sum() == 6
    assert made.clients[1] == tasks[:1]


def test_borders_of_single_tasks_are_refused():
    one = (TaskIndices(np.arange(4), np.arange(2)),)
    with pytest.raises(ConfigError, match=r"blur exchanges .* one task each"):
        blurred(Partition((one, one), np.arange(2)), 0.5, 0)


def test_a_change_at_a_client_that_is_not_there_is_refused():
    domains = {"show": ["plain", "invert"], "first": "by_client", "clients": [0, 99]}
    with pytest.raises((ConfigError, ValidationError), match=r"client 99, and with .* from 0 to 3"):
        tiny_experiment(
            scenario={"kind": "iid", "tasks": 2, "domains": domains}, schedule={"clients": 4}
        )


def test_an_example_of_the_global_test_set_keeps_the_domain_that_it_has():
    """Test examples 0 to 3 are of domains 0, 1, 1, 0, and 4 of one that no task shows."""
    table = scenario(domains={"show": ["from a", "from b"], "when": "never", "first": "by_client"})
    clients = tuple((TaskIndices(np.array([i]), np.array([i])),) for i in range(2))
    origins = np.array([0, 1, 0, 1, 1, 0, -1])
    for seed in range(4):
        made, _, test = shown(table, Partition(clients, np.arange(5)), 2, seed, origins)
        at = made.global_test
        assert test.examples[at].tolist() == [0, 1, 2, 3]
        assert test.domains[at].tolist() == [0, 1, 1, 0]


# --- looks and meanings


def test_looks_by_hand():
    image = np.array([[[[0.0, 0.5], [0.25, 1.0]]]])
    rng = np.random.default_rng(0)
    assert np.allclose(looks.LOOK["invert"](image, rng), 1 - image)
    # the mean is 0.4375; severity 2 keeps half of the distance from it
    assert np.allclose(
        looks.LOOK["contrast"](image, 2, rng).ravel(), [0.21875, 0.46875, 0.34375, 0.71875]
    )
    assert np.allclose(looks.LOOK["brightness"](image, 3, rng).ravel(), [0.15, 0.65, 0.4, 1.0])
    red = np.array([0.4, 0.2, 0.0]).reshape(1, 3, 1, 1)
    assert np.allclose(looks.LOOK["brightness"](red, 4, rng).ravel(), [0.6, 0.3, 0.0])
    assert looks.LOOK["colour"](image, 120, rng)[0, :, 1, 1].tolist() == [0, 1, 0]  # green
    flat = np.full((20, 1, 28, 28), 0.5)
    assert looks.LOOK["noise"](flat, 5, rng).std() == pytest.approx(0.10, rel=0.02)
    point = np.zeros((1, 1, 9, 9))
    point[..., 4, 4] = 1
    spread = looks.LOOK["blur"](point, 5, rng)[0, 0]
    weights = np.exp(-(np.arange(-4, 5) ** 2) / 2)
    assert np.allclose(spread[4], weights * weights[4] / weights.sum() ** 2)
    assert np.abs(looks.LOOK["jpeg"](flat, 5, rng) - 0.5).max() < 0.01


def test_jpeg_takes_images_of_one_or_three_channels():
    data = load(Data(name="digits")).at(train=np.arange(4), test=np.arange(2))
    four = data.showing(np.repeat(data.train.x, 4, 1), np.repeat(data.test.x, 4, 1))
    rows = [Shown(np.arange(n), np.zeros(n, int), np.zeros(n, int)) for n in (4, 2)]
    table = scenario(domains={"show": ["jpeg 1"]})
    assert looks.as_shown(data, table, *rows, 0).train.x.shape == data.train.x.shape
    with pytest.raises(ConfigError, match="grey images, and for those of three colours"):
        looks.as_shown(four, table, *rows, 0)


def test_turns_by_hand():
    image = np.arange(9, dtype=np.uint8).reshape(1, 1, 3, 3)
    (made,) = looks._looks(image, [("rotate", (90.0,))], 255.0, np.random.default_rng(0))
    assert made[0].tolist() == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]
    one = np.zeros((1, 1, 5, 5))
    one[0, 0, 1, 3] = 1
    exact = looks._quarters(one, 1)
    assert np.allclose(looks.LOOK["rotate"](one, 90, None), exact, atol=1e-9)
    (shifted,) = looks._looks(one - 1, [("rotate", (45.0,))], 1.0, np.random.default_rng(0))
    assert shifted[0, 2, 2] == pytest.approx(-1)  # numbers are no shades: none is cut at 0
    window = np.array([[[1.0, 0.0, 7.0, 0.0, 2.0, 3.0]]])
    assert np.allclose(looks.turned(window, 90), [[[0, 1, 7, -2, 0, 3]]])


def meant(word: str, *numbers: float, x: Any = None, y: Any = (0, 1, 2, 3)) -> list[int]:
    rows = np.zeros((len(y), 2)) if x is None else np.array(x)
    found = looks.meant(word, numbers, rows, np.array(y), 4, np.random.default_rng(0))
    return found.tolist()


def test_meanings_by_hand():
    assert meant("swap", 1, 3) == [0, 3, 2, 1]
    assert meant("merge", 1, 3) == [0, 3, 2, 3]
    assert meant("reverse") == [3, 2, 1, 0]
    assert meant("noise", 0.0) == [0, 1, 2, 3]
    assert all(new != old for new, old in zip(meant("noise", 1.0), range(4), strict=True))
    points = [[0.5, 0.47], [0.5, 0.49], [0.2, 0.5], [0.9, 0.9]]  # sin 0.5 = 0.4794
    assert meant("sine", x=points) == [1, 0, 0, 0]
    assert meant("circle", 0.2, 0.5, 0.15, x=points) == [1, 1, 0, 1]
    assert meant("sea", 9, x=[[4, 5, 0], [4, 5.1, 0], [0, 0, 9], [9, 9, 9]]) == [1, 0, 1, 0]
    with pytest.raises(ConfigError, match="there is no class 7"):
        meant("swap", 1, 7)
    with pytest.raises(ConfigError, match="rows of two numbers"):
        looks.meant("sea", (9,), np.zeros((1, 1, 8, 8)), np.array([0]), 2, np.random.default_rng(0))


# --- data sets, dealt out


def dealt(tmp_path: Any, data: dict[str, Any], layout: Layout, clients: int, **table: Any) -> Any:
    root = tmp_path / layout.value
    run_partition(Data(**data), scenario(**table), clients, 0, root, QUIET, layout=layout)
    if layout is Layout.STORE:
        store = PartitionStore(root)
        return [store.client(client) for client in range(clients)]
    return [ClientData(root / str(client)) for client in range(clients)]


@pytest.mark.parametrize("layout", [*Layout])
def test_clients_see_what_the_pieces_together_say(tmp_path, layout):
    """A long tail, classes that come in turn, turned images, swapped labels and mixed borders."""
    pieces = {
        "kind": "per_class_shards", "shards": 4, "tasks": 3, "gamma": 0.5, "blur": 0.2,
        "domains": {"show": TURNS, "when": "recurring", "first": "by_client"},
        "concepts": {"show": ["plain", "swap 1 2"], "every": 2, "waves": 2},
    }  # fmt: skip
    plain = load(Data(name="digits"))
    known = {x.tobytes(): int(y) for x, y in zip(plain.train.x, plain.train.y, strict=True)}
    swapped = {1: 2, 2: 1}
    for client, data in enumerate(dealt(tmp_path, {"name": "digits"}, layout, 4, **pieces)):
        of_task = {0: 0, 1: 0, 2: 0}
        for task in range(3):
            images, labels = data.arrays(task, "train")
            for image, label in zip(images, labels, strict=True):
                turns = [n for n in range(4) if np.rot90(image, -n, (-2, -1)).tobytes() in known]
                (turn,) = turns
                was = known[np.rot90(image, -turn, (-2, -1)).tobytes()]
                own = (turn - client) % 4  # the task whose domain the image shows
                of_task[task] += own == task
                changed = own == 2 and client % 2 == 0  # the second wave would change after the end
                assert label == (swapped.get(was, was) if changed else was)
            assert 0.75 < of_task[task] / len(labels) < 0.85


def test_whole_domains_are_each_dealt_from_all_examples(tmp_path):
    """IFCA's rotated MNIST, section 6.1: each turned copy of the data set is cut by itself."""
    table = {"domains": {"show": TURNS, "when": "never", "first": "by_client", "whole": True}}
    clients = dealt(tmp_path, {"name": "digits"}, Layout.DIRECTORIES, 8, **table)
    assert [sum(c.counts(0, "train")) for c in clients] == [719] * 8  # 1438 in two, four times
    upright = [np.rot90(c.arrays(0, "train")[0], -(i % 4), (-2, -1)) for i, c in enumerate(clients)]
    sets = [{x.tobytes() for x in part} for part in upright]
    whole = {x.tobytes() for x in load(Data(name="digits")).train.x}
    assert all(sets[i] | sets[i + 4] == whole for i in range(4))
    assert sets[0] != sets[1]  # not one cut for all


@pytest.mark.parametrize(("name", "width"), [("sine", 2), ("circle", 2), ("sea", 3)])
def test_synthetic_streams(name, width):
    made = load(Data(name=name))
    assert made.train.x.shape == (55_000, width)
    share = made.train.y.mean()
    # 1 - cos 1; 1 - pi 0.15^2; 81/200: what lies below the line
    assert share == pytest.approx({"sine": 0.4597, "circle": 0.9293, "sea": 0.405}[name], abs=0.01)
    z = (made.train.x - made.mean[0]) / made.std[0]
    assert z.mean() == pytest.approx(0, abs=0.02)
    assert z.std() == pytest.approx(1, abs=0.02)


def test_persons_go_from_one_device_to_the_next(tmp_path):
    """Persons 0 and 2 have both devices; 1 has a phone alone, and takes no part."""
    owners = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    x = np.zeros((100, 128, 6), dtype=np.float32)
    x[:, 0, 0] = np.arange(100)
    subject, device = np.repeat(np.array(owners), 20, axis=0).T
    names = {"label_names": ["walk", "sit"], "device_names": ["phone (A)", "watch (B)"]}
    arrays = {"X": x, "y": np.arange(100) % 2, "subject": subject, "device": device}
    np.savez(tmp_path / "wisdm.npz", **arrays, **names)
    table = {
        "kind": "natural", "tasks": 2,
        "domains": {"show": ["from phone", "from watch + turn 90"], "first": "by_client"},
    }  # fmt: skip
    data = {"name": "wisdm", "root": str(tmp_path)}
    first, second = dealt(tmp_path, data, Layout.DIRECTORIES, 2, **table)
    assert (first.file.name, second.file.name) == ("subject 0", "subject 2")

    def seen(data: ClientData, task: int) -> set[float]:
        """Which windows: a turned one has its first axis in the second."""
        found = [data.arrays(task, part)[0][:, 0, :2] for part in ("train", "test")]
        return {float(row.max()) for row in np.concatenate(found)}

    assert seen(first, 0) == set(range(20))
    assert seen(first, 1) == set(range(20, 40))
    assert seen(second, 0) == set(range(80, 100))  # begins with the watch
    assert seen(second, 1) == set(range(60, 80))
    assert first.arrays(1, "train")[0][:, 0, 0].max() < 1e-4  # turned


def test_digits_of_three_sets_at_one_size(tmp_path, monkeypatch):
    from fedcli.data.sets import images

    made = load(Data(name="digits")).at(train=np.arange(30), test=np.arange(10))

    def small(source: Any) -> Any:
        return made

    def enlarged(source: Any) -> Any:
        zeros = [np.zeros((len(y), 1, 28, 28), np.uint8) for y in (made.train.y, made.test.y)]
        return made.showing(*zeros)

    for name, load_it in {"digits": small, "mnist": enlarged, "emnist_byclass": enlarged}.items():
        monkeypatch.setattr(images, name, load_it)
    show = ["from scikit-learn", "from mnist"]
    table = {"domains": {"show": show, "when": "never", "first": "by_client"}}
    first, second = dealt(tmp_path, {"name": "digits-of-three"}, Layout.DIRECTORIES, 2, **table)
    assert [sum(each.counts(0, "train")) for each in (first, second)] == [30, 30]
    x = first.arrays(0, "train")[0]
    assert (x.shape, x.dtype) == ((30, 1, 28, 28), np.uint8)
    assert x.mean() / 255 == pytest.approx(made.train.x.mean() / 16, rel=0.02)
    assert second.arrays(0, "train")[0].max() == 0
    table["domains"]["show"] = ["from usps", "from mnist"]
    with pytest.raises(ConfigError, match="no domain 'usps': it has mnist, emnist, scikit-learn"):
        dealt(tmp_path / "again", {"name": "digits-of-three"}, Layout.STORE, 2, **table)
