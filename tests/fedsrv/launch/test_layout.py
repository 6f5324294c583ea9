"""Who shares a process and where it trains, by clients, cores, memory and GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcli.cli import clients_of
from fedsrv.launch.gpus import Gpu
from fedsrv.launch.layout import FEW, MAX_ON_A_GPU, Crowd, Machine, host_ranges, layout, places_on

GIB = 1 << 30
PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("clients", "hosts", "ranges"),
    [
        (1, 1, ["0"]),
        (3, 3, ["0", "1", "2"]),
        (3, 1, ["0-2"]),
        (5, 2, ["0-4:2", "1-3:2"]),
        (10, 3, ["0-9:3", "1-7:3", "2-8:3"]),
        (3, 100, ["0", "1", "2"]),
    ],
)
def test_host_ranges(clients, hosts, ranges):
    assert host_ranges(clients, hosts) == ranges


@given(st.integers(1, 300), st.integers(1, 300))
def test_every_client_has_one_host(clients, hosts):
    """The ranges are what ``--client-id`` understands, of even sizes, and never too many."""
    ranges = [clients_of(text) for text in host_ranges(clients, hosts)]
    assert sorted(c for ids in ranges for c in ids) == list(range(clients))
    assert len(ranges) == min(hosts, clients)
    sizes = [len(ids) for ids in ranges]
    assert max(sizes) - min(sizes) <= 1


# --- without GPUs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "cohort", "cores", "hosts"),
    [
        (1, 1, 2, 1),
        (FEW, 2, 1, FEW),  # a process for each client, selected or not
        (FEW + 1, FEW + 1, 2, 2),
        (16, 16, 16, 16),
        (10_000, 10_000, 16, 16),
        (10_000, 5, 16, 5),
    ],
)
def test_hosts_on_cores(clients, cohort, cores, hosts):
    found = layout(Crowd(clients, cohort), Machine(cores, PLENTY))
    assert len(found) == hosts
    assert {*found.values()} == {"cpu"}
    assert len(layout(Crowd(clients, cohort), Machine(cores, 0))) == 1


def test_as_many_hosts_as_are_asked_for():
    assert [*layout(Crowd(5, 5, hosts=2, evaluator=True), Machine(1, 0))] == [
        "0-4:2", "1-3:2", "evaluator",
    ]  # fmt: skip


# --- with GPUs -----------------------------------------------------------------------------------


def gpus(*gib: int) -> list[Gpu]:
    return [Gpu(number, "a GPU", free * GIB) for number, free in enumerate(gib)]


@pytest.mark.parametrize(
    ("free", "clients", "cohort", "cores", "ram", "hosts"),
    [
        ((80,), 50, 50, 16, PLENTY, "0 0 0 0"),  # a few a GPU
        ((10,), 50, 50, 16, PLENTY, "0 0"),  # as many as its memory has room for
        ((3,), 50, 50, 16, PLENTY, "0"),  # one in any case
        ((80,), 50, 50, 2, PLENTY, "0 0"),  # none that no core can feed
        ((80,), 2, 2, 16, PLENTY, "0 0"),  # none without a client
        ((80,), 50, 3, 16, PLENTY, "0 0 0"),  # none that would rest
        ((80,), 50, 50, 16, 4 * GIB, "0 0"),  # CUDA takes memory of the machine, too
        ((80, 80), 50, 50, 16, PLENTY, "0 1 0 1 0 1 0 1"),  # in turn
        ((80, 80, 80), 50, 50, 2, PLENTY, "0 1 2"),  # each GPU has one, whatever the cores
        ((9, 80), 50, 50, 16, PLENTY, "1 0 1 0 1 1"),  # the emptiest comes first
        ((2, 80), 50, 50, 16, PLENTY, "1 1 1 1"),  # a full GPU is left alone
        ((2, 3), 50, 50, 16, PLENTY, "1"),  # unless all are full
        ((80, 80), 1, 1, 16, PLENTY, "0"),
    ],
)  # fmt: skip
def test_hosts_on_gpus(free, clients, cohort, cores, ram, hosts):
    found = layout(Crowd(clients, cohort), Machine(cores, ram, gpus(*free)))
    assert [*found.values()] == [f"cuda:{gpu}" for gpu in hosts.split()]
    assert [*found] == host_ranges(clients, len(found)), "the same clients as without GPUs"


@pytest.mark.parametrize(
    ("free", "places"), [((9,), "0 0"), ((4, 4), "0 1"), ((80,), "0 0 0 0 0"), ((3,), "0 0")]
)
def test_the_evaluator_needs_room_as_well(free, places):
    found = layout(Crowd(50, 50, evaluator=True), Machine(16, PLENTY, gpus(*free)))
    assert [*found.values()] == [f"cuda:{gpu}" for gpu in places.split()]


def test_more_hosts_than_gpus_have_room_for_take_turns():
    found = layout(Crowd(9, 9, hosts=9, evaluator=True), Machine(16, PLENTY, gpus(80, 5, 1)))
    assert [*found.values()] == [f"cuda:{n}" for n in (0, 1, 0, 0, 0, 0, 1, 0, 0, 0)]


@given(st.lists(st.integers(0, 100), max_size=9), st.integers(1, MAX_ON_A_GPU))
def test_no_gpu_has_more_hosts_than_room(free, most):
    places = places_on(gpus(*free), most)
    assert bool(places) == bool(free)
    for gpu in gpus(*free):
        count = places.count(gpu.device)
        assert count <= min(most, max(1, gpu.free // (4 * GIB)))
        assert count or gpu.free < 4 * GIB or most == 0
