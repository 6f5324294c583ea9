"""Methods without variants whose readings of earlier versions are gone."""

from __future__ import annotations

from fedmodels.methods.variants import Variants

OF = {
    "fedproto": Variants(gone={"candidates": "local"}),
    "moon": Variants(gone={"prev_init": "initial"}),
    "fedcil": Variants(gone={"consistency_on": "before", "teacher": "own"}),
    "af-fcl": Variants(gone={"last": "global", "density": "arithmetic"}),
    "mfcl": Variants(gone={"current": "client", "renew": "task"}),
    "target": Variants(gone={"sends": "images", "current": "client", "renew": "task"}),
}
