"""What ``[data]`` of a config may say; nothing here opens any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedmodels.config.bounds import PositiveCount
from fedmodels.config.strict_table import CodeName, Place, StrictTable
from fedmodels.config.transforms import ImageTransform, Sides
from fedmodels.errors import ConfigError


class Columns(StrictTable):
    """``[data.columns]``: what the columns of a table of one's own are."""

    label: str = "label"
    """Column that names the class of a row."""
    features: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Columns that a net sees, in this order; all others that hold numbers unless given."""
    classes: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Names of the classes in label order; those that occur, sorted, unless given."""
    client: str | None = None
    """Column that names the natural client of a row, such as a person or a device."""
    split: str | None = None
    """Column that says ``train`` or ``test``; ``test_share`` decides unless given."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of each client's examples of each class, the last ones, that are for testing."""
    window: PositiveCount | None = None
    """Rows of a window; each row is an example unless given."""
    hop: PositiveCount | None = None
    """Rows from the start of a window to that of the next; ``window`` unless given."""

    @model_validator(mode="after")
    def _hop_needs_a_window(self) -> Columns:
        if self.hop is not None and self.window is None:
            raise ConfigError("[data.columns] hop needs window, the number of rows of a window")
        return self

    @model_validator(mode="after")
    def _features_are_only_that(self) -> Columns:
        if len({*(self.classes or ())}) < len(self.classes or ()):
            raise ConfigError("[data.columns] classes names a class twice")
        others = {"label": self.label, "client": self.client, "split": self.split}
        features = self.features or ()
        for role, column in others.items():
            if column in features:
                raise ConfigError(f"[data.columns] features names {column!r}, which is the {role}")
        for column in features:
            if features.count(column) > 1:
                raise ConfigError(f"[data.columns] features names {column!r} twice")
        return self


OF_IMAGES = ("channels", "resize", "crop", "ground", "frames")
"""The keys of ``[data]`` that say how images are read."""
_ADDED = ("test_share", *OF_IMAGES)


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
    """Set apart this many more of each class without labels; ``server_examples`` unless given."""
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
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of each class, its last examples, that is for testing where the data have no test part
    of their own; 0.2 unless given."""
    channels: Literal["grey", "rgb"] | None = None
    """What images become; as they are unless given."""
    resize: Sides | None = None
    """Size that images get: ``[height, width]``, or pixels of the shorter side."""
    crop: Sides | None = None
    """Size of the middle that images are cut to after that: ``[height, width]``, or one number."""
    ground: Literal["white", "black"] | None = None
    """What transparent images are laid on; white unless given."""
    frames: Literal["first", "all"] | None = None
    """What is read of a file of several frames or pages, which is refused unless given: the first,
    or each as an example."""

    def identity(self) -> dict[str, Any]:
        """Return what examples follow from: every key but the place of the files."""
        # older partitions lack these keys
        absent = {key for key in ("columns", *_ADDED) if getattr(self, key) is None}
        return self.model_dump(mode="json", exclude={"root", *absent})

    def transform_of(self, input_shape: Sequence[int]) -> dict[str, Any] | None:
        """Return how a file becomes an input of this shape, as far as the config says it."""
        if len(input_shape) != 3 or all(getattr(self, key) is None for key in OF_IMAGES):
            return None
        channels = "grey" if input_shape[0] == 1 else "rgb"
        return {**self.images.model_dump(mode="json"), "channels": channels}

    @property
    def images(self) -> ImageTransform:
        """How an image becomes pixels."""
        given = {key: getattr(self, key) for key in OF_IMAGES}
        return ImageTransform(**{key: value for key, value in given.items() if value is not None})

    @model_validator(mode="after")
    def _check_server(self) -> Data:
        if self.server_unlabelled is not None and self.server_examples is None:
            raise ConfigError("[data] server_unlabelled needs server_examples")
        return self

    @model_validator(mode="after")
    def _check_problem(self) -> Data:
        if (self.input_shape is None) != (self.num_classes is None):
            raise ConfigError("[data] input_shape and num_classes need each other")
        return self
