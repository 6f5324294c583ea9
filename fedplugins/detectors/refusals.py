"""What a detector does not go with."""

from __future__ import annotations

from fedmodels.config.bounds import Refusal

REFUSED = (
    *(
        Refusal(
            (kind, "detectors"),
            "[evaluate] detector looks at whether a model names the right class, and "
            f"[data.columns] {key} learns no classes: leave it out",
        )
        for kind, key in (("numbers", "target"), ("several labels", "labels"))
    ),
    Refusal(
        ("detectors", "accumulated data"),
        "[evaluate] detector looks at a task that nobody has trained on, and [scenario] "
        'training_data = "accumulated" puts earlier tasks among its data: leave one out',
    ),
)  # fmt: skip
