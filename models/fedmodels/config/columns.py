"""What ``[data.columns]`` of a config may say: what the columns of tables are, and how to cut."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedmodels.config.bounds import Positive, PositiveCount, Refusal, StrictTable
from fedmodels.errors import ConfigError
from fedmodels.facts.class_names import ClassName, alike

Decimal = Literal[".", ","]
"""The mark before the fraction of a number."""
Missing = Literal["error", "drop", "interpolate", "mean"]
MissingValues = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)] | str, ...],
    Field(strict=False, min_length=1),
]
TimeUnit = Literal["s", "ms", "us", "ns"]


def _date_format(text: str) -> str:
    """Return how dates are written, if Python reads such; raise ValueError for another text."""
    try:
        datetime.strptime("", text)
    except ValueError as error:
        if "does not match" not in str(error):
            raise ValueError(f"{text!r} is no format of dates, such as %d.%m.%Y %H:%M") from None
    return text


Formats = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=60), AfterValidator(_date_format)], ...],
    Field(strict=False, min_length=1, max_length=10),
]
Levels = Annotated[tuple[ClassName, ...], Field(strict=False, min_length=1)]
Names = Annotated[tuple[ClassName, ...], Field(strict=False, min_length=1)]
Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(strict=False, min_length=1)
]
OTHER = "?"
"""What names call the number of an input that says that a cell is of none of the levels."""
ROLES = ("label", "client", "split", "session", "time", "group", "file", "task")
"""The keys that name a column which a net does not see."""
OF_TARGETS = ("target", "target_mean", "target_std", "quantiles", "labels", "horizon")
"""The keys that say what is learned in place of a class."""
ADDED = (
    "delimiter", "decimal", "encoding", "missing", "session", "time", "time_unit", "gap", "rate",
    "group", "missing_values", "client_from", "label_from", "day_first",
    "file", "task", "categories", "sheet", "date_formats", *OF_TARGETS,
)  # fmt: skip
"""Keys that older partitions lack."""


def _listed(value: object) -> object:
    """Return one name as a list of one."""
    return [value] if isinstance(value, str) else value


class Columns(StrictTable):
    """``[data.columns]``: what the columns of a custom table are."""

    label: str = "label"
    """Column that names the class of a row."""
    target: Annotated[
        Names | None, BeforeValidator(_listed, json_schema_input_type=str | Names | None)
    ] = None
    """Column of numbers to predict, or several, in place of the class of a row: regression. The
    target of a window is that of its last row."""
    target_mean: Numbers | None = None
    """What the numbers of each target are counted from in training, in its unit; the mean of the
    training rows unless given. Sites that bring files of their own need the same one."""
    target_std: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] | None = None
    """What they are counted in; the deviation of the training rows unless given."""
    quantiles: Annotated[
        tuple[Annotated[float, Field(gt=0, lt=1)], ...] | None, Field(strict=False, min_length=1)
    ] = None
    """Quantiles of each target that are predicted, in rising order, such as ``[0.1, 0.5, 0.9]``; by
    default one number is. MAE, RMSE and R² are of the quantile nearest to 0.5."""
    labels: Names | None = None
    """Columns of 0 and 1, each a label that an example has or lacks beside the others, in place of
    the one class of a row."""
    horizon: PositiveCount | None = None
    """Rows after the end of a window of which the target is predicted: a forecast. By default the
    target is that of the last row of the window."""
    file: str | None = None
    """Column that names the image of a row, in the one table of a ``directory`` of images: a path,
    or a name with or without its ending."""
    features: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Columns that a net sees, in this order; by default all others that hold numbers."""
    categories: Annotated[dict[str, Levels] | None, Field(min_length=1)] = None
    """Columns of texts or truth values that a net sees, by name, with their levels: ``{sex = ["f",
    "m"]}``. Each becomes a 0 or 1 for each level, and one more for any other cell and for an empty
    one. Case and spaces around a level do not matter."""
    classes: Annotated[tuple[ClassName, ...], Field(strict=False, min_length=1)] | None = None
    """Names of the classes in label order; by default those that occur, sorted."""
    client: str | None = None
    """Column that names the natural client of a row, such as a person or a device."""
    client_from: Literal["file", "folder", "sheet"] | None = None
    """In place of a column: each ``file``, each ``folder`` of files or each ``sheet`` of a workbook
    is a natural client, called by its name."""
    label_from: Literal["file", "folder", "sheet"] | None = None
    """In place of a column of labels: the name of the ``file``, of its ``folder`` or of the
    ``sheet`` is the class of all its rows."""
    split: str | None = None
    """Column that says ``train`` or ``test``; by default ``test_share`` decides."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of each client's examples of each class, the last ones, that are for testing; the key of
    the same name in ``[data]`` goes before it."""
    group: str | None = None
    """Column whose values stay whole: all rows of one are for training, or all for testing."""
    window: PositiveCount | None = None
    """Rows of a window; by default each row is an example."""
    hop: PositiveCount | None = None
    """Rows from the start of a window to that of the next; by default ``window``."""
    session: str | None = None
    """Column that names the recording of a row; no window crosses from one to the next."""
    task: str | None = None
    """Column each of whose values is a task of a client, such as a phase or a ward; in the order in
    which they begin. ``tasks`` in ``[data]`` cuts by time instead."""
    time: str | None = None
    """Column of times, by which the rows of a recording are put in order: numbers, or texts such as
    ``2026-05-31T12:00:00.5``, ``31.05.2026 12:00:00`` or ``12:00:00.5``."""
    time_unit: TimeUnit | None = None
    """Unit of times that are numbers; by default seconds."""
    day_first: bool | None = None
    """Whether dates such as ``03/04/2026`` begin with the day, or else with the month; by default
    found. With points the day comes first."""
    gap: Positive | None = None
    """Seconds between two rows beyond which no window goes on; ten times the usual step of a
    recording unless given."""
    rate: Positive | None = None
    """Rows per second that recordings are resampled to, at most 100 times the rows that were read;
    by default as they are."""
    missing: Missing | None = None
    """What an empty cell means: an ``error`` unless given. ``drop`` leaves out its row, and no
    window goes over that place; ``interpolate`` puts it between its neighbours in the recording;
    ``mean`` gives it the mean of the training rows."""
    missing_values: MissingValues | None = None
    """Numbers and texts that stand for an empty cell in columns of numbers, such as
    ``[-999, "?"]``."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """What stands between the columns of a CSV: a comma, semicolon, tab or bar is found unless
    given."""
    decimal: Decimal | None = None
    """Decimal mark of numbers in a CSV, or of texts in parquet; the other mark, spaces and
    apostrophes may stand between thousands. By default found."""
    encoding: str | None = None
    """Encoding of a CSV, such as ``cp1252``; by default found."""
    sheet: Annotated[str | None, Field(min_length=1)] = None
    """The sheet of a workbook, or the table of an HDF5 file by its path. By default those that have
    all the columns."""
    date_formats: Formats | None = None
    """How dates of ``time`` are written where they are not alike, the first one that fits:
    ``["ISO8601", "%d.%m.%Y %H:%M"]``."""

    def identity(self) -> dict[str, Any]:
        """Return what examples follow from."""
        absent = {key for key in ADDED if getattr(self, key) is None}
        return self.model_dump(mode="json", exclude=absent)

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that have a role, and are no features."""
        without = "label" if self.label_from or self.targets else None
        named = (getattr(self, role) for role in ROLES if role != without)
        return (*filter(None, named), *self.targets)

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns that are learned in place of a class; none where classes are learned."""
        return self.target or self.labels or ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a net that learns the targets says, by name."""
        if self.quantiles is None:
            return self.targets
        return tuple(f"{name} q{q:g}" for name in self.targets for q in self.quantiles)

    def channels_of(self, column: str) -> tuple[str, ...]:
        """Return the names of the numbers that a column becomes."""
        levels = (self.categories or {}).get(column)
        return (column,) if levels is None else tuple(f"{column}={k}" for k in (*levels, OTHER))

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the numbers of a row; none where ``features`` are left to the files."""
        return tuple(name for column in self.features or () for name in self.channels_of(column))

    @property
    def are_levels(self) -> tuple[bool, ...]:
        """Which of them are of a column of categories, (C,)."""
        known = self.categories or {}
        return tuple(name in known for name in self.features or () for _ in self.channels_of(name))

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """What stands for an empty cell, as a file writes it."""
        values = self.missing_values or ()
        return tuple(v if isinstance(v, str) else f"{v:.15g}" for v in values)

    @model_validator(mode="after")
    def _keys_need_each_other(self) -> Columns:
        for key, needed in (("hop", "window"), ("gap", "time"), ("rate", "time"),
                            ("time_unit", "time"), ("day_first", "time"),
                            ("date_formats", "time")):  # fmt: skip
            if getattr(self, key) is not None and getattr(self, needed) is None:
                raise ConfigError(f"[data.columns] {key} needs {needed}")
        if self.horizon is not None and (self.window is None or not self.targets):
            raise ConfigError(
                "[data.columns] horizon is for windows of which a number or several labels are "
                "predicted: give window, and target or labels"
            )
        for key, is_on in (("missing = 'interpolate'", self.missing == "interpolate"),
                           ("rate", self.rate is not None)):  # fmt: skip
            if self.horizon is not None and is_on:
                raise ConfigError(
                    f"[data.columns] {key} adds later measurements to a row, which horizon is "
                    "to predict: leave one out"
                )
        if self.client_from is not None and self.client is not None:
            raise ConfigError("[data.columns] client_from stands in place of client: give one")
        for key in ("group", "task"):
            if getattr(self, key) is not None and self.split is not None:
                raise ConfigError(f"[data.columns] split says what is for testing: leave out {key}")
        return self

    @model_validator(mode="after")
    def _learns_one_thing(self) -> Columns:
        keys = ("target", "labels", "label_from", "classes")
        given = [key for key in keys if getattr(self, key) is not None]
        given += ["label"] if self.differs("label") else []
        if self.targets and len(given) > 1:
            raise ConfigError(
                f"[data.columns] {' and '.join(given)} say different things of what is learned: "
                "give one"
            )
        for key in ("target", "labels"):
            names = getattr(self, key) or ()
            if len({*names}) < len(names):
                raise ConfigError(f"[data.columns] {key} names a column twice")
            for role in (role for role in ROLES if role != "label"):  # nothing reads a label then
                if (column := getattr(self, role)) in names:
                    raise ConfigError(f"[data.columns] {key} names {column!r}, which is the {role}")
        if self.quantiles is not None:
            if self.target is None:
                raise ConfigError("[data.columns] quantiles needs target")
            if sorted({*self.quantiles}) != [*self.quantiles]:
                raise ConfigError("[data.columns] quantiles must rise, each once")
        for key in ("target_mean", "target_std"):
            other = "target_std" if key == "target_mean" else "target_mean"
            if (numbers := getattr(self, key)) is None:
                continue
            if self.target is None or len(numbers) != len(self.target):
                raise ConfigError(f"[data.columns] {key} needs a number for each target")
            if getattr(self, other) is None:
                raise ConfigError(f"[data.columns] {key} needs {other}")
        return self

    @model_validator(mode="after")
    def _features_are_only_that(self) -> Columns:
        if len({*(self.classes or ())}) < len(self.classes or ()):
            raise ConfigError("[data.columns] classes names a class twice")
        features = self.features or ()
        for role in ROLES:
            column = getattr(self, role)
            if column is not None and column in features and role != "time":
                raise ConfigError(f"[data.columns] features names {column!r}, which is the {role}")
        for column in self.targets:
            if column in features and self.horizon is None:
                raise ConfigError(
                    f"[data.columns] features names {column!r}, which is to be predicted"
                )
        for column in features:
            if features.count(column) > 1:
                raise ConfigError(f"[data.columns] features names {column!r} twice")
        return self

    @model_validator(mode="after")
    def _levels_differ(self) -> Columns:
        for column, levels in (self.categories or {}).items():
            if role := next((role for role in ROLES if getattr(self, role) == column), None):
                raise ConfigError(f"[data.columns] categories has {column!r}, which is the {role}")
            if self.features is not None and column not in self.features:
                raise ConfigError(
                    f"[data.columns] categories has {column!r}, which features lacks: add it there"
                )
            if len({*map(alike, levels)}) < len(levels):
                raise ConfigError(
                    f"[data.columns] categories.{column} has two levels that differ in case or "
                    "spaces alone"
                )
        return self


NO_CLASSES = {
    "class masks": "class_masks has no classes to mask: leave it out",
    "probabilities": "probabilities are of classes, and here figures tell more: leave it out",
}  # fmt: skip
"""What does not go with ``[data.columns] target`` and ``labels``, and why."""
REFUSED: tuple[Refusal, ...] = (
    *(
        Refusal((kind, part), f"[data.columns] {key} learns no classes: {why}")
        for kind, key in (("numbers", "target"), ("several labels", "labels"))
        for part, why in NO_CLASSES.items()
    ),
    *(
        Refusal(
            (kind, "triggers"),
            f"[trigger] score_drop compares accuracies, and [data.columns] {key} learns no "
            "classes: take new_data, every_s or drift",
            when=lambda e: e.begins.score_drop is not None, where="score_drop",
        )
        for kind, key in (("numbers", "target"), ("several labels", "labels"))
    ),
)  # fmt: skip
"""Pairs of parts of which one is of this section, and that do not go together."""
