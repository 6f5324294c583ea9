"""A live run leaves an audit log, and its clients keep the head of its history."""

import json
import shutil
import tempfile
from pathlib import Path

import grpc
import pytest

from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.progress.run_status import RunStatus
from fedsrv.progress.watching import watched
from fedsrv.state.audit import AUDIT, read
from fedsrv.state.chain import Head
from fedsrv.state.verification import verified
from tests.conftest import tiny_experiment, undealt
from tests.fuzz.live import Live

pytestmark = pytest.mark.loopback


def test_a_run_leaves_its_audit_and_its_head(digits, tmp_path):
    root = Path(tempfile.mkdtemp(prefix="live-"))  # a socket's path must be short
    live = Live(
        tiny_experiment(schedule={"clients": 2, "rounds": 1}), undealt(digits, tmp_path / "d"), root
    )
    try:
        live.join(0)
        status = RunStatus.of(watched(live.address, seconds=0.5))
        assert status.head.startswith("1:"), "the run has begun"
        assert f"history: {status.head}" in status.lines()
        stranger = live.liar("1")
        beat = rpc.BeatRequest(client_id="1", token=b"x")
        assert stranger.send("Beat", beat) == grpc.StatusCode.UNAUTHENTICATED
        stranger.close()
        live.join(1)
        live.summary()
        found = [entry.facts for entry in read(root / "run" / AUDIT)]
        kinds = [facts["what"] for facts in found]
        assert kinds.count("joined") == 2
        assert kinds.count("left") == 2
        assert kinds.count("committed") == 2
        (refused,) = [facts for facts in found if facts["what"] == "refused"]
        assert refused["code"] == "UNAUTHENTICATED"
        sent = [facts for facts in found if facts["what"] == "sent" and facts["kind"] == "train"]
        assert {(facts["client"], facts["interaction"]) for facts in sent} == {
            (client, number) for client in (0, 1) for number in (0, 1)
        }
        assert all(len(facts["sha256"]) == 64 and facts["bytes"] > 0 for facts in sent)
        for client in ("0", "1"):
            kept = json.loads((root / "states" / client / "head.json").read_text())
            head = Head(kept["number"], bytes.fromhex(kept["link"]))
            assert verified(root / "run", head).wrong == []
            # they left at the end, before the links of the lineage, the summary and the end
            assert head.number >= verified(root / "run").head.number - 3
    finally:
        live.close()
        shutil.rmtree(root, ignore_errors=True)
