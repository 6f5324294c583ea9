"""Adding a task to a client's data while its run goes on.

    DIR/<id>/task-N.part    what is being written; a crash leaves it, and the next task removes it
    DIR/<id>/task-N         the task, with ``source.json``: what it was made of
    DIR/<id>/client.json    written last: it counts the examples of all tasks, also of this one

A task counts once ``client.json`` counts it. So a crash at any moment leaves the data as they were
before, or as they are with the task. What a source was is stored with the task: to add the same one
again, as after a crash, adds nothing.

A source is a folder with ``train/`` and ``test/``, arrays ``train_x.npy`` and so on, or files as
people have them, which are cut as the run's ``[data]`` says. Inputs are normalised as those of the
first tasks. Classes go by name; a class that the client lacks comes behind those that it has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcli.data.arrays import IntArray, strata
from fedcli.data.class_folders import class_folders
from fedcli.data.folders import TABLE_ENDS, ending, files_below, is_foreign
from fedcli.data.own.tables import NothingNew
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.directory import holds_arrays
from fedcli.data.sets.registry import OWN
from fedcli.data.settled import Settled, Stamps, stamps_in
from fedcli.data.store.client_data import (
    ABOUT,
    GROUP,
    PARTS,
    PEOPLE,
    SOURCE,
    ClientData,
    save_arrays,
)
from fedcli.data.store.commands import thinned
from fedcli.data.store.findings import arrived
from fedcli.data.store.known_rows import KnownRows, known_rows
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.own_files import How
from fedcli.data.store.people import keys_of, new_salt, people_table, salt_of
from fedcli.data.store.repeats import Before, Compared, compared
from fedcli.data.store.site import changed_recipe, loaded, recipe_now, remember_recipe
from fedcli.data.store.task_digests import content_of, digest_of
from fedcli.data.store.usual import cells_of, comparable, counting, earlier_cells, unlike
from fedmodels.config.data import OF_IMAGES, Data, Repeats, Unusual
from fedmodels.config.recipe import EMPTY, NAME, Recipe
from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.console.printable import printable
from fedmodels.errors import (
    ArchiveError,
    ArchiveNotWritten,
    ConfigError,
    DataError,
    LinkError,
    RecipeError,
    reason_of,
)
from fedmodels.facts.class_names import near
from fedmodels.facts.data_description import MAX_WHY, UNUSUAL, ClientFile, TaskCounts
from fedmodels.host.files import (
    LEFTOVER,
    locked,
    sha256_of,
    sync_path,
    used_without_lock,
    write_atomically,
)
from fedmodels.times import LOOK_AGAIN_S

LOCK = ".adding.lock"
"""Held while a task is added, and how often a process that waits for it looks."""
MAX_LETTERS = 60


class StillWritten(DataError):
    """A source is being written: what was read of it may be half of it."""


@dataclass(frozen=True)
class Added:
    """What adding a task did."""

    task: int
    """The number of the task, from 0."""
    examples: tuple[int, int] = (0, 0)
    """How many examples there are for training and for testing."""
    new_classes: tuple[str, ...] = ()
    was_there: bool = False
    """Whether the same source was added before, so that nothing changed."""
    known: tuple[int, int] = (0, 0)
    """How many examples of the source earlier tasks have, and how many of these are test examples
    there."""
    keeps: bool = False
    """Whether those are among the examples all the same."""
    why_kept: str = ""
    """Why, where nobody asked for it."""
    notes: tuple[str, ...] = ()
    """What may not be meant in the data, as ``fedcli check`` says it, and what is not usual."""
    set_aside: bool = False
    """Whether it is set aside, as it is not like the earlier tasks."""

    def __str__(self) -> str:
        """Return what was done, in a line."""
        if self.was_there:
            return f"it is task {self.task} already"
        new = [printable(name, MAX_LETTERS) for name in self.new_classes]
        more = f", with the new class{'es' if len(new) > 1 else ''} {', '.join(new)}" if new else ""
        train, test = self.examples
        line = f"it is task {self.task}: {train} examples to train on, {test} to test on{more}"
        again, of_tests = self.known
        if again:
            others = f", {of_tests} of them as test examples" if of_tests else ""
            done = f"kept{self.why_kept}" if self.keeps else "left out"
            line += f"; {again} that are in earlier tasks already{others} are {done}"
        if self.set_aside:
            line += "; it is set aside, and --unusual tell adds it again as one that counts"
        return line


def add_task(
    root: Path,
    client: int,
    source: Path,
    data: Data | None = None,
    seed: int = 0,
    *,
    repeats: Repeats | None = None,
    unusual: Unusual | None = None,
    strict: bool = False,
    given: Path | None = None,
    drifted: str = "",
) -> Added:
    """Add a task to a client's data, whole or not at all.

    Without the run's ``[data]``, files are cut as ``client.json`` says of its columns or images;
    the run's seed draws examples where ``[data]`` has a limit for them.

    Args:
        root: the directory above the client's.
        client: whose task it is.
        source: a folder, arrays, or files as people have them.
        data: ``[data]`` of the run.
        seed: the run's.
        repeats: what becomes of examples that earlier tasks have; by default as ``[data]`` says.
        unusual: what becomes of a task that is not like the earlier ones; by default as ``[data]``
            says.
        strict: add nothing where ``fedcli check`` would have a word on it.
        given: the site's recipe; by default the one that lies with the source, or that of the
            client's first files.
        drifted: in words, what moved in the inputs that the client's model was asked before.

    Raises:
        DataError: the client's data or the source cannot be used; nothing was changed.
        ConfigError: a key of ``[data]`` is for other files than these.
        ArchiveNotWritten: the disk is full, or fails; nothing was changed.
        StillWritten: the source changed while it was read; nothing was changed.
    """
    held = open_data(root, client)
    stamps = stamps_in(source)
    try:
        made = _record_of(source)
        with alone(held.directory):
            held = open_data(root, client)  # another process may have added one meanwhile
            _remove_leftovers(held)
            how = _how(source, data, held)
            recipe = recipe_now(source, held.directory, held.file, given)
            if given is not None:
                remember_recipe(held.directory, source, given)
            rule = repeats or (data.repeats if data is not None else None) or "skip"
            with known_rows(held) as rows:
                since = _since(source, held.file, recipe)
                if source.suffix.lower() == ".sql":  # the same query has other rows each time
                    made = {**made, "sha256": _digest(f"{made['sha256']} {since!r}")}
                name = made["name"] if rule == "keep" else None
                if (known := rows.source(made["sha256"], name)) is not None:
                    return Added(known, was_there=True)
                before = Before(rows, rule, source, _fill_of(held))
                dataset = _read(source, how, held, recipe, since, before)
                if before.found is None:  # it has a test part of its own
                    dataset = compared(dataset, before)
                left = _in_own_order(dataset, held.file, source, how)  # no class of what went
                left = thinned(left, how, seed)
                odd = _unusual(held, rows, left)
                if stamps_in(source) != stamps and not _has_query(stamps):
                    raise StillWritten(
                        f"{source} changed while it was read: add it once it is written whole"
                    )
                keeps = (unusual or (data.unusual if data is not None else None)) != "set-aside"
                added = _added(
                    held,
                    left,
                    made,
                    before.found or Compared(),
                    odd,
                    strict=strict,
                    keeps=keeps,
                    drifted=drifted,
                )
                with suppress(sqlite3.Error):  # the task is there: its rows are taken in later
                    KnownRows(rows.db, open_data(root, client)).bring_up_to_date()
                return added
    except OSError as error:
        raise ArchiveNotWritten(
            f"{held.directory}: the task is not added: {reason_of(error)}"
        ) from None


def _has_query(files: Stamps) -> bool:
    """Tell whether a source is a query: the data base beside it may change at any time."""
    return any(name.lower().endswith(".sql") for name, _ in files)


def _unusual(held: ClientData, rows: KnownRows, dataset: Dataset) -> list[str]:
    """Return in which ways a task that is to come is not like the client's earlier ones."""
    columns = (held.file.transform or {}).get("columns") or {}
    tasks = counting(held)
    counts = [held.tasks[task].train for task in tasks]
    x, y = dataset.train.x, dataset.train.y
    now = np.bincount(strata(y), minlength=dataset.num_classes).tolist()
    new = [*cells_of(held.num_tasks, x, comparable(held, y))]
    names = [*(columns.get("features") or ()), *(columns.get("target") or ())]
    return unlike(earlier_cells(rows.db, tasks), new, counts, now, names)


