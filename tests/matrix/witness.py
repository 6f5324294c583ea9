"""What trainings really read and server halves really took: what lineages are compared with.

Rows are counted where a training has its examples, and known by their content in the files of their
client. Nothing that the product says of them is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.runtime.client_part import Training
from fedmodels.training.loop import ClientHalf
from fedsrv.engine import reduction

Rows = dict[int, int]
"""Rows by task."""


class Witness:
    """What was seen of one run, by interaction; a repetition replaces what it repeats."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.trained: dict[int, Rows] = {}
        """What each client trained on last."""
        self.counted: dict[int, dict[int, Rows]] = {}
        """Rows by task of the clients whose uploads made the state after an interaction."""
        self.trainings: list[tuple[int, int]] = []
        """Client and interaction of each training."""

    def trains(self, half: ClientHalf) -> None:
        """Count the rows that a training has, by task."""
        client = int(half.ctx.client)
        about, tasks = _known(self.data / str(client))
        x = half.x.double().numpy()
        shape = [1] * x.ndim
        shape[1 if x.ndim > 2 else -1] = len(about["mean"])
        mean, std = (np.array(about[key]).reshape(shape) for key in ("mean", "std"))
        raw = np.rint((x * std + mean) * about.get("scale", 1.0)).astype(np.int64)
        found = Counter(tasks[row.tobytes()] for row in raw)
        self.trained[client] = dict(found)
        self.trainings.append((client, int(half.ctx.at.interaction)))

    def takes(self, interaction: int, clients: Collection[int]) -> None:
        """Note whose uploads a server half took."""
        self.counted[interaction] = {client: self.trained[client] for client in clients}


@cache
def _known(place: Path) -> tuple[dict[str, Any], dict[bytes, int]]:
    """Return a client's description, and the task of each row of its files by content."""
    about, found = json.loads((place / "client.json").read_text()), dict[bytes, int]()
    for file in place.glob("task-*/train_x.npy"):
        for row in np.rint(np.load(file).astype(np.float64)).astype(np.int64):
            task = int(file.parent.name.removeprefix("task-"))
            assert found.setdefault(row.tobytes(), task) == task, "a row is in two tasks"
    about.setdefault("scale", 255.0 if np.load(file).dtype == np.uint8 else 1.0)
    return about, found


@contextmanager
def watching(data: Path) -> Iterator[Witness]:
    """Watch the trainings and the server halves of this process."""
    seen, begin, reduce = Witness(data), ClientHalf.begin, reduction.reduce

    def begins(half: ClientHalf) -> None:
        begin(half)
        if isinstance(half, Training):  # else it is a trial, before a run
            seen.trains(half)

    def takes(method: Any, ctx: Any, state: Any, uploads: Any) -> Any:
        privacy, now = ctx.run.experiment.privacy, int(ctx.interaction)
        if privacy and (privacy.secure_sum or privacy.noise_at_server or privacy.noise_at_clients):
            uploads_of = [c for c, interaction in seen.trainings if interaction == now]
        else:
            uploads_of = [*uploads]
        seen.takes(now, {*map(int, uploads_of)})
        return reduce(method, ctx, state, uploads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientHalf, "begin", begins)
        patch.setattr(reduction, "reduce", takes)
        yield seen
