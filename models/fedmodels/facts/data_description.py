"""How data are described: ``client.json``, which a client announces too, and ``problem.json``.

Clients read these files, and the coordinator holds what strangers say of their data against the
same definition. Its limits size nets and arrays, so everything is checked before it is used. A
check stops at the first fault: a long list of wrong numbers costs no more than one of them.
"""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from fedmodels.console.printable import printable
from fedmodels.errors import DataError, reason_of, suggestion
from fedmodels.facts.class_names import ClassName
from fedmodels.host.files import open_regular
from fedmodels.tensors.bundle import Problem

FORMAT = 1
MAX_AXES, MAX_VALUES, MAX_CLASSES = 4, 2**24, 100_000
"""Limits of an example's axes and values, and of classes."""
MAX_LETTERS = 60
"""Limit of a client's name."""
MAX_WHY = 300
"""Limit of the words on a task that is set aside."""
UNUSUAL, HIDDEN = "unlike its earlier tasks", "its own log says in what"
"""How the reason of a task begins that is not usual, and what is told where counts are hidden."""
MAX_EXAMPLES = 2**31
"""Limit of one class in one task."""
Size = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_EXAMPLES)], ...], FailFast()]
"""Examples of each class, (K,)."""
SCALES = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0, "float64": 1.0}
"""Types in which inputs are stored, and the ``scale`` of each unless a file says another."""
Limits = tuple[NDArray[np.float32], NDArray[np.float32]]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


File = TypeVar("File", bound=_File)


class ProblemFile(_File):
    """What describes any examples: their shape, their classes, how they are normalised."""

    format: Literal[1] = 1
    dataset: str = "own"
    input_shape: Annotated[tuple[Size, ...], FailFast()] = Field(min_length=1, max_length=MAX_AXES)
    num_classes: Annotated[int, Field(ge=1, le=MAX_CLASSES)]
    scale: Positive = 1.0
    mean: Annotated[tuple[Finite, ...], FailFast()] = Field(default=(0.0,), min_length=1)
    """Of ``x / scale``: one number per channel, or one for all."""
    std: Annotated[tuple[Positive, ...], FailFast()] = Field(default=(1.0,), min_length=1)
    class_names: Annotated[tuple[ClassName, ...], FailFast()] = ()
    """In the order of labels; empty where nobody states them."""
    partition: dict[str, Any] | None = None
    """Config of the partition; absent for custom data."""
    transform: dict[str, Any] | None = None
    """How files became these examples (``fedmodels.config.transforms``). It stays at the client."""

    @model_validator(mode="after")
    def _check_sizes(self) -> ProblemFile:
        if math.prod(self.input_shape) > MAX_VALUES:
            raise ValueError(f"input_shape must have {MAX_VALUES} values at most")
        channels = self.input_shape[channel_axis(self.input_shape)]
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, channels):
                raise ValueError(f"{name} must hold 1 or {channels} numbers")
        if not np.isfinite(self.limits()).all():
            raise ValueError("mean / std and 1 / std must be finite in float32")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ValueError(f"class_names must hold {self.num_classes} names")
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("class_names must differ from each other")
        return self

    @property
    def problem(self) -> Problem:
        """What is learned: input shape and number of classes."""
        return Problem(self.input_shape, self.num_classes)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in label order; their numbers where nobody states names."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def limits(self) -> Limits:
        """Return what raw values 0 and ``scale``, black and white, become.

        Returns:
            (C,) each, or (1,) where all channels are normalised alike.
        """
        with np.errstate(all="ignore"):  # a number beyond float32 becomes infinite
            mean, std = (np.array(v, dtype=np.float32) for v in (self.mean, self.std))
            return -mean / std, (1 - mean) / std


