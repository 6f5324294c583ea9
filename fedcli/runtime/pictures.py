"""Pictures of what a client learnt, drawn into its own directory: they show its private data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from fedmodels.files import replacing
from fedmodels.training.pictures import Gallery, Picture, PrototypeMap

Grid = npt.NDArray[np.float64]
MARKERS = ("*", "D", "P", "X")
"""Of prototypes, by whose they are."""
MOST_NAMED = 12
"""Classes that a legend can name."""


def draw(picture: Picture, path: Path) -> None:
    """Write a picture as PNG; the same picture gives the same file."""
    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(picture, PrototypeMap):
        _draw_map(figure.add_subplot(), picture)
    else:
        _draw_gallery(figure, picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})


def _draw_map(axes: Axes, picture: PrototypeMap) -> None:
    """Draw embeddings as dots and prototypes as larger marks, coloured by class."""
    sets = picture.prototypes
    classes = [picture.labels, *(labels for _, labels in sets.values())]
    highest = max((int(c.max()) for c in classes if len(c)), default=0)
    colours = colormaps["tab10" if highest < 10 else "turbo"]
    norm = Normalize(0, max(highest, 9))

    def colour(labels: Tensor) -> Grid:
        rgba: Grid = colours(norm(labels.numpy()))
        rgba[labels.numpy() < 0] = 1  # white: of no class
        return rgba

    marks: dict[str, PathCollection] = {}
    x, y = picture.points.numpy().T
    axes.scatter(x, y, c=colour(picture.labels), s=7, alpha=0.5, linewidths=0)
    for (whose, (at, labels)), marker in zip(sets.items(), MARKERS, strict=False):
        x, y = at.numpy().T
        face = colour(labels)
        axes.scatter(x, y, c=face, marker=marker, s=90, edgecolors="black", linewidths=0.8)
        blank = axes.scatter([], [], c="white", marker=marker, s=60, edgecolors="black")
        marks[whose] = blank
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("first principal direction")
    axes.set_ylabel("second")
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    if sets:
        figure.legend(
            marks.values(),
            marks.keys(),
            loc="outside lower center",
            ncols=2,
            frameon=False,
            fontsize=8,
        )
    shown = sorted(set(torch.cat(classes).tolist()) - {-1})
    if len(shown) <= MOST_NAMED:
        for label in shown:
            swatch = colour(torch.tensor([label]))
            axes.scatter([], [], c=swatch, s=25, label=str(label))
        axes.legend(title="class", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_gallery(figure: Figure, picture: Gallery) -> None:
    """Draw one row of images per class, all on one sheet: an axes for each takes seconds."""
    rows = [_coloured(images) for images in picture.images.values()]
    columns = max(len(row) for row in rows)
    height, width = (side + max(side // 10, 1) for side in rows[0].shape[1:3])  # with a white gap
    sheet = np.ones((height * len(rows), width * columns, 3))
    for down, row in enumerate(rows):
        for right, image in enumerate(row):
            top, left = down * height, right * width
            sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    figure.set_size_inches(0.5 * columns + 0.6, 0.5 * len(rows) + 0.1)
    axes = figure.add_subplot()
    axes.imshow(sheet, extent=(0, columns, len(rows), 0), aspect="auto")
    axes.set_xticks([])
    axes.set_yticks(np.arange(len(rows)) + 0.5, list(picture.images))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _coloured(images: Tensor) -> Grid:
    """Return images (m, C, H, W), gray or coloured, as (m, H, W, 3)."""
    coloured: Grid = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).double().numpy()
    return coloured.clip(0, 1)
