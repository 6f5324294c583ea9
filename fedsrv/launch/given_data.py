"""Directories of client data that a launch is given: are they what the config speaks of?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmodels.config.combinations import halves_of
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import check_origin, data_and_scenario
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError, reason_of
from fedmodels.facts.data_description import ClientFile, ProblemFile, read_file
from fedmodels.methods import make
from fedmodels.training.asked import keeps_state
from fedmodels.training.fault import name_faults
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import Wire, check_fits
from fedsrv.engine.summary import data_of

TABLE = "partition.json"
STORE = "store"
"""Directory of a partition whose clients have none of their own."""


def check_given_data(experiment: Experiment, root: Path | None, option: str = "--data") -> None:
    """Check that there are data for every client of an experiment, dealt out as it says.

    Without a directory, data are dealt out for this run. ``option`` is how the caller gave it.

    Raises:
        ConfigError: names what differs.
        DataError: there are no clients' data, or the partition's description is damaged.
    """
    if root is None:
        data_and_scenario(experiment, option)
        return
    if not ((root / "0").is_dir() or (root / STORE).is_dir()):
        raise DataError(
            f"{option} {root} holds no client directory 0 and no store; "
            "make one with: fedcli partition CONFIG --out DIR"
        )
    table = root / TABLE
    origin = _read(table).get("config") if table.is_file() else None
    if isinstance(origin, dict):
        check_origin(experiment, origin, f"{option} {root}", option)
    stored = _stored(root)
    beginners = experiment.schedule.beginners
    missing = [str(i) for i in beginners if i >= stored and not (root / str(i)).is_dir()]
    if missing:
        wanted = len(beginners)
        raise ConfigError(
            f"{option} {root} has no data of client {', '.join(missing[:3])}, and the config "
            f"has [schedule] clients = {wanted}: at most {missing[0]} fit these data"
        )


def clients_here(experiment: Experiment, root: Path) -> int:
    """Return how many clients a run can be launched with.

    Clients that it does not begin with may have no data yet; they join from elsewhere.
    """
    most = experiment.schedule.clients
    later = range(max(_stored(root), len(experiment.schedule.beginners)), most)
    return next((client for client in later if not (root / str(client)).is_dir()), most)


def _stored(root: Path) -> int:
    """Return how many clients a partition's store holds; 0 where there is none."""
    return len(_read(root / TABLE).get("clients", ())) if (root / STORE).is_dir() else 0


def check_net(experiment: Experiment, root: Path) -> None:
    """Build the net once for the clients' inputs, so that a mistake is told before they start.

    What is wrong with client 0's directory its client says itself.

    Raises:
        ConfigError: the net cannot be built or does not fit the inputs, nothing that the method
            sends can travel as the config says, or a part of the run does not take the method.
        RunFailed: a function of the method fails, which every process of the run needs.
    """
    try:
        said = description_of(root)
    except DataError:
        return
    run, table = RunFacts(experiment, said.problem), experiment.method
    for each in run.of_each_net:
        each.make_net()
    method = make(table.name, **table.hyper_parameters())
    with name_faults(method):
        keeps_state(method, run)
        method.payload_spec(run)
        check_fits(method, run)
        Wire.of(method, run)
        for part in halves_of(experiment, "server"):
            part.fits(method, run)


def name_of(experiment: Experiment, root: Path | None) -> str:
    """Return what is trained on: by the clients' own account where their data are given."""
    if root is not None:
        try:
            said = description_of(root).dataset
        except DataError:  # the client itself says what is wrong
            said = "own"
        return printable(said, 60)
    return data_of(experiment, ())


def description_of(root: Path) -> ProblemFile:
    """Return how client 0 describes its data, or what all clients of a store share."""
    own = root / "0" / "client.json"
    if own.parent.is_dir():
        return read_file(own, ClientFile)
    return read_file(root / STORE / "problem.json", ProblemFile)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object")
    return content