class TaskCounts(_File):
    """Examples of one task per class, and whether the task counts."""

    train: Counts
    test: Counts
    set_aside: bool = False
    """Whether an open run passes the task over: it is trained and scored no more."""
    again: Annotated[int, Field(ge=0, lt=MAX_EXAMPLES)] = 0
    """Examples of its source that earlier tasks have: left out, unless ``[data] repeats`` says that
    they are kept."""
    why: Annotated[str, Field(max_length=MAX_WHY)] = ""
    """In words, why it is set aside; empty where nobody said it."""
    unusual: Annotated[str, Field(max_length=MAX_WHY)] = ""
    """In words, in which ways it is not like the client's earlier tasks; empty where it is."""
    drifted: Annotated[str, Field(max_length=MAX_WHY)] = ""
    """In words, what had moved in the inputs that the client's model was asked before it came."""
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """Which data it has under its number, where it was added to an open run: a keyed hash
    (``fedcli/data/store/task_digests.py``)."""

    @model_serializer(mode="wrap")
    def _text(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what most tasks do not have."""
        found: dict[str, Any] = write(self)
        return {key: value for key, value in found.items() if key in ("train", "test") or value}


class ClientFile(ProblemFile):
    """``client.json``: what a client announces when it joins."""

    name: Annotated[str, Field(max_length=MAX_LETTERS)] = ""
    """What tables and pages call the client, beside its number."""
    tasks: Annotated[tuple[TaskCounts, ...], FailFast()] = ()
    """Counted from the files where a participant leaves them out."""
    recipe: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Of an announcement: the sha256 of the recipe of the site; empty without one."""
    counted: Literal["", "rounded", "none"] = ""
    """How an announcement counts: exactly, or as :meth:`told` says; a file counts exactly."""

    def text(self, *left_out: str, indent: int | None = None) -> str:
        """Return it as JSON, without these fields and without texts that are empty."""
        empty = [name for name in ("name", "recipe", "counted") if not getattr(self, name)]
        return self.model_dump_json(exclude={*left_out, *empty}, indent=indent)

    def told(self, how: Literal["exact", "rounded", "none"]) -> Self:
        """Return what is announced of it.

        With ``rounded`` each count is the next power of two. With ``none`` the first count of a
        task is the sum over its classes, and the others are 0.
        """
        if how == "exact":
            return self
        count = _rounded if how == "rounded" else _summed
        tasks = tuple(
            task.model_copy(
                update={
                    "train": count(task.train),
                    "test": count(task.test),
                    "again": 0,
                    "unusual": HIDDEN if task.unusual else "",
                    "drifted": HIDDEN if task.drifted else "",
                    "why": UNUSUAL if task.why.startswith(UNUSUAL) else task.why,
                }
            )
            for task in self.tasks
        )
        return self.model_copy(update={"tasks": tasks, "counted": how})

    @model_validator(mode="after")
    def _check_counts(self) -> ClientFile:
        for number, task in enumerate(self.tasks):
            for part, counts in (("train", task.train), ("test", task.test)):
                if len(counts) != self.num_classes:
                    raise ValueError(
                        f"tasks.{number}.{part} must hold {self.num_classes} counts, one a class"
                    )
        return self


def _rounded(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return each count as the next power of two; 0 stays, and so does what is too large."""
    return tuple(min(1 << (n - 1).bit_length(), MAX_EXAMPLES - 1) if n else 0 for n in counts)


def _summed(counts: tuple[int, ...]) -> tuple[int, ...]:
    return (min(sum(counts), MAX_EXAMPLES - 1), *[0] * (len(counts) - 1))


def channel_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of the channels of one example: the first of images, else the last."""
    return 0 if len(shape) == 3 else len(shape) - 1


@dataclass(frozen=True)
class Normaliser:
    """Turns raw inputs into what a net sees: ``(x / scale - mean) / std``."""

    scale: float
    mean: NDArray[np.float64]  # broadcasts over (n, *input_shape)
    std: NDArray[np.float64]

    @classmethod
    def of(cls, problem: ProblemFile) -> Normaliser:
        """Return the normaliser a file describes."""
        axis = channel_axis(problem.input_shape)
        shape = [1] * len(problem.input_shape)

        def spread(values: tuple[float, ...]) -> NDArray[np.float64]:
            shape[axis] = len(values)
            return np.array(values, dtype=np.float64).reshape(shape)

        return cls(problem.scale, spread(problem.mean), spread(problem.std))

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return a normalised copy (n, …) of raw inputs.

        Those of float64 become float32 at the end: it cannot tell large ones apart.
        """
        kind = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        out: NDArray[Any] = x.astype(kind)
        out /= kind.type(self.scale)
        out -= self.mean.astype(kind)
        out /= self.std.astype(kind)
        with np.errstate(over="ignore"):  # infinity is told where it is looked for
            return out.astype(np.float32, copy=False)


def read_file(path: Path, kind: type[File]) -> File:
    """Read a JSON description; DataError if it is missing, or says what it must not."""
    try:
        with open_regular(path) as file:
            # some editors begin a file with a mark
            return parsed(file.read().removeprefix(BOM_UTF8), path, kind)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None


def parsed(text: str | bytes, where: object, kind: type[File]) -> File:
    """Read the text of a JSON description; DataError if it says what it must not."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{where}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """Return where a description is wrong, and how, in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    is_unknown = first["type"] == "extra_forbidden"
    near = suggestion(str(first["loc"][-1]), ClientFile.model_fields) if is_unknown else ""
    return printable(f"{where}{': ' if where else ''}{first['msg']}{'.' if near else ''}{near}")
