"""A live coordinator, two honest clients, and a stranger who lies in every field of the schema."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.descriptor import Descriptor

from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment, undealt
from tests.fuzz.liar import REQUESTS, every_lie
from tests.fuzz.lies import lies_about
from tests.fuzz.live import Live, complaints_with_traceback

Living = Callable[..., Live]
TOLD = {"Join": 2, "Beat": 1, "Leave": 1, "Pull": 1, "Watch": 1, "Announce": 4, "Steer": 1}
TOLD |= {"Push": 8, "PushSeveral": 12, "JoinSeveral": 6}
"""Which lies a stranger tells: all about a request, or every so many of them."""
MAX_GROWTH = 300 << 20
"""Memory that all lies of a test may cost, in a process that holds the clients as well."""


@pytest.fixture
def living(digits: Path, tmp_path: Path) -> Iterator[Living]:
    """Return a maker of live runs of any number of clients."""
    data = undealt(digits, tmp_path / "data")
    made: list[tuple[Live, Path]] = []

    def make(**overrides: Any) -> Live:
        root = Path(tempfile.mkdtemp(prefix="live-"))  # a socket's path must be short
        training = {"batch_size": 64, "lr": 0.05}
        tables = {"training": training, "evaluate": {"every": 4}, **overrides}
        made.append((Live(tiny_experiment(**tables), data, root), root))
        return made[-1][0]

    yield make
    for live, root in made:
        live.close()
        shutil.rmtree(root, ignore_errors=True)


def fields_of(descriptor: Descriptor, known: frozenset[str] = frozenset()) -> set[str]:
    """Return the full names of all fields of a message and of those it holds."""
    found = {field.full_name for field in descriptor.fields}
    for field in descriptor.fields:
        held = field.message_type
        if held is not None and not held.GetOptions().map_entry and field.full_name not in known:
            found |= fields_of(held, known | found)
    return found


def test_every_field_of_every_request_is_lied_about():
    service = rpc.DESCRIPTOR.services_by_name["CoordinatorService"]
    assert {m.name: m.input_type.full_name for m in service.methods} == {
        name: kind.DESCRIPTOR.full_name for name, kind in REQUESTS.items()
    }
    fields = {f for m in service.methods for f in fields_of(m.input_type)}
    lies = every_lie()
    assert {lie.field for _, lie in lies} == fields
    assert {
        "fedpb.v1.Counts.test_set",
        "fedpb.v1.TensorHeader.shape",
        "fedpb.v1.Frame.crc32",
    } <= fields
    assert len({repr(lie) for _, lie in lies}) > 400


def test_every_field_that_may_be_absent_is_left_out():
    """A check may rest on it; a plain number that is absent reads as 0, which is told as well."""
    told = {repr(lie) for _, lie in every_lie()}
    report = rpc.Report.DESCRIPTOR
    assert "fedpb.v1.Member.cosine = absent" in told
    assert "fedpb.v1.PushHeader.distance = absent" in told
    assert "fedpb.v1.Distance.weights = 0.0" in told
    honest = rpc.Report(counts=[rpc.Counts(view="a"), rpc.Counts(view="b")], extra={"x": 1.0})
    found = {repr(lie): lie.told(honest) for lie in lies_about(report)}
    assert [c.view for c in found["fedpb.v1.Report.counts = all but the first"].counts] == ["b"]
    assert not found["fedpb.v1.Report.extra = all but the first"].extra


# --- somebody without a place in the run ----------------------------------------------------------


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.whole)])
def test_a_stranger_who_lies_changes_nothing(part, living, caplog):
    lies = [lie for method, step in TOLD.items() for lie in every_lie(method)[:: part * step]]
    assert {method for method, _ in lies} == TOLD.keys()
    schedule = {"clients": 2, "rounds": 1}
    calm = living(schedule=schedule)
    calm.join(0, 1)
    honest = calm.summary()
    live = living(schedule=schedule)
    live.join(0)
    before = psutil.Process().memory_info().rss
    stranger = live.liar("0", about="0")
    accepted = [
        (method, lie) for method, lie in lies if isinstance(stranger.lie(method, lie), bytes)
    ]
    assert {method for method, _ in accepted} <= {"Watch"}
    grown = psutil.Process().memory_info().rss - before
    live.join(1)
    found = live.summary()
    stranger.close()
    assert found["state_sha256"] == honest["state_sha256"]
    assert grown < MAX_GROWTH
    assert complaints_with_traceback(caplog.records) == []
