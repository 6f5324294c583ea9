"""The server's own examples: the one directory of data that a coordinator opens.

    DIR/problem.json                       how inputs are normalised, as beside a global test set
    DIR/{x,y,unlabelled_x}.npy             labelled examples, balanced, and unlabelled ones

``fedcli partition`` sets them apart from the training split, so that no client holds them. Nothing
here knows a data set: arrays are read as they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import check_origin
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.data_description import SCALES, Normaliser, ProblemFile, read_file
from fedmodels.host.files import open_regular
from fedmodels.methods import method_class
from fedmodels.tensors.bundle import Problem
from fedmodels.training.asked import needs_server_data
from fedmodels.training.contexts import ServerContext, ServerData
from fedsrv.engine.plan import Plan
from fedsrv.engine.server_part import NOTHING, ServerPart
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store


class ServerExamples(ServerPart):
    """Gives the method's server half the examples that the coordinator holds."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Take the examples that the caller read; raise ConfigError if the method lacks some."""
        super().__init__(store, events, given)
        self._data: ServerData | None = given.get("server_data")
        check_given(self.experiment, self._data is not None)

    def gathered(self, plan: Plan) -> None:
        """Check that they are of the clients' problem."""
        check_fits(self._data, plan.run.problem)

    def context(self, ctx: ServerContext) -> ServerContext:
        """Add them."""
        return replace(ctx, server_data=self._data)


def server_data_for(experiment: Experiment, directory: Path | None) -> ServerData | None:
    """Return what the method's server half trains on; None where it trains on nothing.

    Raises:
        ConfigError: the method needs data and no directory is given, or one of another partition.
        DataError: the directory is damaged.
    """
    check_given(experiment, directory is not None)
    if directory is None:
        return None
    data = read_server_data(directory)
    origin = read_file(directory / "problem.json", ProblemFile).partition
    if origin is not None:
        check_origin(experiment, origin, str(directory))
    return data


def check_given(experiment: Experiment, given: bool) -> None:
    """Check that a method whose server half trains on examples has some.

    Raises:
        ConfigError: says how to get them.
    """
    if needs_server_data(method_class(experiment.method.name)) and not given:
        raise ConfigError(
            f"{experiment.method.name} trains on data of the server's own: give [data] "
            "server_examples = N per class, and to fedsrv serve --server-data the directory "
            "'server' of the partition"
        )


def _read(path: Path) -> NDArray[Any]:
    with open_regular(path) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_server_data(directory: Path) -> ServerData:
    """Read and normalise the server's examples.

    Raises:
        DataError: a file is missing, or does not hold what it must.
    """
    facts = read_file(directory / "problem.json", ProblemFile)
    try:
        x, y, unlabelled = (_read(directory / f"{name}.npy") for name in ("x", "y", "unlabelled_x"))
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{directory} is not a directory of server data: {reason}") from None
    if "scale" not in facts.model_fields_set:
        facts = facts.model_copy(update={"scale": SCALES.get(x.dtype.name, 1.0)})
    for name, raw in (("x", x), ("unlabelled_x", unlabelled)):
        if raw.dtype.name not in SCALES or raw.shape[1:] != facts.input_shape:
            raise DataError(
                f"{directory / name}.npy holds {raw.dtype} {list(raw.shape)}; expected "
                f"{' or '.join(SCALES)} [n, {', '.join(map(str, facts.input_shape))}]"
            )
    if y.dtype != np.int64 or y.shape != (len(x),) or not len(y):
        raise DataError(f"{directory / 'y.npy'} must hold one int64 label for each example of x")
    normalise = Normaliser.of(facts)
    inputs, others = (torch.from_numpy(normalise(held)) for held in (x, unlabelled))
    for name, seen in (("x", inputs), ("unlabelled_x", others)):
        if not torch.isfinite(seen).all():
            raise DataError(
                f"{directory / name}.npy holds NaN or infinity once normalised: remove or replace "
                "those examples, or mend scale, mean and std in problem.json"
            )
    return ServerData(inputs, torch.from_numpy(y), others)


def check_fits(data: ServerData | None, problem: Problem) -> None:
    """Check that the server's examples, if it has some, are of the clients' problem.

    Raises:
        DataError: shapes or classes differ.
    """
    if data is None:
        return
    low, high = int(data.y.min()), int(data.y.max())
    if tuple(data.x.shape[1:]) != problem.input_shape or not 0 <= low <= high < problem.num_classes:
        raise DataError(
            f"the server's data have inputs {list(data.x.shape[1:])} and labels {low}…{high}; the "
            f"clients' have {list(problem.input_shape)} and {problem.num_classes} classes"
        )
