"""The four-layer CNN of PFLlib's leaderboard for 28 x 28 grey images: ``[net] name``."""

from __future__ import annotations

from torch import nn


class Cnn4(nn.Module):
    """Two 5 x 5 convolutions with pooling, a layer of 512, and a head: 582,026 parameters."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = input_shape
        cells = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(cells, 512), nn.ReLU()),
        )
        self.head = nn.Linear(512, num_classes)