def _added(
    held: ClientData,
    dataset: Dataset,
    made: Mapping[str, str],
    found: Compared,
    unusual: Sequence[str],
    *,
    strict: bool,
    keeps: bool,
    drifted: str,
) -> Added:
    """Write a task behind those of a client; one that is not usual is set aside unless it stays."""
    file = _grown(held.file, dataset, found.again)
    grown = copy(held)
    grown.file = file
    notes = (*map(str, arrived(grown, dataset)), *(f"{UNUSUAL}: {line}" for line in unusual))
    if drifted:
        file = _with_last(file, drifted=printable(drifted, MAX_WHY))
    if unusual:
        why = printable("; ".join(unusual), MAX_WHY - len(UNUSUAL) - 2)
        mark = {"unusual": why} if keeps else {"set_aside": True, "why": f"{UNUSUAL}: {why}"}
        file = _with_last(file, **mark)
        if not keeps and file.transform is not None:  # --unusual tell reads the same rows again
            before = (held.file.transform or {}).get("mark")
            rest = {k: v for k, v in file.transform.items() if k != "mark"}
            rest |= {} if before is None else {"mark": before}
            file = file.model_copy(update={"transform": rest})
    if strict and notes:
        raise DataError(f"--strict: {notes[0]}")
    if (file.transform or {}).get("recipe") != (held.file.transform or {}).get("recipe"):
        notes = (changed_recipe(file.transform, held.file.transform), *notes)
    if not held.states_counts:  # a folder that is there would be counted
        write_about(held.directory, held.file)
    place = held.directory / f"task-{held.num_tasks}"
    salt = salt_of(held) or new_salt(held.directory)
    people = None
    if dataset.train.wholes is not None and dataset.test.wholes is not None and dataset.whole_names:
        keys = keys_of(dataset.whole_names, salt)
        people = people_table(keys, dataset.train.wholes, dataset.test.wholes)
    content = content_of([(part.x, part.y) for part in (dataset.train, dataset.test)], file.classes)
    file = _with_last(file, digest=digest_of(salt, held.num_tasks, content))
    _write_task(place, dataset, made, people)
    write_about(held.directory, file)
    new = file.classes[held.file.num_classes :]
    sizes = len(dataset.train.y), len(dataset.test.y)
    known = found.again, found.of_tests
    return Added(
        held.num_tasks, sizes, new, known=known, keeps=found.keeps, why_kept=found.why_kept,
        notes=notes, set_aside=bool(unusual) and not keeps,
    )  # fmt: skip


