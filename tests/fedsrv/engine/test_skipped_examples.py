"""Examples that batch normalisation leaves out: counted in the records, and said once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.resolution import experiment_of
from fedsrv.engine.rounds import Engine
from fedsrv.parts import parts_of
from fedsrv.progress.event_lines import EventFormatter
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, input_shape, track=True):
        super().__init__()
        norm = nn.BatchNorm1d(3, track_running_stats=track)
        self.features = nn.Sequential(nn.Linear(input_shape[0], 3), norm)
        self.head = nn.Linear(3, num_classes)
"""


def experiment(root: Path, **training: object) -> Experiment:
    """Return a run of two rounds; client 0 has nine training examples, client 1 a single one."""
    (root / "mine.py").write_text(NET)
    for client, size in enumerate((9, 1)):
        place = root / str(client) / "task-0"
        place.mkdir(parents=True)
        for part, n in (("train", size), ("test", 3)):
            x = np.linspace(0, 1, 4 * n, dtype=np.float32).reshape(n, 4)
            np.save(place / f"{part}_x.npy", x)
            np.save(place / f"{part}_y.npy", np.arange(n) % 2)
        (place.parent / "client.json").write_text('{"input_shape": [4], "num_classes": 2}')
    return experiment_of({
        "net": {"name": f"{root / 'mine.py'}:Net", "track": bool(training.pop("track", True))},
        "method": {"name": "fedavg"},
        "schedule": {"clients": 2, "rounds": 2},
        "training": {"batch_size": 8, **training},
        "evaluate": {"batch_size": 2},
    })  # fmt: skip


def run(root: Path, made: Experiment) -> tuple[list[dict], dict, list[str]]:
    """Return the records, the summary and the notes of a run."""
    events, store = EventLog(), Store(root / "run", made, False)
    summary = Engine(
        made, InProcessCohort(made, root, root / "clients"), store, events, parts_of(store, events)
    ).run()
    store.close()
    events.close()
    told = [EventFormatter().line(event) for event in events.listen(from_start=True)]
    lines = (root / "run" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], summary, [s for s in told if "note:" in s]


def test_what_is_left_out_is_counted_and_said_once(tmp_path):
    records, summary, notes = run(tmp_path, experiment(tmp_path))
    for record in records:
        rows = record["clients"]
        assert {c: row["skipped_examples"] for c, row in rows.items()} == {"0": 1, "1": 1}
        assert record["metrics"]["loss"] == pytest.approx(rows["0"]["loss"])
        assert "loss" not in rows["1"]
    assert summary["skipped_examples"] == 4
    why = "the net normalises over the batch, and a batch of one example cannot be normalised"
    assert notes == [
        f"note: round 1 left 1 training examples out, at client 0: {why}; in other epochs they "
        "are others",
        f"note: round 1 trained nothing at client 1: {why}; give them more examples, or take a net "
        "without batch normalisation",
    ]


def test_a_run_that_leaves_nothing_out_says_nothing(tmp_path):
    made = experiment(tmp_path, batch_size=10)
    (tmp_path / "1" / "task-0" / "train_x.npy").unlink()
    np.save(tmp_path / "1" / "task-0" / "train_x.npy", np.ones((2, 4), np.float32))
    np.save(tmp_path / "1" / "task-0" / "train_y.npy", np.arange(2))
    records, summary, notes = run(tmp_path, made)
    assert all("skipped_examples" not in row for r in records for row in r["clients"].values())
    assert "skipped_examples" not in summary
    assert notes == []


def test_a_net_without_running_statistics_is_trained_scored_and_summed_up(tmp_path):
    """Its three test examples in batches of two leave one, and its cost is counted with two."""
    records, summary, _ = run(tmp_path, experiment(tmp_path, track=False))
    assert len(records) == 2
    assert "figures_missing" not in summary
    assert summary["compute"]["macs_per_example"] == 4 * 3 + 3 * 2
    assert "a_loc" in summary["metrics"]


def test_batches_of_one_alone_are_refused_before_anybody_trains(tmp_path):
    with pytest.raises(ConfigError, match="batch_size = 1: the net normalises over the batch"):
        run(tmp_path, experiment(tmp_path, batch_size=1))
