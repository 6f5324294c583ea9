"""Availability traces: tables that say which clients are there in which rounds.

    client,from,until
    0,0,10
    0,20,30
    1,5,100

Client 0 is there in rounds 0 to 9 and 20 to 29. A client that no row names is always there.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.position import Round

COLUMNS = ["client", "from", "until"]
Availability = Mapping[int, Sequence[tuple[int, int]]]
"""Spans (from, until) of rounds in which each client is there; ``until`` is the first without it.
A client without an entry is always there."""


def read_availability(experiment: Experiment) -> Availability:
    """Read the trace that an experiment names; empty where it names none.

    Raises:
        ConfigError: the file cannot be read, has a wrong row, is not the one the run began with, or
            says that nobody is there in any round.
    """
    place = experiment.schedule.availability
    if place is None:
        return {}
    lines = _content(experiment).decode(errors="replace").splitlines()
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise ConfigError(f"[schedule] availability: {place} is no CSV: {error}") from None
    if rows[:1] != [COLUMNS]:
        raise ConfigError(f"[schedule] availability: {place} must begin with {','.join(COLUMNS)}")
    found: dict[int, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows[1:], start=2):
        try:
            client, begin, end = map(int, row)
        except ValueError:
            begin, end, client = 0, 0, -1
        if not (0 <= client < experiment.schedule.clients and 0 <= begin < end):
            raise ConfigError(
                f"[schedule] availability: {place}, line {number}: {','.join(row)!r} is not a "
                "client of the run and two rounds, the second one larger"
            )
        found.setdefault(client, []).append((begin, end))
    _check_somebody_comes(experiment, found)
    return found


def _check_somebody_comes(experiment: Experiment, found: Availability) -> None:
    """Refuse a trace without anybody in any round, as far as rounds are known: ConfigError."""
    schedule, rounds = experiment.schedule, experiment.schedule.rounds
    if schedule.order == "tasks_outer":
        if experiment.most_tasks is None:
            return  # the data say how many tasks there are
        rounds *= experiment.most_tasks
    first = min((begin for spans in found.values() for begin, _ in spans), default=0)
    if len(found) == schedule.clients and first >= rounds:
        raise ConfigError(
            f"[schedule] availability: by {schedule.availability} no client is there in any round; "
            f"the run's are 0 to {rounds - 1}"
        )


def is_there(availability: Availability, client: int, round: Round) -> bool:
    """Tell whether a client is there in a round."""
    spans = availability.get(client)
    return spans is None or any(begin <= round < end for begin, end in spans)


def attendance(experiment: Experiment) -> Callable[[int, int], bool]:
    """Return what tells whether a client is there in a round; raise ConfigError as a trace does."""
    return partial(is_there, read_availability(experiment))


def with_digest(experiment: Experiment) -> Experiment:
    """Return the experiment with the digest of its trace, if it names one.

    Raises:
        ConfigError: the file cannot be read, has a wrong row, or is not the one the run began with.
    """
    if experiment.schedule.availability is None:
        return experiment
    read_availability(experiment)  # before anybody joins
    digest = hashlib.sha256(_content(experiment)).hexdigest()
    schedule = experiment.schedule.model_copy(update={"availability_sha256": digest})
    return experiment.model_copy(update={"schedule": schedule})


def _content(experiment: Experiment) -> bytes:
    """Return the bytes of the trace that an experiment names.

    Raises:
        ConfigError: the file cannot be read, or is not the one the run began with.
    """
    place, expected = experiment.schedule.availability, experiment.schedule.availability_sha256
    try:
        content = Path(str(place)).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"[schedule] availability: cannot read {place}: {error.strerror}"
        ) from None
    if expected not in (None, hashlib.sha256(content).hexdigest()):
        raise ConfigError(f"[schedule] availability: {place} is not the file this run began with")
    return content
