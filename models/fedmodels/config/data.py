"""What ``[data]`` of a config may say; nothing here opens any data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import CodeName, Place, PositiveCount, StrictTable, TableAt
from fedmodels.errors import ConfigError
from fedmodels.facts.class_names import ClassName

if TYPE_CHECKING:
    from fedmodels.config.columns import Columns
else:
    Columns = Annotated[Any, TableAt("fedmodels.config.columns:Columns")]

OF_IMAGES = ("channels", "resize", "crop", "ground", "frames", "depth", "window")
"""The keys of ``[data]`` that say how images are read."""
NOT_CUT = ("validation_share", "repeats", "unusual")
"""Keys that the examples of a data set do not follow from."""
_ADDED = ("test_share", "test_seed", "group", "test_gap", "tasks", "bad", "bad_share", "classes",
          "mean", "std", *OF_IMAGES)  # fmt: skip
BAD_SHARE = 0.05
"""Part of rows or files that may be set aside, unless a config says another."""
Length = Annotated[int, Field(ge=1, le=10_000)]
Window = Annotated[
    tuple[
        Annotated[float, Field(allow_inf_nan=False)],
        Annotated[float, Field(gt=1, allow_inf_nan=False)],
    ],
    Field(strict=False),
]
"""Centre and width of what is shown of a scan, in its unit."""
Sides = Length | Annotated[tuple[Length, Length], Field(strict=False)]
"""Pixels: one number, or ``[height, width]``."""
Period = Literal["month", "week", "day"]
"""What a calendar has."""
TasksBy = Period | Literal["session"]
"""What a task of a client may be."""
Repeats = Literal["skip", "refuse", "keep"]
Unusual = Literal["tell", "set-aside"]
Moment = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(strict=False, min_length=1)
]


class Data(StrictTable):
    """``[data]``: which data set, and where it lies."""

    name: CodeName
    """One of ``fedcli data``, or ``file.py:function``."""
    root: Place = None
    """Directory to look in first; then ``$FEDTIDE_DATA``, then the cache."""
    max_per_class: PositiveCount | None = None
    """Keep at most this many training examples of each class, drawn with the run's seed."""
    max_test_per_class: PositiveCount | None = None
    """Keep at most this many test examples of each class; scoring takes less time."""
    server_examples: PositiveCount | None = None
    """Set apart this many training examples of each class for the server; no client holds them."""
    server_unlabelled: PositiveCount | None = None
    """Set apart this many more of each class without labels; by default ``server_examples``."""
    input_shape: Annotated[tuple[PositiveCount, ...] | None, Field(strict=False)] = None
    """Shape of one input. Unless given, more than half of the clients decide."""
    num_classes: PositiveCount | None = None
    """Number of classes; given together with ``input_shape``."""
    labels: Literal["fine", "coarse"] = "fine"
    """CIFAR-100 alone has coarse labels: its 20 superclasses."""
    legacy_windows: bool = False
    """HHAR, RealWorld: leave out a window that ends exactly where its recording does."""
    columns: Columns | None = None
    """What the columns of a ``table`` or of a ``huggingface`` data set are."""
    classes: Annotated[tuple[ClassName, ...], Field(strict=False, min_length=1)] | None = None
    """Names of the classes in label order; by default those that occur, sorted. Where sites
    bring their own files, each may lack some of them."""
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of each class, its last examples, that is for testing where the data have no test part
    of their own; 0.2 unless given."""
    test_seed: Annotated[int | None, Field(ge=0)] = None
    """Seed by which the examples for testing are drawn, as many of each class as ``test_share``
    says, in place of the last ones. Groups stay whole."""
    group: Literal["folder"] | None = None
    """Images of one folder below that of their class belong together, as those of one patient: all
    are for training, or all for testing, also where several classes have a folder of that name."""
    test_gap: PositiveCount | None = None
    """Rows of a table that are left out of training on either side of test examples, so that what
    is measured is no neighbour of what was learned. By default none; windows never share rows."""
    tasks: TasksBy | None = None
    """What a task of a client is: a ``month``, ``week`` or ``day`` of its rows, by the column
    ``time``; or each ``session``, and without such a column each file. By default a client's rows
    are one task, or as many as ``tasks`` in ``[scenario]`` says."""
    bad: Literal["refuse", "skip"] | None = None
    """What becomes of rows and files that cannot be used: an empty cell, a text among numbers, a
    damaged photo. ``refuse``, as by default, ends the command with a list of them; ``skip`` sets
    them aside, with a line that counts and lists them."""
    bad_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of all rows, or files, beyond which ``bad = "skip"`` refuses; 0.05 unless given."""
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of each client's training examples of each class, the last ones, that it keeps for
    validation and never trains on; whole groups where ``group`` names a column. Windows of the same
    task that share rows with these, or are fewer than ``test_gap`` rows away, are not trained on
    either, where a scenario deals them in the order of their recording: a note says where not.
    What chooses (best round, ``patience``, ``target``, a search) looks at it, and at no test
    data."""
    repeats: Repeats | None = None
    """Of an open run: what becomes of the examples of a new task that earlier tasks of its client
    have: ``"skip"`` leaves them out, as by default, ``"refuse"`` refuses the task, ``"keep"``
    trains on them again."""
    unusual: Unusual | None = None
    """Of an open run: what becomes of a new task that is not like the earlier ones of its client
    (units, ranges, empty places, the mix of labels): ``"tell"`` trains on it and says so, as by
    default, ``"set-aside"`` sets it aside with the reason."""
    channels: Literal["grey", "rgb"] | None = None
    """What images become; by default as they are."""
    resize: Sides | None = None
    """Size that images get: ``[height, width]``, or pixels of the shorter side."""
    crop: Sides | None = None
    """Size of the middle that images are cut to after that: ``[height, width]``, or one number."""
    ground: Literal["white", "black"] | None = None
    """What transparent images are laid on; by default white."""
    frames: Literal["first", "all"] | None = None
    """What is read of a file of several frames or pages, which is refused unless given: the first,
    or each as an example."""

    mean: Moment | None = None
    """Of ``x / scale``, a number for each channel or one for all; given together with ``std``. By
    default what the data set says, or what follows from the training data. ``[privacy] level``
    needs it where data are of one's own."""
    std: Moment | None = None
    """By what inputs are divided after ``mean`` was subtracted."""
    depth: Literal[8, 16] | None = None
    """Bits that a shade gets, where some images have 8 and others 16; by default as they are. Of 16
    bits, 8 keeps the upper half."""
    window: Window | None = None
    """Of grey DICOM images: ``[centre, width]`` of the values that become shades, such as ``[40,
    400]`` in Hounsfield units, in place of each file's own window, so that shades of all files mean
    the same. Other images are refused with it."""

    def identity(self) -> dict[str, Any]:
        """Return what examples follow from: every key but the place of the files."""
        # older partitions lack these keys
        absent = {key for key in ("columns", *_ADDED) if getattr(self, key) is None}
        facts = self.model_dump(mode="json", exclude={"root", *NOT_CUT, *absent})
        return facts if self.columns is None else {**facts, "columns": self.columns.identity()}

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns that are learned in place of a class; none where classes are learned."""
        return self.columns.targets if self.columns is not None else ()

    @model_validator(mode="after")
    def _check_bad(self) -> Data:
        if self.bad_share is not None and self.bad != "skip":
            raise ConfigError("[data] bad_share bounds what bad = 'skip' sets aside: give both")
        return self

    @model_validator(mode="after")
    def _check_server(self) -> Data:
        if self.server_unlabelled is not None and self.server_examples is None:
            raise ConfigError("[data] server_unlabelled needs server_examples")
        return self

    @property
    def cuts_tasks(self) -> bool:
        """Whether what is in the data says which task of its client an example is of."""
        return self.tasks is not None or bool(self.columns and self.columns.task)

    @model_validator(mode="after")
    def _check_tasks(self) -> Data:
        columns, key = self.columns, f"[data] tasks = {self.tasks!r}"
        if self.tasks is None:
            return self
        if columns is None:
            raise ConfigError(f"{key} is for tables, whose columns [data.columns] names")
        if self.tasks != "session" and columns.time is None:
            raise ConfigError(f"{key} needs the column of dates: [data.columns] time")
        for other in ("task", "split"):
            if getattr(columns, other) is not None:
                raise ConfigError(f"{key} does not go with [data.columns] {other}: leave one out")
        return self

    @property
    def has_groups(self) -> bool:
        """Whether examples have groups that stay whole when a part is held out."""
        return self.group is not None or bool(self.columns and self.columns.group)

    @model_validator(mode="after")
    def _check_moments(self) -> Data:
        if (self.mean is None) != (self.std is None):
            raise ConfigError("[data] mean and std need each other")
        if self.std is not None and min(self.std) <= 0:
            raise ConfigError("[data] std holds a number that is not above 0")
        return self

    @property
    def measures_inputs(self) -> bool:
        """Whether mean and deviation of inputs follow from the examples of whoever brings them."""
        is_own = self.name in ("directory", "table", "huggingface") or ":" in self.name
        return is_own and self.mean is None

    @property
    def measures_targets(self) -> bool:
        """Whether mean and deviation of numbers to predict follow from the examples."""
        columns = self.columns
        return columns is not None and bool(columns.target) and columns.target_mean is None

    @model_validator(mode="after")
    def _check_classes(self) -> Data:
        classes, of_columns = self.classes, self.columns and self.columns.classes
        if classes is not None and of_columns not in (None, classes):
            raise ConfigError("[data] classes and [data.columns] classes differ: give one")
        if len({*(classes or ())}) < len(classes or ()):
            raise ConfigError("[data] classes names a class twice")
        if classes is not None and self.num_classes not in (None, len(classes)):
            raise ConfigError(
                f"[data] num_classes = {self.num_classes}, and classes names {len(classes)}"
            )
        return self

    @model_validator(mode="after")
    def _check_problem(self) -> Data:
        if (self.input_shape is None) != (self.num_classes is None):
            raise ConfigError("[data] input_shape and num_classes need each other")
        return self
