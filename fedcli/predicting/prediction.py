"""Predictions of a client's trained model for new inputs: photos, recordings, or arrays."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedcli.data.archives import Archives, archives
from fedcli.data.folders import TABLE_ENDS, ending
from fedcli.data.kept_runs import last_run
from fedcli.data.own.new_inputs import NewInputs, how_of, new_files, read_file
from fedcli.runtime.deployed import Deployed
from fedmodels.config.combinations import part_at
from fedmodels.config.transforms import Transform
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError, reason_of
from fedmodels.host.files import replacing
from fedmodels.nets.trained import TrainedModel
from fedmodels.tensors.archive import PERSONAL

CALCULATED = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that an office program would calculate."""
_NUMBER = re.compile(r"-?[0-9]+([.,][0-9]+)?")
"""What is a number to an office program as well, and stays as it is."""
MAX_LETTERS = 300
"""Letters of why a file has no answer, in a line."""
HEADS = ("input", "from", "to", "class", "probability", "probabilities", "note", "values",
         "labels", "intervals")  # fmt: skip
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

    @classmethod
    def of(cls, model: TrainedModel, inputs: NewInputs, least: float) -> Self:
        """Return the predictions of a model for some inputs.

        Raises:
            DataError: they are beyond the model; names them.
        """
        shares, away = model.answers(inputs.x)
        check_finite(shares, inputs)
        return cls(inputs, model.class_names, shares, far_of(model, inputs, away), least)

    @classmethod
    def nothing(cls, model: TrainedModel, inputs: NewInputs) -> Self:
        """Return what there is of a file without an answer."""
        return cls(inputs, model.class_names, np.zeros((0, len(model.class_names)), np.float32))

    @staticmethod
    def columns(model: TrainedModel) -> list[str]:
        """Return the names of what is said of an input."""
        return model.class_names

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
        yield from self.unanswered(as_json=as_json)

    def unanswered(self, *, as_json: bool = False) -> Iterator[str]:
        """Yield a line for a file, or for each row of a table, that makes no input."""
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

    def summary(self, several: Sequence[Predictions]) -> str:
        """Return in words how many inputs of each class several files have."""
        best = sum((one.best() for one in several), Counter[str]())
        return ", ".join(f"{printable(name)} {n}" for name, n in best.most_common())

    def shown(self) -> dict[str, Any]:
        """Return the predictions as a server's JSON has them."""
        best, shares = self.shares.argmax(axis=1).tolist(), self.shares.tolist()
        rows: list[dict[str, Any]] = [
            {"class": self.classes[k], "probability": share[k], "probabilities": share}
            for k, share in zip(best, shares, strict=True)
        ]
        return self.with_places(rows, {"classes": [*self.classes]}, {"class": None})

    def with_places(
        self, rows: list[dict[str, Any]], about: dict[str, Any], none: Mapping[str, None]
    ) -> dict[str, Any]:
        """Return the rows of a server's JSON with their places, and those without an answer."""
        for number, row in enumerate(rows):
            if self.inputs.places:
                row["from"], row["to"] = self.inputs.places[number]
            if note := self.note(number):
                row["note"] = note
        rows += [
            {**none, "from": place, "to": place, "note": f"no answer: {why}"}
            for place, why, _ in self.inputs.left
        ]
        if self.inputs.left:
            rows.sort(key=lambda row: row["from"])
        return {**about, "predictions": rows}

    @property
    def place(self) -> Path:
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
            "input": str(self.inputs.file), "from": place, "to": place, **kept,
            **self._no_answer(), "note": f"no answer: {why}",
        }  # fmt: skip

    def _answered(self, keep: Sequence[str]) -> Iterator[dict[str, Any]]:
        for number in range(len(self.shares)):
            first, last = self.inputs.places[number] if self.inputs.places else (None, None)
            cells = self.inputs.kept[number] if keep else ()
            yield {
                "input": str(self.inputs.file), "from": first, "to": last,
                **dict(zip(keep, cells, strict=True)), **self._answer(number),
                "note": self.note(number),
            }  # fmt: skip

    def _answer(self, number: int) -> dict[str, Any]:
        each = self.shares[number].tolist()
        named = dict(zip(self.classes, each, strict=True))
        return {"class": self._called[number], "probability": max(each), "probabilities": named}

    def _no_answer(self) -> dict[str, Any]:
        return {"class": None, "probability": None, "probabilities": {}}

    @cached_property
    def _called(self) -> list[str]:
        return self.names

    def rows(self, keep: Sequence[str] = ()) -> Iterator[list[object]]:
        """Yield a row of the CSV for each of the answers."""
        for one in self.answers(keep):
            places = ["" if one[key] is None else one[key] for key in ("from", "to")]
            named = [cell(one[name]) for name in keep]
            yield [cell(one["input"]), *places, *named, *self._cells(one), cell(one["note"])]

    def _cells(self, answer: dict[str, Any]) -> list[str]:
        """Return what a row of the CSV has of an answer, beside places and note."""
        shares = (answer["probabilities"].get(k) for k in self.classes)
        texts = [
            "" if share is None else f"{share:.6f}" for share in (answer["probability"], *shares)
        ]
        return [cell(answer["class"] or ""), *texts]

    @staticmethod
    def heads(classes: Sequence[str], keep: Sequence[str] = ()) -> list[str]:
        """Return the heads of the columns of :meth:`rows`."""
        named = [*map(cell, keep)], [*map(cell, classes)]
        return ["input", "from", "to", *named[0], "class", "probability", *named[1], "note"]


