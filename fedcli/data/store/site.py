"""A site's own files, cut as the run wants them: its client's directory, made once and kept.

The run says windows, columns, sizes and classes by its table ``[data]``, and never a place. Classes
go by name: a site may lack some, or have them in another order. What is cut stays at the site, in
its state directory; files that change, or another ``[data]``, are cut anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.data.arrays import IntArray, Labelled, strata
from fedcli.data.folders import OF_TEXT, ending, files_below
from fedcli.data.kept_runs import INDEX
from fedcli.data.own.site_lines import HEAD, lines_for_texts
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import OWN, load
from fedcli.data.sets.source import Earlier, Whose
from fedcli.data.store.client_data import ABOUT, PARTS, Part, has_grown
from fedcli.data.store.commands import thinned
from fedcli.data.store.own_files import CUT_FILE, cut_before, files_of
from fedcli.data.store.partition_writer import (
    description_of,
    why_not_written,
    write_client,
    write_people,
    write_wholes,
    written_whole,
)
from fedmodels.config.bounds import digest_of
from fedmodels.config.data import Data
from fedmodels.config.recipe import (
    EMPTY,
    NAME,
    Recipe,
    recipe_beside,
    recipe_in,
    recipe_of,
)
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.class_names import composed, named
from fedmodels.facts.data_description import ClientFile, TaskCounts
from fedmodels.facts.resolution import received_data

FORMAT = 1
RECIPE = "recipe.path"
"""File beside a client's data with the path of its site's recipe."""
SHOWN = 5
"""Classes that a line names."""
MAX_LETTERS = 60
log = logging.getLogger(__name__)


def cut(
    files: Path,
    tables: Mapping[str, Any],
    seed: int,
    client: int,
    cache: Path,
    given: Path | None = None,
) -> Path:
    """Return the directory above a client's data, made of its own files unless it was before.

    ``tables`` are the run's ``[data]`` as the server sent it; what is cut is kept in ``cache``.
    Files that are gone are not needed again, and those of a client that has got further tasks are
    not read again. The site's recipe is ``given``, or lies with the files.

    Raises:
        ConfigError: the run's data are of no kind that a site brings along; or the recipe is no
            good.
        DataError: files cannot be read, or the cache cannot be written.
    """
    data = received_data(tables, "the server's [data]")
    if data.name not in OWN:
        raise ConfigError(
            f"--data {files} holds no client's directory, and the run's data are "
            f"{printable(data.name, MAX_LETTERS)}: bring a directory that fedcli partition made"
        )
    before = cut_before(cache, client, (data, seed))
    if before is not None and (has_grown(before / str(client)) or not files.exists()):
        log.info(
            "client %s: continues with the data prepared before; %s is not read", client, files
        )
        if given is not None:
            recipe_in(given)
            remember_recipe(before / str(client), files, given)
        return before
    if not files.exists():
        raise DataError(f"{files} is not there")
    data = data.model_copy(update={"root": str(files)})
    whole = recipe_for(files, given)  # as files are read by it, a line says what is surplus
    recipe, _ = whole.for_run(data.columns)
    held = _stamp(files, data, seed, client, recipe)
    root = cache / (held if not recipe else f"{held}-{recipe.digest[:8]}")
    joined = before is not None and _has_joined(cache.parent, client)
    if before is not None and joined and recipe.mark is not None and files_of(before) != held:
        log.info("client %s: goes on with what was cut before: add-task reads what of %s is beyond "
                 "its mark", client, files)  # fmt: skip
        remember_recipe(before / str(client), files, given)
        return before
    joined = before is not None and joined and files_of(before) == held
    if before is not None and joined and before != root:
        remember_recipe(before / str(client), files, given)
        log.warning(
            "note: client %s: the site mapping has changed: it applies to new data only. For a "
            "new run that uses it for all data, choose another --state-dir",
            client,
        )  # fmt: skip
        return before
    if (about := root / str(client) / ABOUT).is_file():
        about.touch()  # the one that is used is the last one, also where others were cut since
        log.info("client %s: %s was cut before", client, files)
        return root
    if data.columns is not None and data.name == "table" and data.columns.features is None:
        log.warning(
            "note: %s: the run lists no [data.columns] features, so columns stand as they do in "
            "these files: other sites need the same columns in the same order", files,
        )  # fmt: skip
    if (twin := _twin(root, client)) is not None:
        _share(twin, root)
        remember_recipe(root / str(client), files, given)
        log.info("client %s: %s was cut before, for another run", client, files)
        return root
    dataset = thinned(_by_names(loaded(files, data, "site", whole), listed(data)), data, seed)
    _check_unit(data, dataset, files)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)  # for nobody else
        with written_whole(root) as place:
            _write(place / str(client), dataset, files)
            (place / CUT_FILE).write_text(json.dumps([dict(tables), seed, held]) + "\n", "utf-8")
            remember_recipe(place / str(client), files, given)
    except OSError as error:
        if not (root / str(client) / "client.json").is_file():  # another process may have cut it
            raise DataError(why_not_written(root, error)) from None
    counts = f"{len(dataset.train.y)} examples to train on, {len(dataset.test.y)} to test on"
    log.info("client %s: %s is cut as the run wants it: %s", client, files, counts)
    return root


def _twin(root: Path, client: int) -> Path | None:
    """Return what a site that stays cut alike for another run of it, if anything."""
    states = root.parent.parent.parent
    if not (states / INDEX).is_file():
        return None
    for place in sorted(states.glob(f"*/{root.parent.name}/{root.name}")):
        if (place / str(client) / ABOUT).is_file() and not has_grown(place / str(client)):
            return place
    return None


def _share(twin: Path, root: Path) -> None:
    """Make a directory of cut data that has the arrays of another one in common, on the disk.

    Raises:
        DataError: it cannot be written.
    """

    def linked(one: str, other: str) -> None:
        if one.endswith(".npy"):  # which are written once
            with contextlib.suppress(OSError):  # not all file systems have links
                os.link(one, other)
                return
        shutil.copy2(one, other)

    try:
        root.parent.parent.mkdir(parents=True, exist_ok=True)
        root.parent.mkdir(mode=0o700, exist_ok=True)
        with written_whole(root) as place:
            shutil.copytree(twin, place, copy_function=linked, dirs_exist_ok=True)
    except OSError as error:
        raise DataError(why_not_written(root, error)) from None


def _check_unit(data: Data, dataset: Dataset, files: Path) -> None:
    """Check that numbers to predict are counted alike at all sites; raise ConfigError."""
    columns = data.columns
    if columns is None or columns.target is None or columns.target_mean is not None:
        return
    own = (dataset.transform or {}).get("columns", {})
    mean, std = ([float(f"{v:.6g}") for v in own[key]] for key in ("target_mean", "target_std"))
    raise ConfigError(
        "the run's [data.columns] has target, and no target_mean and target_std, which all sites "
        f"must count in: the coordinator has to give both. The training rows of {files} have "
        f"target_mean = {mean} and target_std = {std}"
    )


def listed(data: Data) -> Sequence[str]:
    """Return the classes that the run lists, if it lists some."""
    return data.classes or (data.columns.classes if data.columns else None) or ()


def recipe_for(files: Path, given: Path | None) -> Recipe:
    """Return the recipe of a site's files: the given one, or the one that lies with them."""
    return recipe_beside(files) if given is None else recipe_in(given)


