"""Predictions of a model that learns targets: numbers in the unit of their column, or labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from fedcli.data.own.new_inputs import NewInputs
from fedcli.predicting.prediction import Predictions, cell, check_finite, far_of
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError
from fedmodels.nets.trained import TrainedModel

HALF = 0.5
"""Probability from which an example is said to have a label."""


@dataclass(frozen=True)
class TargetPredictions(Predictions):
    """What a model says of the targets of the inputs of one file; ``shares`` are (n, K)."""

    are_labels: bool = field(default=False, kw_only=True)
    widths: Sequence[float] = field(default=(), kw_only=True)
    """By how much each number misses in nine of ten examples (K,); none where nobody knows."""

    @staticmethod
    def columns(model: TrainedModel) -> list[str]:
        """Return the names of what is said of an input, with the ends of intervals."""
        ends = [f"{name} {end}" for name in model.class_names for end in ("from", "to")]
        return [*model.class_names, *(ends if model.facts.widths else ())]

    @classmethod
    def of(cls, model: TrainedModel, inputs: NewInputs, least: float) -> Self:
        """Return the predictions of a model for some inputs.

        Raises:
            ConfigError: they are to be called unknown by a probability, and have none.
            DataError: they are beyond the model; names them.
        """
        if least:
            raise ConfigError("--unknown is of classes, and the model learns targets: leave it out")
        found, away = model.answers(inputs.x)
        check_finite(found, inputs)
        far = far_of(model, inputs, away)
        widths = model.facts.widths
        return cls(
            inputs, model.class_names, found, far, are_labels=_are_labels(model), widths=widths
        )

    @classmethod
    def nothing(cls, model: TrainedModel, inputs: NewInputs) -> Self:
        """Return what there is of a file without an answer."""
        widths = model.facts.widths
        none = super().nothing(model, inputs)
        return replace(none, are_labels=_are_labels(model), widths=widths)

    @staticmethod
    def heads(outputs: Sequence[str], keep: Sequence[str] = ()) -> list[str]:
        """Return the heads of the columns of :meth:`rows`."""
        return ["input", "from", "to", *map(cell, keep), *map(cell, outputs), "note"]

    def lines(self, top: int, *, as_json: bool = False) -> Iterator[str]:
        """Yield a line for each input: each output by its name."""
        for number, values in enumerate(self.shares.tolist()):
            source, note = self.inputs.called(number), self.note(number)
            named = dict(zip(self.classes, values, strict=True))
            if as_json:
                told = {"note": note} if note else {}
                yield json.dumps({"input": source, **self._told(named), **told})
            else:
                form = ".3f" if self.are_labels else ".6g"
                more = [f" ± {width:.3g}" for width in self.widths] or [""] * len(named)
                found = "  ".join(
                    f"{printable(name)} {v:{form}}{width}"
                    for (name, v), width in zip(named.items(), more, strict=True)
                )
                yield f"{source}: {found}{f'  ({note})' if note else ''}"
        yield from self.unanswered(as_json=as_json)

    def best(self) -> Counter[str]:
        """Return how many inputs have each label; of numbers, how many have each."""
        each = (
            (self.shares >= HALF).sum(0)
            if self.are_labels
            else [len(self.shares)] * len(self.classes)
        )
        return Counter(dict(zip(self.classes, map(int, each), strict=True)))

    def summary(self, several: Sequence[Predictions]) -> str:
        """Return in words what a model says of the inputs of several files."""
        values = np.concatenate([one.shares for one in several])
        if not len(values):
            return ""
        if self.are_labels:
            return super().summary(several)
        return ", ".join(
            f"{printable(name)} {column.min():.6g} to {column.max():.6g}, mean {column.mean():.6g}"
            for name, column in zip(self.classes, values.T, strict=True)
        )

    def shown(self) -> dict[str, Any]:
        """Return the predictions as a server's JSON has them."""
        key = "probabilities" if self.are_labels else "values"
        rows = [{key: values} for values in self.shares.tolist()]
        for row in rows if self.widths else ():
            pairs = zip(row[key], self.widths, strict=True)
            row["intervals"] = [[value - width, value + width] for value, width in pairs]
        return self.with_places(rows, {"outputs": [*self.classes]}, {key: None})

    def _told(self, named: dict[str, float]) -> dict[str, Any]:
        if not self.are_labels:
            ends = {
                k: [v - w, v + w] for (k, v), w in zip(named.items(), self.widths, strict=False)
            }
            return {"values": named, **({"intervals": ends} if ends else {})}
        return {"labels": [k for k, p in named.items() if p >= HALF], "probabilities": named}

    def _answer(self, number: int) -> dict[str, Any]:
        return self._told(dict(zip(self.classes, self.shares[number].tolist(), strict=True)))

    def _no_answer(self) -> dict[str, Any]:
        if self.are_labels:
            return {"labels": [], "probabilities": {}}
        return {"values": {}, **({"intervals": {}} if self.widths else {})}

    def _cells(self, answer: dict[str, Any]) -> list[str]:
        values = answer["probabilities" if self.are_labels else "values"]
        form = ".6f" if self.are_labels else ".9g"  # a number may be as small as its unit is large
        ends = answer.get("intervals", {})
        cells = [f"{values[k]:{form}}" if k in values else "" for k in self.classes]
        for name in self.classes if self.widths else ():
            cells += [f"{end:{form}}" for end in ends[name]] if name in ends else ["", ""]
        return cells


def _are_labels(model: TrainedModel) -> bool:
    return model.targets is not None and bool(model.targets.columns.labels)
