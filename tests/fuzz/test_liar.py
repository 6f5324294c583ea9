"""A live coordinator, two honest clients, and one that lies in every field of the schema."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment, undealt
from tests.fuzz.liar import ANSWERS, EXPECTED, REQUESTS, every_lie, takes_part
from tests.fuzz.lies import Lie
from tests.fuzz.live import Live, complaints_with_traceback

Living = Callable[..., Live]
UNARY = ("Join", "Beat", "Leave", "Pull", "Watch")
MOST_GROWTH = 300 << 20
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


def test_every_field_of_every_request_is_lied_about() -> None:
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


# --- somebody without a place in the run ----------------------------------------------------------


@pytest.mark.parametrize(
    "lies",
    [
        [*every_lie(*UNARY), *every_lie("Push")[::5], *every_lie("PushSeveral")[::9]],
        every_lie("JoinSeveral"),
    ],
    ids=["alone", "as-several"],
)
def test_a_stranger_who_lies_changes_nothing(
    lies: Sequence[tuple[str, Lie]], living: Living, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = {"clients": 2, "rounds": 2}
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
    assert grown < MOST_GROWTH
    assert complaints_with_traceback(caplog.records) == []


# --- a client of the run --------------------------------------------------------------------------


def records_of(live: Live) -> list[dict[str, Any]]:
    lines = (live.root / "run" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def lied_to(living: Living, lies: Sequence[tuple[str, Lie]]) -> tuple[Live, dict[str, Any]]:
    """Return a run whose third client told these lies, at its end, and what came of it."""
    pushes = sum(method in ANSWERS for method, _ in lies)
    live = living(schedule={"clients": 3, "rounds": max(2, pushes // 2)}, server={"min_clients": 2})
    live.join(0, 1)
    liar = live.liar("2", about="2")
    outcomes = takes_part(liar, lies)
    liar.close()
    strange = [(lie, code) for lie, code in outcomes if code not in EXPECTED]
    assert strange == []
    return live, live.summary()


def check_end(live: Live, summary: dict[str, Any], records: list[Any], before: int) -> None:
    """Check what must hold whatever was said."""
    assert summary["state_sha256"]
    assert len(records_of(live)) == 2 * live.experiment.schedule.rounds
    assert psutil.Process().memory_info().rss - before < MOST_GROWTH
    assert complaints_with_traceback(records) == []
    size = sum(path.stat().st_size for path in (live.root / "run").glob("run.db*"))
    assert size < 20 << 20


LIES = st.lists(st.sampled_from(every_lie()), min_size=10, max_size=30)


@given(LIES)
@settings(
    max_examples=4, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_whatever_a_client_says_the_run_ends(
    living: Living, caplog: pytest.LogCaptureFixture, lies: list[tuple[str, Lie]]
) -> None:
    before = psutil.Process().memory_info().rss
    live, summary = lied_to(living, lies)
    check_end(live, summary, caplog.records, before)


def test_a_liar_whose_uploads_are_refused_is_as_good_as_absent(living: Living) -> None:
    """The run has the bits of one in which that client never brings anything."""
    refused = [
        one for one in every_lie("Push") if repr(one[1]) in (
            "fedpb.v1.TensorHeader.dtype = 99", "fedpb.v1.Frame.crc32 = 1",
            "fedpb.v1.Counts.view = '../../0'", "fedpb.v1.BundleHeader.payload_bytes = 10737418240",
            "fedpb.v1.BundleHeader.scalars = {num_examples: nan}",
        )
    ]  # fmt: skip
    assert len({repr(lie) for _, lie in refused}) == 5
    rounds = {"schedule": {"clients": 3, "rounds": 3}, "server": {"min_clients": 2}}
    digests = []
    for lies in (refused[:6], []):
        live = living(**rounds)
        live.join(0, 1)
        liar = live.liar("2", about="2")
        takes_part(liar, lies)
        liar.close()
        digests.append(live.summary()["state_sha256"])
        assert all(record["cohort"] == [0, 1] for record in records_of(live))
    assert digests[0] == digests[1]