def _write_task(
    place: Path, dataset: Dataset, made: Mapping[str, str], people: IntArray | None
) -> None:
    """Write the files of a task, and make them safe on the disk before they have their place."""
    part_of = place.with_name(f"{place.name}.part")
    part_of.mkdir()
    arrays = {
        f"{part}_{name}": getattr(getattr(dataset, part), name) for part in PARTS for name in "xy"
    }
    if dataset.train.wholes is not None:
        arrays[GROUP] = dataset.train.wholes
    if people is not None:
        arrays[PEOPLE] = people
    save_arrays(part_of, arrays)
    write_atomically(part_of / SOURCE, json.dumps(dict(made)) + "\n", sync=True)
    os.rename(part_of, place)
    sync_path(place.parent)


def _with_last(file: ClientFile, **facts: object) -> ClientFile:
    """Return a description with more facts of its last task."""
    last = file.tasks[-1].model_copy(update=facts)
    return file.model_copy(update={"tasks": (*file.tasks[:-1], last)})


def write_about(directory: Path, file: ClientFile) -> None:
    """Write a client's description, safely on the disk."""
    write_atomically(directory / ABOUT, file.text(indent=1) + "\n", sync=True)


# --- what is there --------------------------------------------------------------------------------


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Wait until no other process adds a task to a client; a client of a store gets a directory.

    A file system without locks is no error, and gets a line.
    """
    directory.mkdir(exist_ok=True)
    handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            while not locked(handle):
                time.sleep(LOOK_AGAIN_S)
        except OSError as error:
            used_without_lock(directory, error)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(held: ClientData) -> None:
    """Remove what a crash left: a task that was not written whole, or that nothing counts.

    Raises:
        DataError: a task was put there by hand, and ``client.json`` does not count it.
    """
    for part in [*held.directory.glob("task-*.part"), *held.directory.glob(LEFTOVER)]:
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    following = held.directory / f"task-{held.num_tasks}"
    if (following / SOURCE).is_file() and held.states_counts:
        shutil.rmtree(following)
    if following.exists():
        raise DataError(
            f"{following} is there, and {held.directory / ABOUT} does not count it: move it away, "
            "or leave out tasks there so that they are counted"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _record_of(source: Path) -> dict[str, str]:
    """Return name and content digest of a source; raise DataError if it cannot be read."""
    if not source.exists():
        raise DataError(f"{source} is not there")
    sha = hashlib.sha256()
    for path in files_below(source) if source.is_dir() else [source]:
        try:
            sha.update(f"{path.relative_to(source)}\0{sha256_of(path)}\0".encode())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
        except UnicodeEncodeError:
            raise DataError(f"{str(path)!a} is no name in UTF-8: rename it") from None
    return {"name": printable(source.absolute().name), "sha256": sha.hexdigest()}


# --- what is new ----------------------------------------------------------------------------------


def _is_prepared(source: Path) -> bool:
    """Tell whether a source is arrays, or has folders of training and of test images."""
    return source.is_dir() and ((source / "train").is_dir() or holds_arrays(source))


def _since(source: Path, file: ClientFile, recipe: Recipe) -> float | int | str | None:
    """Return the last mark of a client's rows; None where the site's recipe names none.

    Raises:
        DataError: a query gives other rows each time, and nothing says which are new.
    """
    if recipe.mark is None and source.suffix.lower() == ".sql":
        raise DataError(
            f"{source}: say in the recipe which column tells what is new, such as mark = 'id': the "
            "same query gives old rows, too"
        )
    found: float | int | str | None = (file.transform or {}).get("mark")
    return found if recipe.mark is not None else None


def _read(
    source: Path,
    how: Data,
    held: ClientData,
    recipe: Recipe,
    since: float | int | str | None,
    before: Before,
) -> Dataset:
    """Read a source; raise DataError unless it fits the client's other tasks."""
    by = EMPTY if holds_arrays(source) else recipe
    dataset = loaded(source, how, "task", by, since, before)
    if dataset.input_shape != held.file.input_shape:
        raise DataError(
            f"{source}: inputs have the shape {list(dataset.input_shape)}, and those of the "
            f"client's other tasks {list(held.file.input_shape)}"
        )
    new, known = dataset.train.x.dtype, held.kind()
    if known is not None and new != known and not new.kind == known.kind == "f":
        raise DataError(f"{source}: inputs are {new}, and those of the client's tasks {known}")
    return dataset


