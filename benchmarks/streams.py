"""An open run on digits: 205 tasks, 20 late clients and five classes that come while it goes on.

    python -m benchmarks.streams [--methods fedavg gldp …] [--kills 50] [--keep]

Five clients begin with the digits 0 to 4. At each of 26 moments eight clients get another task, and
all where there are fewer. One client joins at each, and at five of them a task has a digit that
nobody had before. Training data of a client's earlier tasks are deleted once it gets the next one.
Each stretch between two moments is a process of its own. For the first method the whole is done
once more, and its processes die by SIGKILL at seeded points: before an order, before and after a
commit, a growth, a client's state. The two digests have to be equal. Rows have what the methods
came to. They also have the processor's seconds for a client in a round and the peak memory, of the
first moments (the fourth to the eighth) and of the last five: both have to be flat in the number of
past tasks, since ``last_tasks`` bounds what is scored.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.measure import parser_of, records_of, tell
from benchmarks.measured import given_as, keep
from fedcli.data.store.growing import add_task
from fedcli.runtime.state import StateDirectory
from fedmodels.facts.resolution import experiment_of
from fedsrv.parts.stages import RunPaused
from fedsrv.state.store import Store
from fedtide.inprocess import go_on

BEGINNERS, LATE, MOMENTS, AT_ONCE = 5, 20, 26, 8
NEW_AT = {4: 5, 8: 6, 12: 7, 16: 8, 20: 9}
"""The moments at which a digit comes that nobody had before."""
TRAIN, TEST = 8, 4
"""Examples of each digit in a task."""
IMAGES = {"name": "digits-cnn"}
NETS = {
    "fedali": {"name": "vit-tiny", "alp": True, "prototypes": [16, 16], "blocks": 2, "patch": 4}
}
"""FedAli aligns the tokens of a transformer; the others have the small CNN."""
SETTINGS: dict[str, dict[str, Any]] = {
    "gldp": {"t": 1, "s": 1},
    "pfedgrp": {"generator_width": 8, "generator_epochs": 20, "server_volume": 16, "w_epochs": 2},
}


@dataclass
class World:
    """What comes to the clients, the same for every run of a seed."""

    data: Path
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        x, y = load_digits(return_X_y=True)
        self.x = (x.reshape(-1, 1, 8, 8) * 15).astype(np.uint8)
        self.places = [np.flatnonzero(y == digit) for digit in range(10)]
        self.tasks: dict[int, int] = {}

    def join(self, client: int) -> None:
        """Make the data of a client with one task of the digits 0 to 4."""
        place = self.data / str(client)
        place.mkdir(parents=True)
        about = {"format": 1, "input_shape": [1, 8, 8], "num_classes": BEGINNERS}
        (place / "client.json").write_text(json.dumps(about))
        self._draw(place / "task-0", range(BEGINNERS))
        self.tasks[client] = 1

    def happen(self, moment: int) -> None:
        """Let a client join and eight get another task; what they learned before is deleted."""
        clients = sorted(self.tasks)
        chosen = self.rng.choice(clients, min(AT_ONCE, len(clients)), replace=False).tolist()
        if moment < LATE:
            self.join(BEGINNERS + moment)
        known = 5 + sum(at < moment for at in NEW_AT)
        for client in chosen:
            digits = self.rng.choice(known, 3, replace=False).tolist()
            if moment in NEW_AT and client == chosen[0]:
                digits.append(NEW_AT[moment])
            source = self.data.parent / "in" / f"{moment}-{client}"
            self._draw(source, sorted(digits))
            add_task(self.data, client, source)
            for file in self.data.glob(f"{client}/task-{self.tasks[client] - 1}/train_*"):
                file.unlink()
            self.tasks[client] += 1

    def _draw(self, place: Path, digits: Any) -> None:
        """Write a task of some digits as arrays."""
        place.mkdir(parents=True)
        drawn = {d: self.rng.choice(self.places[d], TRAIN + TEST, replace=False) for d in digits}
        for part, cut in (("train", slice(TRAIN)), ("test", slice(TRAIN, None))):
            rows = {d: places[cut] for d, places in drawn.items()}
            np.save(place / f"{part}_x.npy", self.x[np.concatenate([*rows.values()])])
            y = np.concatenate([np.full(len(r), d, dtype=np.int64) for d, r in rows.items()])
            np.save(place / f"{part}_y.npy", y)


def experiment(method: str) -> Any:
    """Return the open run of a method."""
    return experiment_of(
        {
            "net": NETS.get(method, IMAGES),
            "method": {"name": method, **SETTINGS.get(method, {})},
            "schedule": {
                "open": True, "order": "tasks_outer", "clients": BEGINNERS + LATE,
                "begin_with": BEGINNERS, "rounds": 3,
            },
            "training": {"local_epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.9},
            "evaluate": {"last_tasks": 4, "pictures": 0},
        }
    )  # fmt: skip


# --- a stretch as a process -----------------------------------------------------------------------


def stretch(
    given: Any,
    out: Path,
    at_rest: str,
    die_at: int | None = None,
    prepare: Callable[[], object] = lambda: None,
    **options: Any,
) -> dict[str, float]:
    """Train all rounds that are due in a process of its own; return its seconds and memory.

    Args:
        given: the experiment.
        out: the run directory.
        at_rest: "pause", or "close" to end the run.
        die_at: the process dies by SIGKILL at this point of its work; by default at none.
        prepare: called in the process before it begins.
        options: those of :func:`fedtide.inprocess.go_on`.
    """
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            points = _Points(die_at)
            points.watch()
            prepare()
            with contextlib.suppress(RunPaused):
                go_on(given, out, at_rest, before=lambda order: points.pass_one(), **options)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    if status and os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"{given.method.name}: a process ended with {status}")
    return {"killed": float(status != 0), "wall_s": time.monotonic() - began, **_used(used)}


def _used(used: resource.struct_rusage) -> dict[str, float]:
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1000}


class _Points:
    """The points of a process's work at which it may die."""

    def __init__(self, die_at: int | None) -> None:
        self.die_at, self.passed = die_at, 0

    def pass_one(self) -> None:
        """Die here, or go on to the next point."""
        if self.passed == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed += 1

    def watch(self) -> None:
        """Let whoever writes pass a point before and after it; the process ends with it."""
        for owner, name in ((Store, "grow"), (Store, "commit"), (StateDirectory, "save")):
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            self.pass_one()
            found = write(*given)
            self.pass_one()
            return found

        return watched