def remember_recipe(directory: Path, files: Path, given: Path | None) -> None:
    """Note beside a client's data where the recipe lies, so that what comes later is read by it."""
    place = given or (files if files.is_dir() else files.parent) / NAME
    (directory / RECIPE).write_text(f"{place.absolute()}\n", "utf-8")


def recipe_now(source: Path, directory: Path, file: ClientFile, given: Path | None) -> Recipe:
    """Return the recipe of files that have come: the given one, else the one that lies with them.

    That is in their folder, or beside it. Else it is that of the client's first files, as it is
    now, or where it is gone, as it was last. A file that says nothing is a recipe, too.

    Raises:
        ConfigError: its file is malformed.
    """
    places = (given,) if given is not None else (source / NAME, source.parent / NAME)
    if (found := next((one for one in places if one == given or one.is_file()), None)) is not None:
        return recipe_in(found)
    last = (file.transform or {}).get("recipe")
    try:
        place = Path((directory / RECIPE).read_text("utf-8").removesuffix("\n"))
    except (OSError, ValueError):
        place = None
    if place is not None and place.is_file():
        return recipe_in(place)
    return recipe_of(last, directory / ABOUT) if last else EMPTY


def changed_recipe(now: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> str:
    """Return in words that the recipe of two transforms is another one."""
    new, old = (digest_of((how or {}).get("recipe"))[:12] or "none" for how in (now, last))
    return f"it was read with another site mapping than earlier data: sha256 {new}, not {old}"


def _has_joined(states: Path, client: int) -> bool:
    """Tell whether a client has taken part in a run, which keeps the data that it began with."""
    return (states / str(client) / "session.json").exists()


def loaded(
    files: Path,
    data: Data,
    whose: Whose,
    recipe: Recipe = EMPTY,
    since: float | int | str | None = None,
    earlier: Earlier | None = None,
) -> Dataset:
    """Load a site's files as ``[data]`` and the site's recipe say; classes are those that occur.

    Classes that the run does not list are told, with lines for the recipe.

    ``whose`` tasks they are cut into, where the data say it: the site's, or one task. Of a site
    with a mark, rows beyond ``since`` are read. Of a further task, what the client had ``earlier``
    says which rows are new, and in which part people stay.

    Raises:
        DataError: they cannot be read, or the name of a class is none.
    """
    columns = data.columns and data.columns.model_copy(update={"classes": None})
    update = {"classes": None, "columns": columns, "root": str(files)}
    found = load(data.model_copy(update=update), whose=whose, recipe=recipe, since=since,
                 earlier=earlier)  # fmt: skip
    known = [composed(name) for name in listed(data)]
    known += [] if earlier is None else [name for name in earlier.classes if known]
    if known and (strange := [name for name in found.class_names if name not in known]):
        lines = [HEAD, *lines_for_texts("classes", strange, known)]
        some = ", ".join(repr(printable(name, MAX_LETTERS)) for name in strange[:SHOWN])
        log.warning(
            "note: %s: the run lists no class %s. If %s is one of its own, written otherwise, %s",
            files, some, "it" if len(strange) == 1 else "each", "\n".join(lines),
        )  # fmt: skip
    for name in found.class_names:
        try:
            named(name)
        except ValueError as error:
            raise DataError(f"{files}: {error}") from None
    return found


def _by_names(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Return a data set whose labels are the places of its classes among those of the run.

    A class that the run does not know comes after these; the coordinator refuses it by its name.
    """
    if not classes:
        return dataset
    names = [composed(name) for name in classes]
    names += [name for name in dataset.class_names if name not in names]
    places: IntArray = np.array([names.index(name) for name in dataset.class_names], dtype=np.int64)
    return dataset.relabelled(places, names)


def _stamp(files: Path, data: Data, seed: int, client: int, recipe: Recipe) -> str:
    """Return the digest of all that a cut follows from, beside the site's recipe."""
    found = [path for path in _read_of(files, recipe) if path.name != NAME]
    stats = [(path, path.stat()) for path in found]
    held = [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    facts = [FORMAT, data.identity(), seed, client, held]
    if data.has_groups:
        facts.append("with groups")  # earlier versions kept none
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read_of(files: Path, recipe: Recipe) -> list[Path]:
    """Return what is read of a site's files; of a query also what it may read beside it."""
    if files.is_dir():
        return files_below(files)
    if ending(files) != ".sql":
        return [files]
    if recipe.database is not None:
        return [path for path in (files, files.parent / recipe.database) if path.is_file()]
    kinds = (*OF_TEXT, ".parquet")
    return [files, *(path for path in files_below(files.parent) if ending(path) in kinds)]


def _write(place: Path, dataset: Dataset, files: Path) -> None:
    """Write the directory of the site's client: one task, or those that ``[data]`` cuts.

    Raises:
        DataError: a task has no training example.
    """
    parts = {
        "train": (dataset.train.x, dataset.train.y, dataset.train.tasks),
        "test": (dataset.test.x, dataset.test.y, dataset.test.tasks),
    }
    tasks = [t for _, _, t in parts.values() if t is not None]
    held, counts = list[tuple[int, Part, Labelled]](), list[TaskCounts]()
    for number in range(1 + max((int(t.max()) for t in tasks), default=0)):
        sizes = dict[str, tuple[int, ...]]()
        for part in PARTS:
            x, y, task = parts[part]
            mine = slice(None) if task is None else task == number
            held.append((number, part, (x[mine], y[mine])))
            sizes[part] = tuple(
                np.bincount(strata(y[mine]), minlength=dataset.num_classes).tolist()
            )
        if not sum(sizes["train"]):
            raise DataError(
                f"{files}: task {number} would have no training example: all are for testing, or "
                "too near to one; give more data, or a shorter window, hop or test_gap"
            )
        counts.append(TaskCounts(train=sizes["train"], test=sizes["test"]))
    described = description_of(dataset, (dataset.mean, dataset.std))
    place.mkdir()
    write_client(place, ClientFile(**described, tasks=tuple(counts)), held)
    if (wholes := dataset.train.wholes) is not None:
        for number in range(len(counts)):
            task = dataset.train.tasks
            write_wholes(place, number, wholes if task is None else wholes[task == number])
    if dataset.whole_names:
        of_parts = [
            [part.wholes if part.tasks is None else part.wholes[part.tasks == number]
             for part in (dataset.train, dataset.test) if part.wholes is not None]
            for number in range(len(counts))
        ]  # fmt: skip
        write_people(place, dataset.whole_names, [(train, test) for train, test in of_parts])
