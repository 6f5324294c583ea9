"""How files become examples: what a partition writes down, and a model's own file carries along.

A transform is written as plain values into ``client.json`` and into a model's file, so a new photo
or recording becomes an input as those of training did. Nothing here opens any data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from fedmodels.config.bounds import StrictTable
from fedmodels.config.columns import Columns, Decimal
from fedmodels.config.data import OF_IMAGES, Data, Sides, Window
from fedmodels.config.recipe import EMPTY, Recipe
from fedmodels.errors import ConfigError, DataError


class _Transform(StrictTable):
    recipe: Recipe = EMPTY
    """What the files of the site call columns and classes, and how they write what is in them."""

    def facts(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = self.model_dump(mode="json", exclude={"recipe"})
        return {**found, "recipe": self.recipe.facts()} if self.recipe else found


class ImageTransform(_Transform):
    """How an image file becomes pixels: the keys of ``[data]`` that are for images."""

    kind: Literal["images"] = "images"
    channels: Literal["grey", "rgb"] | None = None
    """As the file has them unless given."""
    resize: Sides | None = None
    crop: Sides | None = None
    ground: Literal["white", "black"] = "white"
    frames: Literal["first", "all"] | None = None
    """A file of several frames or pages is refused unless given."""
    depth: Literal[8, 16] | None = None
    """Bits of a shade; as the file has them unless given."""
    window: Window | None = None
    """Centre and width of what is shown of a scan; as its file says unless given."""

    def facts(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = super().facts()
        return found if self.window else {k: v for k, v in found.items() if k != "window"}


class TableTransform(_Transform):
    """How the rows of a table become inputs: the columns, and what fills an empty cell."""

    kind: Literal["table"] = "table"
    columns: Columns
    fill: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """With ``missing = "mean"``: the mean of the training rows, for each feature."""
    decimal: Decimal | None = None
    """The decimal mark of the files of training, for a new file whose numbers tell none."""
    mark: float | int | str | None = None
    """The last value of the recipe's ``mark`` that was read: rows beyond it are new."""

    def facts(self) -> dict[str, Any]:
        """Return it as plain values."""
        found = super().facts()
        return found if self.mark is not None else {k: v for k, v in found.items() if k != "mark"}

    @property
    def of_site(self) -> Columns:
        """The columns, with what the recipe says of how the site's files are written.

        Raises:
            ConfigError: the recipe contradicts them.
        """
        return self.recipe.over(self.columns)


Transform = ImageTransform | TableTransform


def image_transform(data: Data) -> ImageTransform:
    """Return how a config says that an image becomes pixels."""
    given = {key: getattr(data, key) for key in OF_IMAGES}
    return ImageTransform(**{key: value for key, value in given.items() if value is not None})


def transform_of(data: Data, input_shape: Sequence[int]) -> dict[str, Any] | None:
    """Return how a file becomes an input of this shape, as far as the config says it."""
    if data.columns is not None and data.columns.features and len(input_shape) < 3:
        return TableTransform(columns=data.columns).facts()
    if len(input_shape) != 3 or all(getattr(data, key) is None for key in OF_IMAGES):
        return None
    channels = "grey" if input_shape[0] == 1 else "rgb"
    return {**image_transform(data).facts(), "channels": channels}


def parse_transform(facts: Mapping[str, Any] | None, where: object) -> Transform | None:
    """Read a transform of a file, which may be anybody's; DataError if it is malformed."""
    if facts is None:
        return None
    try:
        return _ANY.validate_python(facts)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in ("transform", *first["loc"][1:]))
        raise DataError(f"{where}: {place}: {first['msg']}") from None
    except ConfigError as error:  # of columns that contradict each other
        raise DataError(f"{where}: transform: {error}") from None


def channels_in(facts: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what the numbers of a table's row are called; nothing where a transform says none."""
    try:
        how = parse_transform(facts, "")
    except DataError:
        return ()
    return how.columns.channels if isinstance(how, TableTransform) else ()


_ANY: TypeAdapter[Transform] = TypeAdapter(Annotated[Transform, Field(discriminator="kind")])