def places_of(run: Path, client: int) -> tuple[Path, Path]:
    """Return where a client keeps its models: under a run directory, or its own state directory.

    Of a site that stays, it is the directory of the run that it joined last.
    """
    run = last_run(run)
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
        if name in (*HEADS, *kind_of(model).columns(model), *keep[:at]):
            raise ConfigError(
                f"column {printable(name)!r} cannot be kept: answers have another column of that "
                "name; rename it"
            )
    facts, first, answered = model.facts, None, False
    how, held = how_of(facts, file), list[Predictions]()
    with archives() as packed:
        for given in paths:
            for path, error in _files_in(given, how, packed):
                try:
                    if error is not None:
                        raise error
                    found = [
                        predicted(model, inputs, least)
                        for inputs in read_file(path, facts, how, keep, packed)
                    ]
                except DataError as why:
                    error = packed.renamed(why)
                    first = first or error
                    none = NewInputs(packed.shown(path), np.empty(0), why=str(error))
                    found = [kind_of(model).nothing(model, none)]
                held += found  # until one has an answer: without any there is an error alone
                answered = answered or any(len(one.shares) for one in found)
                if answered:
                    yield from held
                    held.clear()
        if first is not None and not answered:
            raise first
        yield from held


def _files_in(
    given: Path, how: Transform | None, packed: Archives
) -> Iterator[tuple[Path, DataError | None]]:
    """Yield the files of a path; itself with an error where these cannot be found."""
    try:
        yield from ((path, None) for path in new_files([given], how, packed))
    except DataError as error:
        yield given, error


def predicted(model: TrainedModel, inputs: NewInputs, least: float = 0.0) -> Predictions:
    """Return the predictions of a model for some inputs.

    Raises:
        DataError: they are beyond the model; names them.
    """
    return kind_of(model).of(model, inputs, least)


def kind_of(model: TrainedModel) -> type[Predictions]:
    """Return what the predictions of a model are: of classes, or of targets."""
    if model.targets is None:
        return Predictions
    found: type[Predictions] = part_at("fedcli.predicting.predicted_targets:TargetPredictions")
    return found


def far_of(model: TrainedModel, inputs: NewInputs, away: NDArray[np.float32]) -> list[str]:
    """Return of each input in which ways it is far from the training data; empty texts: in none.

    ``away`` are the distances (n,) that the model gives them.
    """
    pairs = zip(model.facts.beyond(inputs.x), away, strict=True)
    return [
        "; ".join(filter(None, (columns, FAR.format(away) if away > 1 else "")))
        for columns, away in pairs
    ]


def check_finite(found: NDArray[Any], inputs: NewInputs) -> None:
    """Raise DataError if some of a model's outputs are no finite numbers."""
    if not np.isfinite(found).all():
        raise DataError(f"{inputs.file} holds values so large that the model's outputs are none")


def are_many(paths: Iterable[Path]) -> bool:
    """Tell whether files may hold many inputs, which belong into a CSV rather than on a screen."""
    return any(path.is_dir() or ending(path) in TABLE_ENDS for path in paths)


def write_csv(
    found: Iterable[Predictions], model: TrainedModel, out: Path, keep: Sequence[str] = ()
) -> Iterator[str]:
    """Write predictions into a CSV, an input a row; yield a summary of each file or directory.

    Raises:
        DataError: the CSV cannot be written, or a file cannot be read.
    """
    try:
        with replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(kind_of(model).heads(kind_of(model).columns(model), keep))
            for place, those in groupby(found, key=lambda one: one.place):
                files, left, far, why = list[Path](), 0, 0, ""
                several = list[Predictions]()
                for one in those:
                    lines.writerows(one.rows(keep))
                    several.append(one)
                    files.append(one.inputs.file)
                    left += len(one.inputs.left)
                    why = one.inputs.why
                    far += sum(map(bool, one.far))
                told = several[0].summary(several)
                told += f"no answer: {printable(why, MAX_LETTERS)}" if why else ""
                told += f"; {left} without an answer" if left else ""
                told += f"; {far} far from the training data" if far else ""
                yield f"{files[0] if len(files) == 1 else place}: {told}"
    except OSError as error:
        raise DataError(f"{out} cannot be written: {reason_of(error)}") from None


def cell(text: str) -> str:
    """Return a text as a cell that an office program shows, and does not calculate."""
    is_text = text.startswith(CALCULATED) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_text else text
