"""A trained net that describes itself: its inputs, its classes and its origin."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fedmodels.config.combinations import part_at
from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ConfigError, DataError
from fedmodels.facts.data_description import ProblemFile, channel_axis, first_fault
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.numerics.metrics import as_one
from fedmodels.own.code_names import is_own
from fedmodels.tensors.archive import load, save
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights

if TYPE_CHECKING:
    from fedmodels.problems.targets import Targets

SEEN = "seen"
"""Level of the mean embeddings of classes in a file of weights."""
KEY = "model"
"""Key of the description in the header of a file of weights."""
WIDE = 2.0**14
"""Deviations from 0 beyond which float32 rounds a mean to a thousandth of one and more."""
BATCH = 256
"""Inputs that ``predict`` takes at a time."""


@dataclass(frozen=True)
class ModelFacts:
    """The description of a net in its file of weights."""

    net: str
    """The registered name of the net."""
    options: Mapping[str, Any]
    input_shape: Sequence[int]
    num_classes: int
    scale: float = 1.0
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    """A net sees ``(x / scale - mean) / std``: one number for each channel, or one for all."""
    class_names: Sequence[str] = field(default_factory=tuple)
    method: str = ""
    view: str = ""
    round: int = -1
    rule: str = "classifier"
    """The rule of prediction that the method is scored by; the net here has a classifier alone."""
    code_sha256: str = ""
    """What the file of a custom net held; it must hold the same when the model is built."""
    transform: Mapping[str, Any] | None = None
    """How files become raw inputs (``fedmodels.config.transforms``), where that is known."""
    ranges: Sequence[Sequence[float]] = ()
    """Least and largest plausible value of each column of a table, by the training data."""
    temperature: float = 1.0
    """By which logits are divided before they become probabilities."""
    calibrated_on: int = 0
    """Validation examples that it follows from; 0 where it follows from none."""
    reach: float = 0.0
    """Distance to the nearest of ``seen`` beyond which an input is far from the training data."""
    merged: Sequence[Sequence[int]] = ()
    """Labels of the net that are part of another class, each with the label of that one."""
    widths: Sequence[float] = ()
    """Of numbers: by how much a prediction misses in nine of ten examples, in their unit (T,)."""

    def caveat(self) -> str:
        """Return a line where the method is scored by more than this net; empty text otherwise."""
        if self.rule == "classifier":
            return ""
        method = printable(str(self.method), 60)
        return (
            f"{method} is scored by its rule {self.rule!r}, which needs more than this net; "
            "the net predicts with its classifier, and may be less accurate"
        )

    @property
    def is_of_bytes(self) -> bool:
        """Whether raw values are whole numbers from 0 to ``scale``: 255, 65535, or less in images.

        The scale of other numbers is their owner's choice, and bounds nothing.
        """
        is_image = len(self.input_shape) == 3
        is_small = is_image and 1 < self.scale < 255 and self.scale % 1 == 0
        return self.scale in (255, 65535) or is_small

    @property
    def is_wide(self) -> bool:
        """Whether float32 takes raw values for one another, as time stamps, which float64 keeps."""
        pairs = zip(self.mean, self.std, strict=True) if len(self.mean) == len(self.std) else ()
        return any(abs(mean) > WIDE * std for mean, std in pairs)

    def beyond(self, x: np.ndarray[Any, Any]) -> list[str]:
        """Return for each raw input (n, *input_shape) which columns are far from training."""
        if not self.ranges or not len(x):
            return [""] * len(x)
        names = part_at("fedmodels.config.transforms:channels_in")(self.transform)
        axis = 1 + channel_axis(tuple(self.input_shape))
        cells = np.moveaxis(x, axis, -1).reshape(len(x), -1, x.shape[axis]).astype(np.float64)
        if cells.shape[2] != len(self.ranges):
            return [""] * len(x)
        low, high = np.array(self.ranges, dtype=np.float64).T
        told = list[list[str]]([] for _ in x)
        for column in range(len(low)):
            values = cells[:, :, column]
            excess = np.maximum(low[column] - values, values - high[column])
            worst = excess.argmax(axis=1)
            for row in np.flatnonzero(excess.max(axis=1) > 0).tolist():
                name = printable(str(names[column])) if column < len(names) else f"column {column}"
                value = values[row, worst[row]]
                told[row].append(
                    f"{name} {value:.6g} is far from {low[column]:.4g} to {high[column]:.4g}"
                )
        return ["; ".join(lines) for lines in told]

    def fault_of(self, x: Tensor) -> str:
        """Return how raw values differ from those of training; empty text where they may be such.

        A model of bytes takes whole numbers from 0 to ``scale`` as it was trained on, and no
        fractions of one in their place.
        """
        if not self.is_of_bytes or not x.numel():
            return ""
        low, high = float(x.min()), float(x.max())
        if high > self.scale:
            reach = f"goes up to {high:g}"
        elif low < 0:
            reach = f"holds values down to {low:g}"
        elif high <= 1 and bool((x % 1 != 0).any()):
            reach = f"holds fractions, up to {high:g}"
        else:
            return ""
        return (
            f"{reach}; the model was trained on values from 0 to {self.scale:g}: scale it likewise"
        )

    @classmethod
    def parse(cls, text: str, where: str) -> ModelFacts:
        """Read and check a description, which may be anybody's; ArchiveError if it is malformed."""
        known = {f.name for f in fields(cls)}
        try:
            found = json.loads(text)
            facts = cls(**{key: value for key, value in found.items() if key in known})
            inputs = {key: found[key] for key in known & set(ProblemFile.model_fields) & set(found)}
            ProblemFile.model_validate_json(json.dumps(inputs))
        except ValidationError as error:
            raise ArchiveError(
                f"{where} does not describe its model: {first_fault(error)}"
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ArchiveError(f"{where} does not describe its model: {error}") from None
        for name, kind in _KINDS.items():
            if not isinstance(getattr(facts, name), kind):
                raise ArchiveError(
                    f"{where} does not describe its model: {name} is no {kind.__name__}"
                )
        listed = isinstance(facts.widths, list | tuple)
        widths: Sequence[Any] = facts.widths if listed else [""]
        numbers = (facts.temperature, facts.calibrated_on, facts.reach, *widths)
        fits = len(widths) in (0, facts.num_classes)
        if not fits or not all(
            type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in numbers
        ):
            raise ArchiveError(f"{where} does not describe its model: its temperature is none")
        if not _are_ranges(facts.ranges):
            raise ArchiveError(f"{where} does not describe its model: ranges are no pairs")
        if not _are_parts(facts.merged, facts.num_classes):
            raise ArchiveError(f"{where} does not describe its model: merged are no two classes")
        return facts


def _are_ranges(found: Any) -> bool:
    """Tell whether something is a list of pairs of finite numbers."""
    try:
        array = np.array(found, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return False
    is_pairs = array.ndim == 2 and array.shape[1] == 2
    return found in ([], ()) or (is_pairs and bool(np.isfinite(array).all()))


def _are_parts(found: Any, classes: int) -> bool:
    """Tell whether something is a list of pairs of labels, the second ones of classes that stay."""
    try:
        parts = dict(found)
    except (TypeError, ValueError):
        return False
    labels = [*parts, *parts.values()]
    are_labels = all(type(label) is int and 0 <= label < classes for label in labels)
    return are_labels and len(parts) == len(found) and not {*parts} & {*parts.values()}


_CALIBRATED = ("temperature", "calibrated_on", "reach")
"""What a description leaves out where no validation example says it."""
_KINDS = {"net": str, "options": dict, "method": str, "view": str, "round": int, "rule": str,
          "code_sha256": str}  # fmt: skip
"""What a description holds beside the inputs and the classes."""


class TrainedModel(nn.Module):
    """A net with its normalisation: raw inputs in, logits out.

    Attributes:
        net: the net itself.
        facts: what it is.
    """

    def __init__(self, facts: ModelFacts, weights: Weights, seen: Prototypes | None = None) -> None:
        """Build the net and put the weights into it; ``seen`` are the classes' mean embeddings.

        Raises:
            ConfigError: the net is not known, its file has changed, or its options are wrong.
            ArchiveError: the weights are those of another net.
        """
        super().__init__()
        self.facts = facts
        if is_own(facts.net):
            own_name = part_at("fedmodels.own.own_code:own_name")
            own_name(facts.net, "net", facts.code_sha256 or None, None)
        shape = tuple(facts.input_shape)
        self.net: SplitNet = make_net(
            facts.net, num_classes=facts.num_classes, input_shape=shape, **facts.options
        )
        wanted = self.net.everything()
        missing = sorted(wanted.keys() - weights.keys())
        if missing:
            raise ArchiveError(
                f"{facts.method or facts.net} has no such model: tensor {missing[0]!r} is private, "
                "or travels apart from the weights"
            )
        load_weights(self.net, {key: weights[key] for key in self.net.tensors()})
        with torch.no_grad():
            for key, tensor in self.net.frozen_tensors().items():
                tensor.copy_(weights[key])
        axis = channel_axis(shape)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(facts, name), dtype=torch.float64)
            sizes = [1] * len(shape)
            sizes[axis] = len(values)
            self.register_buffer(name, values.reshape(sizes), persistent=False)
        self.register_buffer("seen", None if seen is None else seen.vectors, persistent=False)
        self.eval()

    @cached_property
    def targets(self) -> Targets | None:
        """What was learned in place of classes; None of classes."""
        found: Targets | None = part_at("fedmodels.problems.targets:targets_in")(
            self.facts.transform, "the model"
        )
        return found

    @property
    def class_names(self) -> list[str]:
        """Return the name of each class, or its number where it has none."""
        names = self.facts.class_names or [str(k) for k in range(self.facts.num_classes)]
        return [names[label] for label in self._labels]

    @property
    def _labels(self) -> list[int]:
        """Those labels of the net that are part of no other class."""
        parts = {row for row, _ in self.facts.merged}
        return [label for label in range(self.facts.num_classes) if label not in parts]

    def caveats(self) -> list[str]:
        """Return lines on what answers of this net may be misread for."""
        beside = (
            "the net's answer to an input depends on the inputs that are given with it, as in its "
            "scores"
        )
        found = (self.facts.caveat(), beside if self.net.mixes_examples else "")
        return [line for line in found if line]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, K) of raw inputs (B, *input_shape) of any dtype.

        Of a model that learns targets, what it says of them: numbers in the unit of their column,
        or the probability of each label.

        Those of float64 become float32 after they are normalised.
        """
        return self._said(self.net(self._normalised(x)))

    def _said(self, logits: Tensor) -> Tensor:
        """Return what logits (B, K) say: targets, or logits of the classes that stay."""
        if self.targets is not None:
            return self.targets.answers(logits / (self.facts.temperature or 1.0))
        if not self.facts.merged:
            return logits
        return as_one(logits, [(row, into) for row, into in self.facts.merged])[:, self._labels]

    def _normalised(self, x: Tensor) -> Tensor:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, std = (self.get_buffer(name).to(kind) for name in ("mean", "std"))
        return ((x.to(kind) / self.facts.scale - mean) / std).float()

    def predict(self, x: Any) -> np.ndarray[Any, Any]:
        """Return the class (n,) of each raw input (n, *input_shape), an array or a tensor.

        Of targets: numbers in the unit of their column, or probabilities of labels (n, K).

        Raises:
            DataError: they are no numbers, not finite, or have another shape or scale.
        """
        found = self._outputs(x, self)
        return found.argmax(1).numpy() if self.targets is None else found.numpy()

    def probabilities(self, x: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the probability (n, K) of each class for each raw input (n, *input_shape).

        Raises:
            ConfigError: the model learns targets: ``predict`` says what it says of them.
            DataError: they are no numbers, not finite, or have another shape or scale.
        """
        if self.targets is not None:
            raise ConfigError("the model learns targets and no classes: call predict")
        return self._probabilities(self._outputs(x, self))

    def _probabilities(self, logits: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (logits / (self.facts.temperature or 1.0)).softmax(1).numpy()

    def distances(self, x: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return how far raw inputs (n, *input_shape) are from the training data, (n,).

        That is the distance of an embedding to the nearest mean of a class, in parts of how far
        such inputs are: above 1 it is far. All are 0 where the model does not know.

        Raises:
            DataError: they are no numbers, not finite, or have another shape or scale.
        """
        if not self._knows_far or not len(x):
            return np.zeros(len(x), dtype=np.float32)
        embedded = self._outputs(x, lambda part: self.net.features(self._normalised(part)))
        return self._far(embedded.flatten(1))

    def answers(
        self, x: Any
    ) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.float32]]]:
        """Return the probabilities, or the targets, of raw inputs, and their distances.

        They are those of :meth:`probabilities` or :meth:`predict` and of :meth:`distances`, by one
        pass of the net.

        Raises:
            DataError: they are no numbers, not finite, or have another shape or scale.
        """
        embedded = list[Tensor]()

        def one_pass(part: Tensor) -> Tensor:
            z = self.net.features(self._normalised(part))
            if self._knows_far:
                embedded.append(z.flatten(1).cpu())
            return self._said(self.net.head(z))

        found = self._outputs(x, one_pass)
        far = np.zeros(len(found), np.float32) if not embedded else self._far(torch.cat(embedded))
        return (self._probabilities(found) if self.targets is None else found.numpy()), far

    @property
    def _knows_far(self) -> bool:
        seen = self.seen
        return isinstance(seen, Tensor) and bool(len(seen)) and bool(self.facts.reach)

    def _far(self, z: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return how far embeddings (n, d) are from the means of the classes, (n,)."""
        seen = self.get_buffer("seen")
        if z.shape[1] != seen.shape[1]:
            raise DataError("the model's embeddings are of another size than its classes' means")
        away = torch.cdist(z, seen.cpu(), compute_mode="donot_use_mm_for_euclid_dist")
        return (away.amin(1) / self.facts.reach).numpy()

    @torch.no_grad()
    def _outputs(self, x: Any, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is calculated of raw inputs (n, …), in parts."""
        inputs = _tensor_of(x)
        if tuple(inputs.shape[1:]) != tuple(self.facts.input_shape):
            raise DataError(
                f"inputs of shape {list(inputs.shape[1:])}; "
                f"the model takes {list(self.facts.input_shape)}"
            )
        values = inputs.float()  # torch compares no unsigned integers but bytes
        if not bool(torch.isfinite(values).all()):
            raise DataError("the input holds values that are not finite in float32")
        if fault := self.facts.fault_of(values):
            raise DataError(f"the input {fault}")
        self.eval()
        if not len(inputs):
            return torch.zeros(0, len(self._labels))
        if len(inputs) == 1 and not self.net.takes_one:
            raise DataError(
                "this net normalises over the batch and keeps no statistics, so it cannot take "
                "a single input; pass several as one .npy file"
            )
        return torch.cat([of(part) for part in self.net.split(inputs, BATCH)]).cpu()

    def save(self, path: Path) -> None:
        """Write weights and description as one safetensors file."""
        weights = {key: tensor.detach() for key, tensor in self.net.tensors().items()}
        seen = self.seen
        known = {SEEN: Prototypes.by_position(seen)} if isinstance(seen, Tensor) else {}
        save(path, Bundle(weights=weights, prototypes=known), header_of(self.facts))

    @classmethod
    def load(cls, path: Path) -> TrainedModel:
        """Read a file that describes itself.

        Raises:
            ArchiveError: it is missing or damaged, or does not say what its net is.
        """
        bundle, header = load(path)
        if KEY not in header:
            raise ArchiveError(f"{path} does not describe its net; run its experiment again")
        facts = ModelFacts.parse(header[KEY], str(path))
        return cls(facts, bundle.weights, bundle.prototypes.get(SEEN))


def _tensor_of(x: Any) -> Tensor:
    """Return an array, or what makes one, as a tensor; DataError if it is none of real numbers."""
    try:
        found = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
        if found.dim() and not found.is_complex():
            return found
    except (TypeError, ValueError) as error:
        raise DataError(f"the input is no array of numbers: {error}") from None
    raise DataError("the input is no array of real numbers")


def header_of(facts: ModelFacts) -> dict[str, str]:
    """Return the header that describes a model in its file."""
    found = asdict(facts)
    if not facts.calibrated_on:
        found = {key: value for key, value in found.items() if key not in _CALIBRATED}
    for name in ("merged", "widths"):
        if not found[name]:
            del found[name]
    return {KEY: json.dumps(found)}
