"""How many images of pFedGRP's generators an outside classifier takes for their class.

    python -m benchmarks.generators [--keep]

A client's own net cannot say how good a generator is: it may never have known the class. Here the
small CNN judges, trained on the last 30,000 training images of Fashion-MNIST. Each row trains one
WGAN-GP for each of the ten classes, on the first images of that class, and draws 1,000 of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.fid import feature_net
from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep
from fedcli.data.sets.registry import load
from fedmodels.config.data import Data
from fedmodels.techniques.class_replay import Judge
from fedmodels.techniques.generator_training import Lesson
from fedmodels.techniques.generators import Family, Painter, to_images

DRAWN, LEARNT_FROM = 1000, 30_000
STUDY: Mapping[str, Any] = {"images": 64, "width": 8, "epochs": 30, "batch": 16}
"""Generators of the small studies: 120 steps of the critic."""
PAPER: Mapping[str, Any] = {"images": 200, "width": 16, "epochs": 200, "batch": 64}
"""The paper's, on 200 images: 800 steps."""
ROWS = [
    *({"size": "small studies", **STUDY, "lr": lr} for lr in (1e-4, 1e-3, 3e-3)),
    *({"size": "paper", **PAPER, "lr": lr} for lr in (1e-4, 1e-3)),
]


def main() -> None:
    """Print the shares, and keep them as a record where that is asked for."""
    parser = parser_of("generators", __doc__, "generators")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (x, y), (test_x, test_y) = _fashion()
    judge = Judge(feature_net(0, x[-LEARNT_FROM:], y[-LEARNT_FROM:]))
    real = [_share(judge, test_x[test_y == label], label) for label in range(10)]
    rows = [_row({"size": "real test images"}, real)]
    rows += [_row(row, _of_generators(judge, x, y, row)) for row in ROWS]
    tell("generators", rows)
    if options.keep:
        title = "Images that the outside classifier takes for their class, in percent by class"
        keep(options.keep, given_as("generators"), {title: rows})


def _fashion() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return Fashion-MNIST's training and test part, inputs in [0, 1]."""
    data = load(Data(name="fashion-mnist"))
    parts = (data.train.x, data.train.y), (data.test.x, data.test.y)
    train, test = ((torch.from_numpy(x).float() / 255, torch.from_numpy(y)) for x, y in parts)
    return train, test


def _of_generators(judge: Judge, x: Tensor, y: Tensor, row: Mapping[str, Any]) -> list[float]:
    """Train a generator for each class; return the share of its images that is recognised."""
    family = Family(
        input_shape=(1, 28, 28),
        width=row["width"],
        epochs=row["epochs"],
        batch_size=row["batch"],
        lr=row["lr"],
    )
    limits = torch.zeros(1), torch.ones(1)
    lessons = []
    for label in range(10):
        fresh = family.fresh(label, limits)
        images = to_images(fresh, x[y == label][: row["images"]])
        lessons.append(Lesson(fresh, images, label))
    return [
        _share(judge, Painter(family, made).inputs(DRAWN, label), label)
        for label, made in enumerate(family.trained(lessons))
    ]


def _share(judge: Judge, x: Tensor, label: int) -> float:
    """Return the percentage of images (n, 1, 28, 28) that the judge takes for a class."""
    return 100 * float((judge(x).argmax(1) == label).float().mean())


def _row(what: Mapping[str, Any], shares: list[float]) -> dict[str, Any]:
    """Return a row of the table: what was drawn, and shares over the classes."""
    unknown = dict.fromkeys(("images", "width", "epochs", "batch", "lr"))
    found = {"least": min(shares), "mean": fmean(shares), "most": max(shares)}
    return {**unknown, **what, **found}


if __name__ == "__main__":
    main()
