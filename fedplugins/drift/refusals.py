"""What drift does not go with."""

from __future__ import annotations

from fedmodels.config.bounds import Refusal

REFUSED = tuple(
    Refusal(
        (kind, "drift"),
        f"[data.columns] {key} learns no classes: drift compares the mix of classes that are "
        "predicted, and here there is none: leave it out",
    )
    for kind, key in (("numbers", "target"), ("several labels", "labels"))
)
