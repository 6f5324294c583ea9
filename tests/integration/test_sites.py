"""Sites that bring their own files: cut by the coordinator's [data], with and without a relay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import records_of

pytestmark = pytest.mark.loopback
REST = {
    "net": {"name": "mlp", "hidden": [4]}, "method": {"name": "fedavg"},
    "schedule": {"clients": 3, "rounds": 2}, "training": {"lr": 0.05},
}  # fmt: skip
RECORDINGS = {
    "name": "table", "classes": ["sit", "walk", "run"],
    "columns": {"label": "activity", "features": ["ax"], "time": "t", "window": 5},
}  # fmt: skip
PHOTOS = {"name": "directory", "classes": ["cat", "dog"], "resize": 4, "crop": 4, "channels": "rgb"}


def recording(path: Path, activities: str, sign: str = ",") -> Path:
    lines = [sign.join(("t", "activity", "ax"))]
    for number, name in enumerate(activities.split()):
        level = {"sit": -3, "walk": 0, "run": 3}.get(name, 9)
        lines += [sign.join((str(40 * number + i), name, str(level + i % 3))) for i in range(40)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_sites_cut_their_own_recordings(loopback, tmp_path):
    """Behind a relay, in styles and orders of their own.

    One lacks a class, one comes again after a kill.
    """
    pytest.importorskip("pandas")
    run = loopback({"data": RECORDINGS, **REST})
    coordinator = run.serve()
    port = run.relay("0-2").port
    files = [
        recording(tmp_path / "a.csv", "walk sit run"),
        recording(tmp_path / "b.csv", "run walk", ";"),
        recording(tmp_path / "c.csv", "sit run walk", "\t"),
    ]
    states = [tmp_path / f"states-{i}" for i in range(3)]
    strange = recording(tmp_path / "strange.csv", "jump walk")
    refused = run.join("2", data=strange, states=tmp_path / "other", port=port)
    assert refused.wait() == 2
    line = "client 2 has the class 'jump', which the run does not know: it has"
    assert line in refused.output()
    assert line in coordinator.log.read_text()
    allows = ("--allow-method", "fedavg", "--allow-column", "activity:label", "--allow-column", "t")
    careful = run.join("2", *allows, data=files[2], states=tmp_path / "careful", port=port)
    assert careful.wait() == 2
    assert "the run reads ax, and this site allows activity:label, t" in careful.output()
    assert "client 2 joined" not in coordinator.log.read_text(), "it told nothing of its data"
    first = run.join(
        "0", *allows, "--allow-column", "ax", data=files[0], states=states[0], port=port
    )
    coordinator.wait_for(lambda e: e.get("kind") == "joined" and e["client"] == "0")
    first.kill()
    first.wait()
    clients = [run.join(str(i), data=files[i], states=states[i], port=port) for i in range(3)]
    summary = run.finish(coordinator, *clients)
    assert summary["metrics"]["a_loc"] >= 0
    assert "client 0: " in clients[0].output()
    assert "a.csv was cut before" in clients[0].output()
    said = records_of(run.out)[0]
    assert said["round"] == 0
    for i in range(3):
        assert (states[i] / str(i) / "personal.safetensors").is_file()


def test_sites_cut_their_own_photos(loopback, tmp_path):
    rest: dict[str, Any] = {**REST, "schedule": {"clients": 2, "rounds": 1}}
    run = loopback({"data": PHOTOS, **rest})
    coordinator = run.serve()
    for site, (classes, mode) in enumerate(((("cat", "dog"), "RGB"), (("dog",), "L"))):
        for name in classes:
            for number in range(5):
                place = tmp_path / f"site-{site}" / name / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                shade = 40 * number if mode == "L" else (40 * number,) * 3
                Image.new(mode, (6 + number, 8), shade).save(place)
    clients = [
        run.join(str(i), data=tmp_path / f"site-{i}", states=tmp_path / f"states-{i}")
        for i in range(2)
    ]
    run.finish(coordinator, *clients)
    assert "note: client 1: all its training examples are of class dog" in clients[1].output()


def test_a_run_that_says_nothing_of_data_cuts_none(loopback, tmp_path):
    run = loopback(dict(REST))
    coordinator = run.serve()
    client = run.join("0", data=recording(tmp_path / "a.csv", "sit"), states=tmp_path / "s")
    assert client.wait() == 2
    line = "client 0 brings files of its own, and the run's config has no [data]"
    assert line in client.output()
    assert line in coordinator.log.read_text()
