"""Draws pictures of what a client learnt as SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedmodels.console.charts import file_of, words
from fedmodels.host.files import write_atomically
from fedmodels.training.pictures import Gallery, Picture, PrototypeMap

SIDE, TILE = 300, 48
"""Pixels of a map's plot, and of an image of a gallery."""
MARKS = ("M0-6L6 0L0 6L-6 0Z", "M0-6L6 5H-6Z", "M-5-5H5V5H-5Z", "M-6 0L-3-5H3L6 0L3 5H-3Z")
"""Marks of prototypes, by whose they are: SVG paths around the origin."""
MAX_NAMED = 12
"""Classes that a legend can name."""


def draw(picture: Picture, path: Path, class_names: Sequence[str] = ()) -> None:
    """Write a picture as SVG; the same picture gives the same file.

    Labels stand for themselves where classes have no names.
    """
    if isinstance(picture, PrototypeMap):
        drawn = _map(picture, class_names)
    else:
        drawn = _gallery(picture, class_names)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, drawn)


def _map(picture: PrototypeMap, class_names: Sequence[str]) -> str:
    """Draw embeddings as dots and prototypes as larger marks, coloured by class."""
    sets = picture.prototypes
    classes = torch.cat([picture.labels, *(labels for _, labels in sets.values())])
    places = torch.cat([picture.points, *(at for at, _ in sets.values())])
    low, high = places.amin(0), places.amax(0)
    number = max(int(classes.max()) + 1, 1) if len(classes) else 1

    def colour(label: int) -> str:
        return (
            f"hsl({360 * label // number} 65% {42 + 14 * (label % 2)}%)" if label >= 0 else "#fff"
        )

    def placed(points: Tensor, labels: Tensor) -> list[tuple[float, float, str]]:
        shares = (points - low) / (high - low).clamp_min(1e-12)
        return [
            (10 + SIDE * x, 10 + SIDE * (1 - y), colour(int(label)))
            for (x, y), label in zip(shares.tolist(), labels.tolist(), strict=True)
        ]

    parts = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{fill}" fill-opacity=".5"/>'
        for x, y, fill in placed(picture.points, picture.labels)
    ]
    beside, below = SIDE + 26, SIDE + 44
    for (whose, (at, labels)), mark in zip(sets.items(), MARKS, strict=False):
        parts += [_mark(mark, x, y, fill) for x, y, fill in placed(at, labels)]
        parts += [_mark(mark, 16, below - 4, "#fff"), words(28, below, whose, "start")]
        below += 16
    parts.append(words(10 + SIDE / 2, SIDE + 26, picture.axes, "middle"))
    shown = sorted({*classes.tolist()} - {-1})
    for row, label in enumerate(shown if len(shown) <= MAX_NAMED else ()):
        y = 20 + 16 * row
        parts.append(f'<circle cx="{beside}" cy="{y - 3}" r="4" fill="{colour(label)}"/>')
        parts.append(words(beside + 10, y, _name(str(label), class_names), "start"))
    return file_of("".join(parts), SIDE + 130, below, "embeddings and prototypes")


def _mark(path: str, x: float, y: float, fill: str) -> str:
    where = f'transform="translate({x:.1f} {y:.1f})"'
    return f'<path d="{path}" {where} fill="{fill}" stroke="#000" stroke-width=".8"/>'


def _gallery(picture: Gallery, class_names: Sequence[str]) -> str:
    """Draw one row of images for each class."""
    parts, columns = [], 0
    for down, (name, images) in enumerate(picture.images.items()):
        top = 4 + down * (TILE + 4)
        parts.append(words(4, top + TILE / 2 + 3, _name(name, class_names), "start"))
        for right, image in enumerate(_coloured(images)):
            file = io.BytesIO()
            Image.fromarray(image).save(file, format="PNG")
            data = base64.b64encode(file.getvalue()).decode()
            where = f'x="{100 + right * (TILE + 4)}" y="{top}" width="{TILE}" height="{TILE}"'
            look = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
            parts.append(f'<image {where} {look} href="data:image/png;base64,{data}"/>')
        columns = max(columns, len(images))
    height = 4 + len(picture.images) * (TILE + 4)
    return file_of("".join(parts), 100 + columns * (TILE + 4), height, "images by class")


def _name(label: str, class_names: Sequence[str]) -> str:
    known = label.isdecimal() and int(label) < len(class_names)
    return class_names[int(label)] if known else label


def _coloured(images: Tensor) -> NDArray[np.uint8]:
    """Return images (m, C, H, W) in [0, 1], gray or coloured, as (m, H, W, 3)."""
    coloured = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).clamp(0, 1)
    return (coloured * 255).round().to(torch.uint8).cpu().numpy()
