"""The parts of a coordinator: each is one capability that a config can leave out.

The order of ``PARTS`` is the order at every seam (:class:`fedsrv.engine.server_part.ServerPart`).
The module of a part is imported where the config asks for it, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.training.optimizer import check_training
from fedpb import zstd
from fedsrv.availability import read_availability
from fedsrv.engine.server_part import ServerPart
from fedsrv.events import EventLog
from fedsrv.state.store import Store

IsOn = Callable[[Experiment], bool]
PARTS: Sequence[tuple[str, IsOn]] = (
    ("stages:OpenRuns", lambda e: e.schedule.open),
    ("server_data:ServerExamples", lambda e: True),
    ("stacking:Stacking", lambda e: e.training.together > 1),
    ("stopping:Patience", lambda e: (e.schedule.patience, e.schedule.target) != (None, None)),
    ("unused_data:UnusedData", lambda e: True),
    ("robust:RobustRules", lambda e: e.server.is_robust),
    ("private_rounds:ClientPrivacy", lambda e: _hides(e, "client")),
    ("example_privacy:ExamplePrivacy", lambda e: _hides(e, "example")),
    ("secure_rounds:SecureSums", lambda e: e.secure_sum is not None),
    ("buffered_rounds:AsynchronousRounds", lambda e: e.schedule.is_asynchronous),
    ("odd_uploads:OddUploads", lambda e: True),
    ("exclusions:Exclusions", lambda e: True),
    ("drift:Drift", lambda e: e.evaluate.drift),
    ("trackers:Trackers", lambda e: e.tracking.is_on),
)
"""The module and class of each part, and whether an experiment asks for it."""


def check(experiment: Experiment) -> None:
    """Refuse a config, as far as that needs neither data nor clients; raise ConfigError."""
    if experiment.zstd:
        zstd.check_installed()
    check_training(experiment)
    read_availability(experiment)
    for part in _classes(experiment):
        part.check(experiment)


def parts_of(store: Store, events: EventLog, **given: Any) -> list[ServerPart]:
    """Return the parts that a run asks for; ``given`` is what the caller brings for single ones."""
    return [part(store, events, given) for part in _classes(store.experiment)]


def _classes(experiment: Experiment) -> Iterator[type[ServerPart]]:
    for place, is_on in PARTS:
        if is_on(experiment):
            module, _, name = place.partition(":")
            yield getattr(importlib.import_module(f"fedsrv.parts.{module}"), name)


def _hides(experiment: Experiment, level: str) -> bool:
    return experiment.privacy is not None and experiment.privacy.level == level
