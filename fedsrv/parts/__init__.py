"""The parts of a coordinator: each is one capability that a config can leave out.

The order of ``PARTS`` is the order at every seam (:class:`fedsrv.engine.server_part.ServerPart`).
The module of a part is imported where the config asks for it, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.methods import method_class
from fedmodels.parts.server_data import needs_server_data
from fedmodels.training.contexts import ServerData
from fedmodels.training.optimizer import check_training
from fedmodels.training.wire import part_at
from fedsrv.engine.server_part import ServerPart
from fedsrv.events import EventLog
from fedsrv.state.store import Store

IsOn = Callable[[Experiment], bool]
PARTS: Sequence[tuple[str, IsOn]] = (
    ("stages:OpenRuns", lambda e: e.schedule.open),
    ("server_data:ServerExamples", lambda e: _trains_at_the_server(e)),
    ("beginning:Beginning", lambda e: e.net.begin_from is not None),
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
        part_at("fedpb.zstd:check_installed")()
    check_training(experiment)
    if experiment.schedule.availability is not None:
        part_at("fedsrv.availability:read_availability")(experiment)
    for part in _classes(experiment):
        part.check(experiment)


def with_digests(experiment: Experiment) -> Experiment:
    """Return the experiment with the digests of files that it names: of weights, and of a trace.

    Raises:
        ConfigError: one cannot be read, or is not the one that the run began with.
    """
    if (experiment.net.weights or experiment.net.weights_sha256) is not None:
        pin_weights = part_at("fedmodels.training.initial_weights:pin_weights")
        experiment = pin_weights(experiment)
    if experiment.schedule.availability is not None:
        experiment = part_at("fedsrv.availability:with_digest")(experiment)
    return experiment


def server_data_for(experiment: Experiment, directory: Path | None) -> ServerData | None:
    """Return what the method's server half trains on; None where it trains on nothing.

    Raises:
        ConfigError: the method needs data and no directory is given, or one of another partition.
        DataError: the directory is damaged.
    """
    if not _trains_at_the_server(experiment):
        return None
    found: ServerData = part_at("fedsrv.parts.server_data:server_data_for")(experiment, directory)
    return found


def parts_of(store: Store, events: EventLog, **given: Any) -> list[ServerPart]:
    """Return the parts that a run asks for; ``given`` is what the caller brings for single ones."""
    return [part(store, events, given) for part in _classes(store.experiment)]


def _classes(experiment: Experiment) -> Iterator[type[ServerPart]]:
    for place, is_on in PARTS:
        if is_on(experiment):
            module, _, name = place.partition(":")
            yield getattr(importlib.import_module(f"fedsrv.parts.{module}"), name)


def _trains_at_the_server(experiment: Experiment) -> bool:
    return needs_server_data(method_class(experiment.method.name))


def _hides(experiment: Experiment, level: str) -> bool:
    return experiment.privacy is not None and experiment.privacy.level == level
