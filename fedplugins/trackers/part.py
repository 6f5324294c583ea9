"""What switches trackers on, and where their code is; nothing else is loaded until a run asks."""

from __future__ import annotations

from fedmodels.config.part import Part, keys_of

PART = Part(
    "trackers",
    "[tracking]",
    lambda experiment: keys_of(experiment, "tracking").is_on,
    "operations.md",
    home="fedplugins.trackers",
    after="prequential scores",
    tables={"tracking": "table:Tracking"},
    server="half:Trackers",
    is_beside=True,
    sample={"tracking": {"tensorboard": True}},
)