# --- whole runs -----------------------------------------------------------------------------------


def lived(
    method: str, place: Path, deaths: Iterator[int | None]
) -> tuple[list[dict[str, float]], int]:
    """Let a run live through all moments; return what each stretch took, and how many died.

    Args:
        method: what is run.
        place: an empty directory.
        deaths: where the next process dies.
    """
    out = place / "run"
    (out / "clients").mkdir(parents=True)
    world = World(out / "data")
    for client in range(BEGINNERS):
        world.join(client)
    found, killed = [], 0
    for moment in range(MOMENTS + 1):
        if moment:
            world.happen(moment - 1)
        at_rest = "close" if moment == MOMENTS else "pause"
        while True:
            used = stretch(experiment(method), out, at_rest, next(deaths, None))
            if not used["killed"]:
                break
            killed += 1
        found.append(used)
    return found, killed


def deaths(kills: int, seed: int = 0) -> Iterator[int | None]:
    """Yield where processes die, at seeded points of their work; each second one lives.

    A point beyond the end of a stretch kills nobody, so points lie below those of the first one.
    """
    rng = random.Random(seed)
    for _ in range(kills):
        yield rng.randrange(20)
        yield rng.randrange(20)
        yield None


def row_of(method: str, place: Path, took: list[dict[str, float]]) -> dict[str, Any]:
    """Return what a method came to, and how its cost grew."""
    summary = json.loads((place / "run" / "summary.json").read_text())
    records = records_of(place / "run")
    metrics = summary["metrics"]
    trained = [0] * (MOMENTS + 1)
    for record in records:
        trained[record["task"]] += len(record["cohort"])
    each = [used["cpu_s"] / max(count, 1) for used, count in zip(took, trained, strict=True)]
    return {
        "method": method,
        "rounds": len(records),
        **{
            k: round(metrics[k], 4) for k in ("a_loc", "a_glo", "iaa", "forgetting") if k in metrics
        },
        "client_s_first": float(np.mean(each[3:8])),
        "client_s_last": float(np.mean(each[-6:-1])),
        "peak_mb_first": float(np.mean([used["peak_mb"] for used in took[3:8]])),
        "peak_mb_last": float(np.mean([used["peak_mb"] for used in took[-6:-1]])),
        "digest": summary["state_sha256"][:8],
    }


def main() -> None:
    """Let each method live through the same stream; the first one also with deaths."""
    parser = parser_of("streams", __doc__, "streams")
    names = ["fedavg", "gldp", "fedmlp", "fedali", "pfedgrp"]
    parser.add_argument("--methods", nargs="*", default=names)
    parser.add_argument("--kills", type=int, default=50, help="at least so many; 0: none")
    options = parser.parse_args()
    rows, deaths_of = [], []
    for number, method in enumerate(options.methods):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            took, _ = lived(method, place / "whole", iter(()))
            row = row_of(method, place / "whole", took)
            if number == 0 and options.kills:
                _, killed = lived(method, place / "killed", deaths(options.kills))
                again = json.loads((place / "killed" / "run" / "summary.json").read_text())
                found = again["state_sha256"][:8]
                if found != row["digest"]:
                    raise SystemExit(f"{method}: {killed} kills, and other bits: {found}")
                deaths_of = [{"method": method, "killed": killed, "digest": found}]
            rows.append(row)
            shutil.rmtree(place / "whole")
        tell("streams", rows[-1:])
    title = "205 added tasks, 20 late clients, five new classes: one open run on digits"
    tables = {title: rows, "The same, with processes killed": deaths_of}
    for name, found in tables.items():
        tell(name, found)
    if options.keep:
        keep(options.keep, given_as("streams"), tables)


if __name__ == "__main__":
    main()