def _how(source: Path, data: Data | None, held: ClientData) -> Data:
    """Return how a source is cut, by ``[data]`` or as the client's data; DataError if unknown."""
    data = data if data is not None and data.name in OWN else None
    if _is_prepared(source) and not (_names_files(data) and _tables_in(source)):
        arrays, tested = holds_arrays(source), any(source.glob("test*"))
        known = data if data is not None and data.name == "directory" else _known(held)
        drawn = {} if tested or data is None else {
            key: getattr(data, key) for key in ("test_share", "test_seed")
        }  # fmt: skip
        images = {} if arrays or known is None else {key: getattr(known, key) for key in OF_IMAGES}
        limits = {} if data is None else {
            key: getattr(data, key) for key in ("max_per_class", "max_test_per_class")
        }  # fmt: skip
        group = None if arrays or data is None else data.group
        return Data(name="directory", group=group, **drawn, **images, **limits)
    found = data or _known(held)
    if found is None:
        raise DataError(
            f"{source} holds neither arrays such as train_x.npy nor a folder train/, and "
            f"{held.directory / ABOUT} does not say how files are cut: name the --server of the run"
        )
    if data is None and found.name == "directory" and (tables := _tables_in(source)):
        folders = {path.name for path in class_folders(source, source)}
        if not folders & {*held.file.classes}:
            raise DataError(
                f"{source} holds the table {printable(tables[0].name, MAX_LETTERS)}, and no folder "
                "that is called like a class of the client: if the table says what each image is, "
                "name the --server of the run, which says how it is read"
            )
    return found


def _names_files(data: Data | None) -> bool:
    """Tell whether a table says what each image is."""
    return data is not None and data.columns is not None and data.columns.file is not None


def _tables_in(source: Path) -> list[Path]:
    """Return the tables in a folder, by their path."""
    found = files_below(source) if source.is_dir() else []
    return [path for path in found if ending(path) in TABLE_ENDS]


