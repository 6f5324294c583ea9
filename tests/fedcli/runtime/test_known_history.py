"""What a client keeps of a run's history: a coordinator that comes back with another is noticed."""

from __future__ import annotations

import json

import pytest

from fedcli.runtime.known_history import HEAD, KnownHistory
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.state.chain import beginning_of, continued, digest_of


def history(run: str, statements: str, known: int) -> rpc.History:
    """Return what an honest coordinator answers whose history has these statements."""
    digests = [digest_of(text) for text in statements]
    link = continued(beginning_of(run), b"".join(digests))
    proof = b"".join(digests[known:]) if 0 < known <= len(digests) else b""
    return rpc.History(head=rpc.Head(number=len(digests), link=link), digests=proof)


def asked(known: KnownHistory, run: str, statements: str) -> None:
    number = known.number
    known.take(run, number, history(run, statements, number))


def test_a_history_that_goes_on_is_kept(tmp_path, caplog):
    place = tmp_path / HEAD
    known = KnownHistory(place)
    asked(known, "a", "")
    assert not place.exists()
    for statements in ("xy", "xy", "xyz"):
        asked(known, "a", statements)
    assert place.stat().st_mode & 0o777 == 0o600
    again = KnownHistory(place)
    assert again.number == 3
    asked(again, "a", "xyzuv")
    again.take("a", 3, history("a", "other", 3))  # an answer to an earlier request
    assert json.loads(place.read_text())["number"] == 5
    asked(again, "b", "z")  # another run
    assert json.loads(place.read_text())["run_id"] == "b"
    assert caplog.messages == []


LIES = {
    "edited": history("a", "xYzu", 3),
    "copied back": history("a", "xy", 3),
    "other end": history("a", "xyZ", 3),
    "no proof": rpc.History(head=history("a", "xyzu", 3).head),
    "cut proof": rpc.History(head=history("a", "xyzu", 3).head, digests=b"\x00" * 31),
    "more than it proves": rpc.History(
        head=rpc.Head(number=9, link=history("a", "xyzu", 3).head.link),
        digests=history("a", "xyzu", 3).digests,
    ),
    "short link": rpc.History(head=rpc.Head(number=3, link=b"x")),
    "left out": rpc.History(),
    "link left out": rpc.History(head=rpc.Head(number=4), digests=b"\x00" * 32),
    "proof left out as well": rpc.History(head=rpc.Head(number=3)),
    "negative": rpc.History(head=rpc.Head(number=-(2**63), link=b"x")),
}


@pytest.mark.parametrize("lie", LIES)
def test_another_history_is_warned_of_once_and_the_evidence_stays(tmp_path, caplog, lie):
    asked(KnownHistory(tmp_path / HEAD), "a", "xyz")
    before = (tmp_path / HEAD).read_bytes()
    known = KnownHistory(tmp_path / HEAD)
    for _ in range(3):
        known.take("a", known.number, LIES[lie])
    (line,) = caplog.messages
    assert f"fedsrv verify RUN --head 3:{json.loads(before)['link']}; delete" in line
    assert (tmp_path / HEAD).read_bytes() == before


def test_who_saw_no_history_waits_for_none(tmp_path, caplog):
    known = KnownHistory(tmp_path / HEAD)
    known.take("a", 0, rpc.History())
    asked(known, "a", "xy")
    known.take("b", 2, rpc.History())  # another run: nothing of it was seen here
    assert known.number == 2
    assert caplog.messages == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"link": "00", "number": 1}', '{"link": 3}'])
def test_a_damaged_file_is_as_none(tmp_path, text):
    (tmp_path / HEAD).write_text(text)
    assert KnownHistory(tmp_path / HEAD).number == 0
