"""The trained models that a run directory holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmodels.config.columns import Columns
from fedmodels.config.transforms import transform_of
from fedmodels.errors import ArchiveError, DataError, RunFailed
from fedmodels.facts.data_description import ClientFile
from fedmodels.facts.resolution import experiment_of
from fedmodels.facts.run_classes import ClassChange, RunClasses
from fedmodels.methods import make
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedmodels.tensors.archive import PERSONAL, load_named
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.training.asked import global_weights
from fedmodels.training.run import RunFacts
from fedsrv.state.run_directory import reading, state_numbers
from fedsrv.state.run_record import RunRecord, read_run
from fedsrv.state.state_files import state_path
from fedsrv.state.stated import check_state

READS = 10
"""How often a run that goes on is read until its newest record and that one's state are there."""


def personal_model(run: Path, client: int) -> TrainedModel:
    """Return the model that a client holds at the end, with its normalisation and classes.

    Raises:
        DataError: the run has not ended, or the client's directory is elsewhere.
    """
    file = run / "clients" / str(client) / PERSONAL
    if not file.exists():
        raise DataError(
            f"{file} is not there: a client that trained stores its model when the run ends, in "
            "its own state directory; fedtide.TrainedModel.load opens it from there"
        )
    return TrainedModel.load(file)


def global_model(run: Path) -> TrainedModel:
    """Return everybody's model after the last round; inputs as client 0 normalises them.

    Its classes are those of the run, which may be more than client 0 has.

    Raises:
        ArchiveError: the method has no global model, or no state is there.
    """
    record, common = _newest(run)
    experiment = experiment_of(record.config, str(run / "config.toml"))
    table, data, described = experiment.method, experiment.data, _description(run)
    if data is not None and data.columns is not None:
        _check_unit(data.columns)
    method = make(table.name, **table.hyper_parameters())
    if "global" not in method.views:
        raise ArchiveError(f"{table.name} has no global model here: export a client's (--client)")
    classes = _classes(record)
    names = classes.names if classes else described.class_names
    number = len(classes.names) if classes else described.num_classes
    facts = ModelFacts(
        experiment.net.name,
        experiment.net.options(),
        described.input_shape,
        number,
        described.scale,
        described.mean,
        described.std,
        names,
        experiment.method.name,
        "global",
        record.rounds - 1,
        method.rules[0],
        experiment.net.code_sha256 or "",
        None if data is None else transform_of(data, described.input_shape),
        merged=tuple(classes.merged.items()) if classes else (),
    )
    began = len(classes.first) if classes else number
    of_run = RunFacts(experiment, Problem(tuple(described.input_shape), began))
    frozen = of_run.for_classes(number).frozen_weights
    return TrainedModel(facts, {**global_weights(method, common), **frozen})


def _newest(run: Path) -> tuple[RunRecord, Bundle]:
    """Return what a run has recorded, and what everybody gets of its newest state in there.

    A run that goes on writes a state before its record, and deletes earlier ones meanwhile.

    Raises:
        ArchiveError: no state is there.
    """
    for left in reversed(range(READS)):
        record = read_run(run)
        if not state_numbers(run / "server"):
            raise ArchiveError(f"{run} holds no committed state of the server")
        number = max(0, len(record.rows) - 1)
        file = state_path(run / "server", number)
        try:
            check_state(run, number)
            return record, load_named(file)[0].get("common", Bundle())  # none of "local"
        except ArchiveError:
            if file.exists() or not left:
                raise
    raise AssertionError("the last read returns or raises")


def _check_unit(columns: Columns) -> None:
    """Check that a config says in which unit its numbers are learned."""
    if columns.target and not columns.target_mean:
        raise ArchiveError(
            f"the run's config does not say in what unit {', '.join(columns.targets)} was learned, "
            "and everybody's model says it in that unit: export a client's (--client), which knows "
            "it, or give target_mean and target_std of [data.columns] in a run"
        )


def _classes(record: RunRecord) -> RunClasses | None:
    """Return the classes of the newest state, where clients have classes of their own."""
    growths = [growth for row in record.rows for growth in row.get("growths", ())]
    if not growths:
        return None
    found = RunClasses(tuple(growths[0]["classes"]))
    for growth in growths[1:]:
        found = found.grown(growth["classes"], _changes(growth))
    for growth in record.summary.get("growths", ()):  # no round has followed: no class came
        found = found.grown((), [one for one in _changes(growth) if one.old in found.names])
    return found


def _changes(growth: Mapping[str, Any]) -> list[ClassChange]:
    return [ClassChange(*one) for one in growth.get("class_changes", ())]


def _description(run: Path) -> ClientFile:
    """Return what client 0 said of its data."""
    path = run / "run.db"
    try:
        with reading(run) as db:
            row = db.execute("SELECT client_json FROM clients ORDER BY id LIMIT 1").fetchone()
        found = None if row is None else ClientFile.model_validate_json(row[0])
    except sqlite3.DatabaseError as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from None
    except ValidationError:
        raise ArchiveError(f"{path} is damaged: client 0's description is none") from None
    if found is None:
        raise RunFailed(f"{run}: no client has joined this run yet")
    return found
