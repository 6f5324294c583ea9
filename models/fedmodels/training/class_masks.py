"""A method's own rule among the classes that a client has met, and among all classes.

Some methods predict among the classes that a client has met, most among all. Where a run asks for
it (``[evaluate] class_masks``), clients' models are scored both ways, so that methods compare.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.devices import to_device
from fedmodels.training.method import Method

SEEN, ALL = "seen_classes", "all_classes"


def rules_of(method: Method, experiment: Experiment) -> tuple[str, ...]:
    """Return the rules a client's models are scored by, in the order of its report."""
    if not experiment.evaluate.class_masks:
        return method.rules
    first, *others = method.rules
    return (first, SEEN, ALL, *(rule for rule in others if rule != ALL))


def candidates_of(seen: Tensor, device: torch.device) -> Tensor:
    """Return the classes ``seen`` (K,), or all where there is none: a mask on a device."""
    return to_device(seen if bool(seen.any()) else torch.ones_like(seen), device)


def mask_scores(scores: Mapping[str, Tensor], candidates: Tensor) -> dict[str, Tensor]:
    """Return scores with those of the method's own rule among two sets of classes.

    Args:
        scores: (B, K) by rule, the method's own first.
        candidates: (K,) bool, the classes that a client has met.
    """
    (first, own), *others = scores.items()
    among_seen = own.masked_fill(~candidates, -torch.inf)
    # A method that masks by itself says what it scores without its mask.
    return {first: own, SEEN: among_seen, ALL: scores.get(ALL, own), **dict(others)}
