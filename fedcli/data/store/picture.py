"""A picture of who holds what: classes by clients and tasks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedcli.data.store.partition_writer import TABLE
from fedmodels.errors import DataError, reason_of
from fedmodels.files import replacing

MAX_LABELS = 40
"""Ticks an axis can carry legibly."""
MAX_LINES = 200
"""Clients between which a line can be seen."""


def draw_partition(root: Path) -> Path:
    """Draw ``root/partition.png`` from ``root/partition.json``.

    Columns are pairs (client, task), rows classes, colour the number of training examples.

    Returns:
        The path of the picture.

    Raises:
        DataError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    content = json.loads((root / TABLE).read_bytes())
    clients, names = content["clients"], content["class_names"]
    counts = np.array([task["train"] for tasks in clients for task in tasks], dtype=float).T
    starts = np.cumsum([0, *(len(tasks) for tasks in clients)])
    width, height = np.clip(0.2 * counts.shape[1], 6, 24), np.clip(0.2 * len(counts), 3, 16)
    figure = Figure(figsize=(float(width), float(height)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = np.ma.masked_equal(counts, 0)
    image = axes.imshow(
        shown,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        norm=LogNorm(vmin=1, vmax=max(counts.max(), 2)),
    )
    for start in starts[1:-1] if len(clients) <= MAX_LINES else ():
        axes.axvline(start - 0.5, color="black", linewidth=0.5)
    step = -(-len(clients) // MAX_LABELS)
    middles = (starts[:-1] + starts[1:] - 1) / 2
    axes.set_xticks(middles[::step], [str(i) for i in range(0, len(clients), step)])
    if len(names) <= MAX_LABELS:
        axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("client (a column for each of its tasks)")
    axes.set_ylabel("class")
    figure.colorbar(image, label="training examples")
    path = root / "partition.png"
    try:
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=100, metadata={"Software": None})
    except OSError as error:
        raise DataError(
            f"the data are dealt out, but their picture {path} cannot be written: "
            f"{reason_of(error)}"
        ) from None
    return path
