"""A custom net, used by the coordinator's config and the training scripts in this folder."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """Two layers: ``features`` gives embeddings, ``head`` gives logits."""

    def __init__(self, num_classes: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 32), nn.ReLU())
        self.head = nn.Linear(32, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return embeddings (B, 32)."""
        z: Tensor = self.layers(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(self.features(x))
        return logits
