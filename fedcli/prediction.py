"""Predictions of a client's trained model for new inputs: photos, recordings, or arrays."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcli.data.folders import TABLE_ENDS
from fedcli.data.own.new_inputs import NewInputs, read_new
from fedcli.runtime.deployed import Deployed
from fedcli.runtime.state import PERSONAL
from fedmodels.errors import DataError, reason_of
from fedmodels.files import replacing
from fedmodels.nets.trained import TrainedModel
from fedmodels.printable import printable

CALCULATED = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that an office program would calculate."""
HEADS = ("input", "from", "to", "class", "probability")


@dataclass(frozen=True)
class Predictions:
    """The model's predictions for the inputs of one file."""

    inputs: NewInputs
    classes: Sequence[str]
    shares: NDArray[np.float32]
    """The probability (n, K) of each class."""

    def lines(self, top: int, *, as_json: bool = False) -> Iterator[str]:
        """Yield a line for each input: the most probable classes, the first one first."""
        for number, shares in enumerate(self.shares):
            order = np.argsort(-shares, kind="stable")[:top]
            named = {self.classes[k]: float(shares[k]) for k in order}
            source = self.inputs.called(number)
            if as_json:
                yield json.dumps({"input": source, "classes": named})
            else:
                found = "  ".join(f"{printable(name)} {share:.3f}" for name, share in named.items())
                yield f"{source}: {found}"

    def best(self) -> Counter[str]:
        """Return how many inputs of each class the file has."""
        return Counter(self.classes[k] for k in self.shares.argmax(axis=1))

    @property
    def shown(self) -> Path:
        """The file, or the directory of a photo: what a summary is of."""
        return self.inputs.file if self.inputs.places else self.inputs.file.parent

    def rows(self) -> Iterator[list[object]]:
        """Yield a row of the CSV for each input."""
        for number, shares in enumerate(self.shares):
            place = self.inputs.places[number] if self.inputs.places else ("", "")
            best = int(shares.argmax())
            told = [_cell(str(self.inputs.file)), *place, _cell(self.classes[best])]
            yield [*told, *(f"{share:.6f}" for share in (shares[best], *shares))]


def places_of(run: Path, client: int) -> tuple[Path, Path]:
    """Return where a client keeps its models: under a run directory, or its own state directory."""
    return run / "clients" / str(client), run / str(client)


def personal_file(run: Path, client: int) -> Path:
    """Return a client's final model, or else the live one; raise DataError if there is none."""
    places = places_of(run, client)
    for file in (*(p / PERSONAL for p in places), *(Deployed(p).current for p in places)):
        if file.is_file():
            return file
    if not run.is_dir():
        raise DataError(f"--run {run} is no directory")
    raise DataError(
        f"{run} holds no model of client {client}: who trained stores a model when the run ends, "
        "in RUN/clients of fedsrv launch or in its own --state-dir; give one of them as --run"
    )


def predictions(model: TrainedModel, file: Path, paths: Sequence[Path]) -> Iterator[Predictions]:
    """Yield the predictions of a model, which is in ``file``, for each of the other files.

    Raises:
        DataError: a file cannot be read, does not fit the model or is beyond it; names it.
    """
    for inputs in read_new(paths, model.facts, file):
        yield predicted(model, inputs)


def predicted(model: TrainedModel, inputs: NewInputs) -> Predictions:
    """Return the predictions of a model for some inputs.

    Raises:
        DataError: they are beyond the model; names them.
    """
    shares = model.probabilities(inputs.x)
    if not np.isfinite(shares).all():
        path = inputs.file
        raise DataError(f"{path} holds values so large that the model's outputs are none")
    return Predictions(inputs, model.class_names, shares)


def are_many(paths: Iterable[Path]) -> bool:
    """Tell whether files may hold many inputs, which belong into a CSV rather than on a screen."""
    return any(path.is_dir() or path.suffix.lower() in TABLE_ENDS for path in paths)


def write_csv(found: Iterable[Predictions], classes: Sequence[str], out: Path) -> Iterator[str]:
    """Write predictions into a CSV, an input a row; yield a summary of each file or directory.

    Raises:
        DataError: the CSV cannot be written, or a file cannot be read.
    """
    try:
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow([*HEADS, *map(_cell, classes)])
            for place, those in groupby(found, key=lambda one: one.shown):
                best, files = Counter[str](), list[Path]()
                for one in those:
                    lines.writerows(one.rows())
                    best += one.best()
                    files.append(one.inputs.file)
                told = ", ".join(f"{printable(name)} {n}" for name, n in best.most_common())
                yield f"{files[0] if len(files) == 1 else place}: {told}"
    except OSError as error:
        raise DataError(f"{out} cannot be written: {reason_of(error)}") from None


def _cell(text: str) -> str:
    """Return a text as a cell that an office program shows, and does not calculate."""
    return f"'{text}" if text.startswith(CALCULATED) else text
