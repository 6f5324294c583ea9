"""Where the loader of a data set may look for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from fedmodels.config.data import Data
from fedmodels.config.recipe import EMPTY, Recipe
from fedmodels.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedcli.data.arrays import Inputs, IntArray
    from fedcli.data.cuts.held_out import Put

Whose = Literal["natural", "site", "task"]


class Earlier(Protocol):
    """What a client has had before the files that come now."""

    @property
    def fill(self) -> tuple[float, ...] | None:
        """What empty cells of each column hold, by its first task."""

    @property
    def classes(self) -> Sequence[str]:
        """Its classes by now."""

    def new(
        self, x: Inputs, wholes: IntArray | None = None, names: Sequence[str] = ()
    ) -> NDArray[np.bool_]:
        """Tell which examples (n, *input_shape) are new to it, (n,).

        ``wholes`` (n,) are groups that stay whole, which have ``names``.

        Raises:
            DataError: none is, or the run refuses those that are not.
        """

    def put(self, names: Sequence[str]) -> Put | None:
        """Return in which part groups of these names are already; None if they have no names."""


@dataclass(frozen=True)
class Source:
    """Where a loader may look, and where it may write."""

    roots: tuple[Path, ...]
    """Directories to read, in this order; never written to, but for the cache, the last one."""
    data: Data = field(default_factory=lambda: Data(name=""))
    tasks: tuple[int, ...] = ()
    """Tasks into which the examples of each natural client are cut along time, by its number; of
    others one. A test part that is chosen here is chosen in each task."""
    whose: Whose = "natural"
    """Whose tasks the data are cut into, where they say it: those of each natural client, of one
    ``site`` with all its persons, or none, since all examples are one ``task``."""
    recipe: Recipe = EMPTY
    """How the site's own files say what the run asks for."""
    since: float | int | str | None = None
    """The last mark that was read of them, where the recipe has one: what is beyond it is new."""

    earlier: Earlier | None = None
    """What the client has had before, where the data are a further task of it."""

    @property
    def cache(self) -> Path:
        """The directory for what is unpacked or downloaded."""
        return self.roots[-1]

    def find(self, *names: str) -> Path | None:
        """Return the first of these files or directories that one of the roots holds."""
        for root in self.roots:
            for name in names:
                if (root / name).exists():
                    return root / name
        return None

    def missing(self, what: str, advice: str) -> DataError:
        """Return the error that says what is missing, where it was looked for, what to do."""
        places = ", ".join(str(root) for root in self.roots)
        return DataError(f"{self.data.name}: {what} is in none of {places}; {advice}")