def _fill_of(held: ClientData) -> tuple[float, ...] | None:
    """Return what stands in the empty cells of a client's first task, by column, if anything."""
    how = parse_transform(held.file.transform, held.directory / ABOUT)
    return how.fill if isinstance(how, TableTransform) else None


def _known(held: ClientData) -> Data | None:
    """Return what ``client.json`` says of how its files were cut."""
    how = parse_transform(held.file.transform, held.directory / ABOUT)
    if isinstance(how, TableTransform):
        return Data(name="table", columns=how.columns)
    if how is not None:
        return Data(name="directory", **{key: getattr(how, key) for key in OF_IMAGES})
    return Data(name="directory") if len(held.file.input_shape) == 3 else None


def _in_own_order(dataset: Dataset, file: ClientFile, source: Path, how: Data) -> Dataset:
    """Return a data set whose labels are the client's; classes that it lacks come last.

    Where the source is arrays or folders of training and test images, a number stands for the
    label, as it does in the client's own directory.

    Raises:
        DataError: a name differs in case or spaces alone from one that the client has, or other
            targets are learned.
    """
    names, by_number = list(file.classes), how.columns is None and _is_prepared(source)
    columns = (file.transform or {}).get("columns") or {}
    learns, y = columns.get("target") or columns.get("labels"), dataset.train.y
    if y.ndim == 2 and learns and dataset.class_names == file.classes:
        return dataset
    if y.ndim == 2 or learns:
        both = (printable(", ".join(k), MAX_LETTERS) for k in (dataset.class_names, names))
        line = "what is to be learned is {}, and {} in the client's other tasks".format(*both)
        raise DataError(f"{source}: {line}")
    places: IntArray = np.zeros(dataset.num_classes, dtype=np.int64)
    for label in np.unique(np.concatenate([dataset.train.y, dataset.test.y])):
        name = dataset.class_names[label]
        if by_number and name not in names and name.isdecimal() and int(name) < file.num_classes:
            places[label] = int(name)
            continue
        if name not in names:
            if (other := near(name, names)) is not None:
                raise DataError(
                    f"{source}: the class {name!r} differs from {other!r}, which the client has, "
                    "in case or spaces alone: write it like that"
                )
            names.append(name)
        places[label] = names.index(name)
    return dataset.relabelled(places, names)


def _grown(file: ClientFile, dataset: Dataset, again: int) -> ClientFile:
    """Return a client's description with a task, whose labels are the client's."""
    names = dataset.class_names
    zeros = (0,) * (len(names) - file.num_classes)
    train, test = (
        tuple(np.bincount(strata(y), minlength=len(names)).tolist())
        for y in (dataset.train.y, dataset.test.y)
    )
    tasks = [
        t.model_copy(update={part: getattr(t, part) + zeros for part in PARTS}) for t in file.tasks
    ]
    is_unnamed = not file.class_names and names == tuple(map(str, range(len(names))))
    transform = file.transform
    if transform is not None and dataset.transform is not None:
        recipe = dataset.transform.get("recipe")
        transform = {k: v for k, v in transform.items() if k != "recipe"}
        transform |= {"recipe": recipe} if recipe else {}
        mark = dataset.transform.get("mark")
        transform |= {} if mark is None else {"mark": mark}
    new = {
        "transform": transform,
        "num_classes": len(names),
        "class_names": () if is_unnamed else names,
        "tasks": (*tasks, TaskCounts(train=train, test=test, again=again)),
    }
    return ClientFile.model_validate({**dict(file), **new})


# --- a folder of what comes -----------------------------------------------------------------------


TAKEN, REFUSED = "taken", "refused"
UNFINISHED = (".part", ".tmp")
MAX_LOOKED_AT = 100
"""Of so many of the last sources that were taken it is seen whether they change."""
log = logging.getLogger(__name__)


