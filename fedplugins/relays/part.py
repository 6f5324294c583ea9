"""Relays, as the table of combinations has them: no config switches them on."""

from __future__ import annotations

from fedmodels.config.part import Part

PART = Part(
    "relays", "fedsrv relay", lambda experiment: False, "relays.md",
    home="fedplugins.relays", after="own nets",
)  # fmt: skip
