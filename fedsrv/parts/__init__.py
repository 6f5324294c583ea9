"""The parts of a coordinator: each is one capability that a config can leave out.

The order of ``PARTS`` is the order at every seam (:class:`fedsrv.engine.server_part.ServerPart`).
The module of a part is imported where the config asks for it, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from fedmodels.config.experiment import Experiment
from fedsrv.engine.server_part import ServerPart
from fedsrv.events import EventLog
from fedsrv.state.store import Store

IsOn = Callable[[Experiment], bool]
PARTS: Sequence[tuple[str, IsOn]] = (
    ("stages:OpenRuns", lambda e: e.schedule.open),
    ("server_data:ServerExamples", lambda e: True),
    ("stacking:Stacking", lambda e: e.training.together > 1),
    ("stopping:Patience", lambda e: not {e.schedule.patience, e.schedule.target} <= {None}),
    ("unused_data:UnusedData", lambda e: True),
    ("robust:RobustRules", lambda e: e.server.is_robust),
    ("private_rounds:ClientPrivacy", lambda e: bool(e.privacy and e.privacy.hides_clients)),
    ("example_privacy:ExamplePrivacy", lambda e: bool(e.privacy and e.privacy.hides_examples)),
    ("secure_rounds:SecureSums", lambda e: e.secure_sum is not None),
    ("buffered_rounds:AsynchronousRounds", lambda e: e.schedule.is_asynchronous),
    ("odd_uploads:OddUploads", lambda e: True),
    ("exclusions:Exclusions", lambda e: True),
    ("drift:Drift", lambda e: e.evaluate.drift),
)
"""The module and class of each part, and whether an experiment asks for it."""


def parts_of(store: Store, events: EventLog, **given: Any) -> list[ServerPart]:
    """Return the parts that a run asks for; ``given`` is what the caller brings for single ones."""
    found: list[ServerPart] = []
    for place, is_on in PARTS:
        if is_on(store.experiment):
            module, _, name = place.partition(":")
            part = getattr(importlib.import_module(f"fedsrv.parts.{module}"), name)
            found.append(part(store, events, given))
    return found
