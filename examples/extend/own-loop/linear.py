"""A linear net like scikit-learn's models: its features are the inputs."""

import math

from torch import Tensor, nn


class Linear(nn.Module):
    """One layer on the raw inputs."""

    def __init__(self, num_classes: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(input_shape), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the inputs, flat: (B, d)."""
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K)."""
        logits: Tensor = self.head(self.features(x))
        return logits
