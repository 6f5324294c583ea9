"""What ``fedcli join --show-uploads`` says that leaves is what the coordinator gets."""

import json
import re

import pytest

from fedmodels.tensors.archive import load, load_named
from fedmodels.tensors.bundle import state_digest
from tests.conftest import records_of
from tests.integration.conftest import tables

pytestmark = pytest.mark.loopback


def test_what_is_shown_is_what_the_coordinator_gets(loopback, tmp_path):
    """With a cohort of one the mean of the uploads is that client's upload, bit for bit."""
    schedule, privacy = {"rounds": 1, "clients": 3, "per_round": 1}, {"announce": "rounded"}
    run = loopback(tables("fedavg", schedule=schedule, privacy=privacy))
    coordinator, place = run.serve(), tmp_path / "shown"
    more = "--show-uploads", str(place), "--show-tensors", "--announce", "rounded"
    client = run.join("0-2", *more)
    run.finish(coordinator, client)
    text = (place / "clients-0-to-2.txt").read_text()
    *_, last = records_of(run.out)
    (who,), number = last["cohort"], last["interaction"] + 1
    sent, _ = load(place / f"client-{who}-interaction-{number}.safetensors")
    assert f"sha256 {state_digest([('upload', sent)])}" in text
    state = max((run.out / "server").glob("state-*.safetensors"))
    got = load_named(state)[0]["common"].weights
    assert got.keys() == sent.weights.keys()
    assert all(got[key].equal(sent.weights[key]) for key in got)
    calls = {line.split()[2].rstrip(":") for line in text.splitlines() if line[0] != " "}
    assert calls >= {"JoinSeveral", "Pull", "Push", "Leave"}
    assert len(list(place.glob("*.safetensors"))) == 2
    row = last["clients"][str(who)]
    assert f"  {row['loss']!r}\n" in text
    assert (row["peak_rss_bytes"] % (64 << 20), round(row["seconds"], 2)) == (0, row["seconds"])
    assert str(tmp_path) not in text, "no message names a place"
    assert "token" in text
    counts = re.findall(r"clients\[.*\]\.tasks\[.*\]\.train +(.*)", text)
    numbers = {int(number) for line in counts for number in line.split(", ")}
    assert len(counts) == 6
    assert numbers <= {0, 1, 2, 4, 8, 16, 32}, "up to powers of two"
    sessions = (run.out / "clients").rglob("session.json")
    assert all(json.loads(file.read_text())["token"] not in text for file in sessions)
