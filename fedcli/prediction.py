"""Predictions of a client's trained model for new inputs: photos, recordings, or arrays."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.archives import archives
from fedcli.data.folders import TABLE_ENDS, ending
from fedcli.data.own.new_inputs import NewInputs, how_of, new_files, read_file
from fedcli.runtime.deployed import Deployed
from fedcli.runtime.state import PERSONAL
from fedmodels.errors import ConfigError, DataError, reason_of
from fedmodels.files import replacing
from fedmodels.nets.trained import TrainedModel
from fedmodels.printable import printable

CALCULATED = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that an office program would calculate."""
_NUMBER = re.compile(r"-?[0-9]+([.,][0-9]+)?")
"""What is a number to an office program as well, and stays as it is."""
MAX_LETTERS = 300
"""Letters of why a file has no answer, in a line."""
HEADS = ("input", "from", "to", "class", "probability", "probabilities", "note")
"""What answers hold beside the columns that are kept and the classes."""
FAR = "far from the training data, {:.2g} times as far as such inputs are"
UNKNOWN = "unknown"
"""What an input is called whose most probable class is not probable enough, or which is far."""


@dataclass(frozen=True)
class Predictions:
    """The model's predictions for the inputs of one file."""

    inputs: NewInputs
    classes: Sequence[str]
    shares: NDArray[np.float32]
    """The probability (n, K) of each class."""
    far: Sequence[str] = ()
    """Of each input, which of its columns are far from those of training; empty text: none."""
    least: float = 0.0
    """An input is called unknown where its most probable class has less, or where it is far; 0:
    never."""

    @property
    def names(self) -> list[str]:
        """Return what each input is called: its most probable class, or unknown."""
        far = self.far or [""] * len(self.shares)
        return [
            UNKNOWN if self.least and (note or shares.max() < self.least) else self.classes[k]
            for k, shares, note in zip(self.shares.argmax(axis=1), self.shares, far, strict=True)
        ]

    def note(self, number: int) -> str:
        """Return what is to be known of an input."""
        return self.far[number] if self.far else ""

    def lines(self, top: int, *, as_json: bool = False) -> Iterator[str]:
        """Yield a line for each input: the most probable classes, the first one first."""
        names = self.names
        for number, shares in enumerate(self.shares):
            order = np.argsort(-shares, kind="stable")[:top]
            named = {self.classes[k]: float(shares[k]) for k in order}
            source = self.inputs.called(number)
            note, is_known = self.note(number), names[number] != UNKNOWN
            if as_json:
                told = {"note": note} if note else {}
                told |= {} if is_known else {"class": UNKNOWN}
                yield json.dumps({"input": source, "classes": named, **told})
            else:
                found = "  ".join(f"{printable(name)} {share:.3f}" for name, share in named.items())
                found = found if is_known else f"{UNKNOWN} ({found})"
                yield f"{source}: {found}{f'  ({note})' if note else ''}"
        if why := self.inputs.why:
            said = json.dumps({"input": str(self.inputs.file), "error": why})
            yield said if as_json else f"{self.inputs.file}: no answer ({why})"
        for place, why, _ in self.inputs.left:
            where = f"{self.inputs.file}, {self.inputs.unit} {place}"
            said = json.dumps({"input": where, "error": why})
            yield said if as_json else f"{where}: no answer ({why})"

    def best(self) -> Counter[str]:
        """Return how many inputs of each class the file has."""
        return Counter(self.names)

    @property
    def shown(self) -> Path:
        """The file, or the directory of a photo: what a summary is of."""
        is_whole = bool(self.inputs.places or self.inputs.why)
        return self.inputs.file if is_whole else self.inputs.file.parent

    def answers(self, keep: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield an object for each input, and for each row of a table that makes none.

        A row without an answer has no class, and a note that says why; where some are such, the
        order is that of the file.
        """
        found, left = self._answered(keep), self.inputs.left
        if self.inputs.why:
            found = iter([self._unanswered(None, self.inputs.why, dict.fromkeys(keep, ""))])
        if not left:
            yield from found
            return
        unanswered = [
            self._unanswered(place, why, dict(zip(keep, cells, strict=True)))
            for place, why, cells in left
        ]
        yield from sorted([*found, *unanswered], key=lambda one: one["from"])

    def _unanswered(self, place: int | None, why: str, kept: Mapping[str, str]) -> dict[str, Any]:
        return {
            "input": str(self.inputs.file), "from": place, "to": place, **kept, "class": None,
            "probability": None, "probabilities": {}, "note": f"no answer: {why}",
        }  # fmt: skip

    def _answered(self, keep: Sequence[str]) -> Iterator[dict[str, Any]]:
        for number, (name, shares) in enumerate(zip(self.names, self.shares, strict=True)):
            first, last = self.inputs.places[number] if self.inputs.places else (None, None)
            cells, each = self.inputs.kept[number] if keep else (), shares.tolist()
            yield {
                "input": str(self.inputs.file), "from": first, "to": last,
                **dict(zip(keep, cells, strict=True)), "class": name, "probability": max(each),
                "probabilities": dict(zip(self.classes, each, strict=True)),
                "note": self.note(number),
            }  # fmt: skip

    def rows(self, keep: Sequence[str] = ()) -> Iterator[list[object]]:
        """Yield a row of the CSV for each of the answers."""
        for one in self.answers(keep):
            shares = [one["probability"], *(one["probabilities"].get(k) for k in self.classes)]
            places = ["" if one[key] is None else one[key] for key in ("from", "to")]
            named = [*(_cell(one[name]) for name in keep), _cell(one["class"] or "")]
            texts = ["" if share is None else f"{share:.6f}" for share in shares]
            yield [_cell(one["input"]), *places, *named, *texts, _cell(one["note"])]


def heads(classes: Sequence[str], keep: Sequence[str] = ()) -> list[str]:
    """Return the heads of the columns of :meth:`Predictions.rows`."""
    named = [*map(_cell, keep)], [*map(_cell, classes)]
    return ["input", "from", "to", *named[0], "class", "probability", *named[1], "note"]


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


def predictions(
    model: TrainedModel,
    file: Path,
    paths: Sequence[Path],
    keep: Sequence[str] = (),
    least: float = 0.0,
) -> Iterator[Predictions]:
    """Yield the predictions of a model, which is in ``file``, for each of the other files.

    Columns to ``keep`` pass through; inputs below ``least`` are called unknown. A file that cannot
    be read, does not fit the model or is beyond it has no answer, and says why.

    Raises:
        ConfigError: a column cannot be kept under its name, or ``least`` is no probability.
        DataError: no file has an answer; names the first one, and why.
    """
    if not 0 <= least <= 1:
        raise ConfigError(f"{least:g} is no share from 0 to 1, below which an input is unknown")
    for at, name in enumerate(keep):
        if name in (*HEADS, *model.class_names, *keep[:at]):
            raise ConfigError(
                f"column {printable(name)!r} cannot be kept: answers have another column of that "
                "name; rename it"
            )
    facts, first, answered = model.facts, None, False
    how = how_of(facts, file)
    with archives() as packed:
        for path in new_files(paths, how, packed):
            try:
                found = [
                    predicted(model, inputs, least)
                    for inputs in read_file(path, facts, how, keep, packed)
                ]
            except DataError as error:
                error = packed.renamed(error)
                first = first or error
                none = NewInputs(packed.shown(path), np.empty(0), why=str(error))
                found = [Predictions(none, model.class_names, np.zeros((0, 1), np.float32))]
            answered = answered or any(len(one.shares) for one in found)
            yield from found
        if first is not None and not answered:
            raise first


def predicted(model: TrainedModel, inputs: NewInputs, least: float = 0.0) -> Predictions:
    """Return the predictions of a model for some inputs.

    Raises:
        DataError: they are beyond the model; names them.
    """
    shares = model.probabilities(inputs.x)
    if not np.isfinite(shares).all():
        path = inputs.file
        raise DataError(f"{path} holds values so large that the model's outputs are none")
    far = [
        "; ".join(filter(None, (columns, FAR.format(away) if away > 1 else "")))
        for columns, away in zip(
            model.facts.beyond(inputs.x), model.distances(inputs.x), strict=True
        )
    ]
    return Predictions(inputs, model.class_names, shares, far, least)


def are_many(paths: Iterable[Path]) -> bool:
    """Tell whether files may hold many inputs, which belong into a CSV rather than on a screen."""
    return any(path.is_dir() or ending(path) in TABLE_ENDS for path in paths)


def write_csv(
    found: Iterable[Predictions], classes: Sequence[str], out: Path, keep: Sequence[str] = ()
) -> Iterator[str]:
    """Write predictions into a CSV, an input a row; yield a summary of each file or directory.

    Raises:
        DataError: the CSV cannot be written, or a file cannot be read.
    """
    try:
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(heads(classes, keep))
            for place, those in groupby(found, key=lambda one: one.shown):
                best, files, left, far, why = Counter[str](), list[Path](), 0, 0, ""
                for one in those:
                    lines.writerows(one.rows(keep))
                    best += one.best()
                    files.append(one.inputs.file)
                    left += len(one.inputs.left)
                    why = one.inputs.why
                    far += sum(map(bool, one.far))
                told = ", ".join(f"{printable(name)} {n}" for name, n in best.most_common())
                told += f"no answer: {printable(why, MAX_LETTERS)}" if why else ""
                told += f"; {left} without an answer" if left else ""
                told += f"; {far} far from the training data" if far else ""
                yield f"{files[0] if len(files) == 1 else place}: {told}"
    except OSError as error:
        raise DataError(f"{out} cannot be written: {reason_of(error)}") from None


def _cell(text: str) -> str:
    """Return a text as a cell that an office program shows, and does not calculate."""
    is_text = text.startswith(CALCULATED) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_text else text