class Incoming:
    """A folder in which what is complete becomes a task of one client.

    A file or folder is complete once it has come to rest (:mod:`fedcli.data.settled`); names that
    begin with a dot, or end with ``.part`` or ``.tmp``, are still being written. ``site.toml`` is
    the recipe of what comes. What became a task moves to ``taken/``, and a line says if it changes
    there later; what cannot become one moves to ``refused/``, and a text file beside it says why.

    Of a site that stays in one run after the other, each run takes what is there: nothing moves,
    and what changes is taken again.
    """

    def __init__(
        self,
        place: Path,
        root: Path,
        client: int,
        how: Callable[[], How | None],
        *,
        strict: bool = False,
        stays: bool = False,
    ) -> None:
        """Look at nothing yet; the folder is made where it is missing.

        ``how`` tells how a site's own files are cut, where that is known. With ``strict``, what
        ``fedcli check`` would have a word on is refused.
        """
        self._strict, self._stays = strict, stays
        self._known: dict[Path, Stamps] = {}
        """Of a site that stays: what was looked at, and what it was then."""
        self.place, self._root, self._client, self._how = place, root, client, how
        self._told = ""
        self._settled = Settled()
        self._taken: dict[Path, Stamps] = {}
        """What was taken last, and what it was then."""

    def take(self) -> list[Added]:
        """Make a task of each file or folder that is complete, in the order of their names.

        What is wrong for now, such as a full disk, is told once, and tried again the next time.
        """
        added = list[Added]()
        try:
            self._tell_changed()
            for source in self._complete():
                before = stamps_in(source)
                try:
                    how = self._how()
                    found = add_task(
                        self._root, self._client, source, *(how or ()), strict=self._strict
                    )
                except NothingNew as error:
                    log.info("client %s: %s", self._client, error)
                    self._move(source, before)
                    continue
                except StillWritten as error:
                    log.info("client %s: %s", self._client, error)
                    continue
                except RecipeError as error:  # somebody may be writing it
                    self._tell(str(error))
                    return added
                except (DataError, ConfigError) as error:
                    if stamps_in(source) != before:  # it was half of it that is wrong
                        continue
                    self._refuse(source, "\n".join([str(error), *error.lines]))
                    continue
                self._move(source, before)
                if not (self._stays and found.was_there):
                    log.info("client %s: %s has come: %s", self._client, source.name, found)
                for line in found.notes:
                    log.warning("note: %s: %s", source.name, line)
                added.append(found)
            self._told = ""
        except (ArchiveError, LinkError) as error:
            self._tell(str(error))
        except OSError as error:
            self._tell(f"{self.place}: {reason_of(error)}")
        return added

    def _complete(self) -> list[Path]:
        """Return what is complete, by name."""
        self.place.mkdir(parents=True, exist_ok=True)
        return self._settled.among(
            path for path in self.place.iterdir()
            if not is_foreign(path.name) and not path.name.endswith(UNFINISHED)
            and path.name not in (TAKEN, REFUSED, NAME)
            and not (path in self._known and stamps_in(path) == self._known[path])
        )  # fmt: skip

    def _refuse(self, source: Path, why: str) -> None:
        """Move away what cannot become a task, and say why."""
        log.error("client %s: %s is no task: %s", self._client, source.name, why)
        (self.place / REFUSED).mkdir(exist_ok=True)
        target = free_path(self.place / REFUSED / source.name)
        write_atomically(target.with_name(f"{target.name}.txt"), why + "\n")
        if self._stays:
            self._known[source] = stamps_in(source)
        else:
            source.rename(target)

    def _move(self, source: Path, was: Stamps) -> None:
        """Move away what was taken, and remember what it was then."""
        if self._stays:
            self._known[source] = was
            return
        (self.place / TAKEN).mkdir(exist_ok=True)
        target = free_path(self.place / TAKEN / source.name)
        source.rename(target)
        self._taken[target] = was
        for oldest in [*self._taken][:-MAX_LOOKED_AT]:
            del self._taken[oldest]

    def _tell_changed(self) -> None:
        """Say which of the sources that were taken have changed since, each once."""
        for path, was in [*self._taken.items()]:
            now = stamps_in(path)
            if now == was:
                continue
            del self._taken[path]
            if now:  # else somebody removed it
                log.error(
                    "client %s: %s has changed since it was taken, and its task has what it held "
                    "then: once it is written whole, put it into %s again",
                    self._client, path, self.place,
                )  # fmt: skip

    def _tell(self, line: str) -> None:
        """Log what is wrong for now, once."""
        if line != self._told:
            log.error("client %s: %s; it is tried again", self._client, line)
        self._told = line


def free_path(path: Path) -> Path:
    """Return a path that nothing has: this one, or one with a number behind its name."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
