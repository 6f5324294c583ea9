"""What would be learned of a site's own files: they are read and cut, and nothing is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedcli.data.store.findings import inspect
from fedcli.data.store.site import cut, recipe_for
from fedmodels.config.recipe import NAME
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError


def check_files(
    files: Path,
    tables: Mapping[str, Any],
    seed: int,
    given: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Print what a run with these ``[data]`` would learn of files; tell whether all is well.

    Raises:
        ConfigError: the site's recipe is no good, or the files are of no kind that a site brings.
        DataError: the files cannot be read as the run wants them; with lines for the recipe.
    """
    console = console or Console()
    recipe = recipe_for(files, given)
    place = given or (files if files.is_dir() else files.parent) / NAME
    lines = [f"recipe {place}, sha256 {recipe.digest}" if recipe else f"no recipe {place}"]
    for name, column in recipe.columns.items():
        facts = column.model_dump(by_alias=True, exclude_defaults=True)
        lines.append(f"column {name}: {', '.join(f'{key} {v}' for key, v in facts.items())}")
    lines += [f"class {own!r} is {name}" for own, name in recipe.classes.items()]
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as place_for_it:
        root = cut(files, tables, seed, 0, Path(place_for_it) / "own-data", given)
        return inspect(root, console)


def tables_of(experiment: Any) -> dict[str, Any]:
    """Return ``[data]`` of a config as a coordinator sends it.

    Raises:
        ConfigError: the config has no ``[data]``.
    """
    if experiment.data is None:
        raise ConfigError("the config has no [data] that says how files are cut")
    found: dict[str, Any] = experiment.data.model_dump(
        mode="json", exclude={"root"}, exclude_none=True
    )
    return found
