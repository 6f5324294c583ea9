"""Games with ``level = "example"``: what class prototypes tell of one example of a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.privacy_audit.client_level import FAR, NOISE, TABLES
from fedmodels.facts.resolution import experiment_of
from fedmodels.numerics.secrecy import Secret
from fedmodels.privacy.accounting import GaussianReleases, epsilon_of
from fedmodels.training.private_steps import HiddenExamples, private_class_sums

EXAMPLES, WIDTH = 3, 2
"""Of the client without the canary; numbers of an embedding."""


@dataclass(frozen=True)
class PrototypeGame:
    """The class sums of a client, with the canary among its examples or without."""

    name: str
    privacy: Mapping[str, Any] = field(default_factory=dict)
    is_gaussian: bool = True

    @cached_property
    def hidden(self) -> HiddenExamples:
        """What the config asks for."""
        table = {**NOISE, "level": "example", "prototype_clip": 1.0, **self.privacy}
        privacy = experiment_of({**TABLES, "privacy": table}).privacy
        assert privacy is not None, "it is in the config"
        contents = np.arange(EXAMPLES + 1, dtype=np.uint64)
        return HiddenExamples(privacy, contents, 2, 0, 1, sends_prototypes=True)

    @property
    def delta(self) -> float:
        """The promise's delta."""
        return self.hidden.privacy.chance

    def charged(self) -> float:
        """Return what the prototypes of one training cost."""
        return epsilon_of((GaussianReleases(self.hidden.noise),), self.delta)

    def play(self, is_there: bool) -> float:
        """Release the sums once; return the logarithm of the ratio of likelihoods."""
        z = torch.zeros(EXAMPLES + 1, WIDTH)
        y = torch.ones(EXAMPLES + 1, dtype=torch.int64)
        bound = self.hidden.privacy.prototype_clip
        assert bound is not None, "it is in the config"
        z[0, 0], y[0] = FAR * bound, 0 if is_there else 2  # classes that nobody looks at take it
        sums, counts = private_class_sums(z, y, 3, self.hidden, Secret.fresh(), 0)
        return float(sums[0, 0] / bound + counts[0])
