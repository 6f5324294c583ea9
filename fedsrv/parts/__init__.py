"""The parts of a coordinator: each is one capability that a config can leave out.

The list of all parts is ``LISTED`` of :mod:`fedmodels.config.combinations`; its order is the order
at every seam (:class:`fedsrv.engine.server_part.ServerPart`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedmodels.config.combinations import halves_of, part_at
from fedmodels.config.experiment import Experiment
from fedmodels.methods import trains_at_server
from fedmodels.training.contexts import ServerData
from fedmodels.training.optimizer import check_training
from fedsrv.engine.admission import Admission
from fedsrv.engine.server_part import ServerPart
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store


def check(experiment: Experiment, *, certified: bool = False) -> None:
    """Refuse a config, as far as that needs neither data nor clients; raise ConfigError.

    ``certified`` tells whether every caller shows a certificate.
    """
    if experiment.zstd:
        part_at("fedpb.zstd:check_installed")()
    check_training(experiment)
    if experiment.schedule.availability is not None:
        part_at("fedsrv.engine.availability:read_availability")(experiment)
    for part in halves_of(experiment, "server"):
        part.check(experiment, certified=certified)


def in_one_process(experiment: Experiment) -> Experiment:
    """Return an experiment as one process can run it; parts say what that changes."""
    for part in halves_of(experiment, "server"):
        experiment = part.in_one_process(experiment)
    return experiment


def with_digests(experiment: Experiment) -> Experiment:
    """Return the experiment with the digests of files that it names: of weights, and of a trace.

    Raises:
        ConfigError: one cannot be read, or is not the one that the run began with.
    """
    if (experiment.net.weights or experiment.net.weights_sha256) is not None:
        pin_weights = part_at("fedmodels.training.initial_weights:pin_weights")
        experiment = pin_weights(experiment)
    if experiment.schedule.availability is not None:
        experiment = part_at("fedsrv.engine.availability:with_digest")(experiment)
    return experiment


def server_data_for(experiment: Experiment, directory: Path | None) -> ServerData | None:
    """Return what the method's server half trains on; None where it trains on nothing.

    Raises:
        ConfigError: the method needs data and no directory is given, or one of another partition.
        DataError: the directory is damaged.
    """
    if not trains_at_server(experiment):
        return None
    found: ServerData = part_at("fedsrv.parts.server_data:server_data_for")(experiment, directory)
    return found


def parts_of(store: Store, events: EventLog, **given: Any) -> list[ServerPart]:
    """Return the parts that a run asks for; ``given`` is what the caller brings for single ones."""
    return [part(store, events, given) for part in halves_of(store.experiment, "server")]


def admission_by(options: Iterable[ServerPart], store: Store) -> Admission | None:
    """Return what checks who joins a run, where a part of it says so."""
    made = (one.admission(store.ledger.profiles()) for one in options)
    return next((one for one in made if one is not None), None)
