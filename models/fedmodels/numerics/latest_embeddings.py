"""Embeddings as they were while a net trained on them, and their class means."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.numerics.prototypes import class_prototypes
from fedmodels.tensors.bundle import Prototypes


@dataclass(frozen=True)
class LatestEmbeddings:
    """Each example's embedding when it was last trained on, in the epoch under way."""

    vectors: Tensor  # (n, d)
    visited: Tensor  # (n,) bool

    @classmethod
    def of(cls, examples: int, width: int, device: torch.device) -> LatestEmbeddings:
        """Return room for the embeddings (d,) of so many examples, none of them visited."""
        vectors = torch.zeros(examples, width, device=device)
        return cls(vectors, torch.zeros(examples, dtype=torch.bool, device=device))

    def comes_again(self, index: Tensor) -> bool:
        """Tell whether a batch (B,) has an example that was visited: another epoch has begun."""
        return bool(self.visited[index].any())

    def keep(self, index: Tensor, features: Tensor) -> None:
        """Keep the embeddings (B, d) of a batch (B,)."""
        self.vectors[index] = features.detach().float()
        self.visited[index] = True

    def forget_visits(self) -> None:
        """Begin another epoch."""
        self.visited.zero_()

    def means(self, labels: Tensor, num_classes: int) -> Prototypes:
        """Return the class means of the examples visited, by the labels (n,) of all."""
        return class_prototypes(self.vectors[self.visited], labels[self.visited], num_classes)
