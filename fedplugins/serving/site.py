"""What a server of models does beside answering: watches served inputs, and takes labels back.

Labels that came become the client's next task: a folder of arrays is added as ``fedcli add-task``
adds one, and the client that joined announces it. A batch is gathered on the disk before it is
added, and adding the same content again adds nothing: so whatever is killed, each row is in one
task. Labels that come faster than tasks may follow each other wait, and become one larger task.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.cuts.held_out import last_groups
from fedcli.data.own.new_inputs import NewInputs
from fedcli.data.store.client_data import ClientData, save_arrays
from fedcli.data.store.growing import Added, add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.own_files import remembered
from fedcli.predicting.live_model import Loaded
from fedcli.predicting.prediction import Predictions
from fedmodels.config.transforms import TableTransform, channels_in, parse_transform
from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ConfigError, DataError, FedtideError, reason_of
from fedmodels.facts.class_names import near
from fedmodels.facts.data_description import MAX_WHY
from fedmodels.host.files import sync_path, write_atomically
from fedmodels.host.guarded import Guarded
from fedmodels.problems.targets import targets_in
from fedplugins.serving.label_store import Asked, Batch, LabelStore
from fedplugins.serving.served_inputs import InputWatch

RATE = 6000
"""Rows with labels that are taken in a minute, and at once."""
AT_ALARM = 10
"""Rows with labels that make a task once an alarm of drift is on, if no fewer make one."""
MAX_LETTERS, FOLDER = 60, "feedback-"
LAST = "gathered"
"""The fact at which time labels were gathered last."""
OWED = "drifted"
"""The fact that an alarm was told which no task has followed: what moved, in words."""
log = logging.getLogger(__name__)
Array = NDArray[Any]


class TooFast(DataError):
    """More rows come than are taken in a minute."""


class Site:
    """The client's data beside one served model."""

    _left: Guarded[float] = Guarded("_counting")
    _filled: Guarded[float] = Guarded("_counting")

    def __init__(self, root: Path, client: int, rows: int | None, every_s: float = 0.0) -> None:
        """Open a client's data below a root; so many ``rows`` with labels make a task.

        Between two tasks there are ``every_s`` seconds at least, whatever callers send. Without
        ``rows`` inputs are watched, no label is taken, and nothing is written.

        Raises:
            DataError: the data are missing or damaged.
        """
        self._root, self._client, self._rows, self._every_s = root, client, rows, every_s
        self._data = open_data(root, client)
        self._targets = targets_in(self._data.file.transform, self._data.directory)
        self.store: LabelStore | None = None
        if rows is not None:
            self.store = LabelStore(self._data.directory, self._data.file.input_shape)
        self.watch = InputWatch(self._data, self.store)
        self._pool = ThreadPoolExecutor(1, "site")
        self._is_testing, self._counting = threading.Lock(), threading.RLock()
        self._left, self._filled = float(RATE), time.monotonic()
        self._told = ""
        self._timer: threading.Timer | None = None
        """What looks again once the next task may be made; the pool's thread sets it."""
        self.rows = Counter[str]()
        """Rows with labels that came, by what became of them."""
        self._later(self._make_tasks)

    # --- inputs -----------------------------------------------------------------------------------

    def answered(self, now: Loaded, found: Predictions) -> str:
        """Take in what was asked; return the id by which labels may come back, empty for none."""
        x = found.inputs.x
        if line := self._strange(now):
            self._say(f"served inputs are neither monitored nor kept: {line}")
            return ""
        if (window := self.watch.see(x)) is not None and self._is_testing.acquire(blocking=False):
            self._later(self._test, window, now)
        if self.store is None:
            return ""
        request = secrets.token_hex(16)
        try:
            self.store.ask(request, Asked(x, *places_of(found.inputs)))
        except FedtideError as error:
            self._say(f"no delayed labels are accepted: {error}")
            return ""
        return request

    def _strange(self, now: Loaded) -> str:
        """Return why a model's inputs are none of the client's; empty text where they are."""
        facts, file = now.model.facts, self._data.file
        if (takes := tuple(facts.input_shape)) != (has := tuple(file.input_shape)):
            return f"the model takes {[*takes]}, and the client's data have {[*has]}"
        columns, own = channels_in(facts.transform), channels_in(file.transform)
        if columns and own and columns != own:
            return "the model takes other columns than the client's data have"
        named = [t and (t.names, type(t)) for t in (now.model.targets, self._targets)]
        return "" if named[0] == named[1] else "the model learns something else than the client"

    def _test(self, window: list[Array], now: Loaded) -> None:
        try:
            if line := self.watch.test(window, now):
                log.warning(
                    "client %s: the inputs that its model is asked moved from its data: %s "
                    "(docs/serving.md)", self._client, line,
                )  # fmt: skip
                if self.store is not None:
                    self.store.keep({OWED: line[:MAX_WHY]})
                    self._make_tasks()
        except FedtideError as error:
            self._say(str(error))
        finally:
            self._is_testing.release()

    def _later(self, work: Callable[..., None], *given: Any) -> None:
        """Do work in the one thread beside answers."""

        def done() -> None:
            try:
                work(*given)
            except Exception:  # answers go on
                log.exception("a background task of the service failed")

        self._pool.submit(done)

    # --- labels -----------------------------------------------------------------------------------

    def label(
        self,
        origin: str,
        places: Sequence[int],
        x: Array,
        names: Sequence[str | None],
        now: Loaded,
    ) -> dict[str, Any]:
        """Take rows (n, *input_shape) with their classes, None for no label; return what became.

        Where targets are learned, the JSON of a row's numbers stands in place of its class.

        Rows are named by their ``origin`` and their places there (n,).

        Raises:
            DataError: the model is for other data, a class is none of the client's and of the
                model's, a row is none that the client may have, or more come than are taken.
        """
        assert self.store is not None, "the server takes labels back"
        if line := self._strange(now):
            raise DataError(line)
        self._data.refresh()
        known = [*dict.fromkeys([*self._data.file.classes, *now.model.class_names])]
        for name in names:
            if name is not None and name not in known and self._targets is None:
                line = f"{printable(name, MAX_LETTERS)!r} is no class of the model"
                other = near(name, known)
                raise DataError(f"{line}: write {other!r}" if other is not None else line)
        labelled = [row for row, name in enumerate(names) if name is not None]
        kept = self._of_kind(x[labelled])
        self._spend(len(labelled))
        classes = [name for name in names if name is not None]
        told = self.store.label(origin, [places[row] for row in labelled], kept, classes)
        with self._counting:
            self.rows.update(told)
        self._later(self._make_tasks)
        found = {what: told[what] for what in ("taken", "known", "corrected", "late")}
        return {**found, "waiting": self.store.waiting, "task_at": self._rows}

    def _of_kind(self, x: Array) -> Array:
        """Return rows in the type of the client's data; DataError where that would change them."""
        kind = self._data.kind() or np.dtype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            kept = x.astype(kind)
        if (kind.kind == "f" and np.isfinite(kept).all()) or np.array_equal(kept, x):
            return kept
        raise DataError(f"the client's inputs are {kind}, and these are not such numbers")

    def _spend(self, rows: int) -> None:
        """Raise TooFast if more rows come than are taken in a minute."""
        if rows > RATE:
            raise DataError(f"more than {RATE} labels are sent: send them in parts")
        with self._counting:
            now = time.monotonic()
            self._left = min(RATE, self._left + (now - self._filled) * RATE / 60)
            self._filled = now
            if rows > self._left:
                raise TooFast(f"more than {RATE} labels a minute are not taken: come again later")
            self._left -= rows

    # --- tasks ------------------------------------------------------------------------------------

    def _make_tasks(self) -> None:
        """Make a task of the rows that wait, if they are enough, and of what a crash left."""
        store = self.store
        if store is None or self._rows is None:
            return
        try:
            owed = store.kept(OWED, "", str)
            if store.waiting >= (min(self._rows, AT_ALARM) if owed else self._rows):
                if (wait := self._early_s()) > 0:
                    self._look_again(wait)
                else:
                    folders = self._data.directory.glob(f"{FOLDER}*")
                    taken = [int(n) for f in folders if (n := f.name[len(FOLDER) :]).isdecimal()]
                    store.gather(taken, {LAST: time.time()})
            for batch in store.batches(self._data.kind() or np.dtype(np.float32)):
                owed = "" if self._add(batch, owed) else owed
                store.done(batch.number, {OWED: owed})
            self._told = ""
        except (ArchiveError, OSError) as error:  # a full disk, say: tried again with the next rows
            self._say(reason_of(error) if isinstance(error, OSError) else str(error))

    def _early_s(self) -> float:
        """Return for how many seconds the next task may not be made yet."""
        assert self.store is not None
        since = time.time() - self.store.kept(LAST, -self._every_s, float)
        return self._every_s - since if since >= 0 else 0.0  # the clock was set back

    def _look_again(self, seconds: float) -> None:
        """Make tasks later, unless that is to be done already."""
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(seconds, self._due)
            self._timer.daemon = True
            self._timer.start()

    def _due(self) -> None:
        def look() -> None:
            self._timer = None  # clocks differ: it may be early still, and be looked at again
            self._make_tasks()

        with suppress(RuntimeError):  # the server has ended
            self._later(look)

    def _add(self, batch: Batch, drifted: str) -> bool:
        """Add a batch to the client's data, and tell whether it is a task.

        One that cannot be a task stays in a folder beside.
        """
        folder = self._data.directory / f"{FOLDER}{batch.number}"
        self._write(folder, batch)
        try:
            how = remembered(self._root)
            added = add_task(self._root, self._client, folder, *(how or ()), drifted=drifted)
        except (DataError, ConfigError) as error:
            write_atomically(folder / "why.txt", f"{error}\n", sync=True)
            log.error(
                "client %s: received labels do not make a task: %s; they stay in %s",
                self._client, error, folder,
            )  # fmt: skip
            return False
        self._tell(added)
        shutil.rmtree(folder)
        return True

    def _tell(self, added: Added) -> None:
        log.info("client %s: of labels that came: %s", self._client, added)
        for line in added.notes:
            log.warning("note: %s", line)

    def _write(self, folder: Path, batch: Batch) -> None:
        """Write a batch as arrays; the same ones after a crash."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        names = sorted({*batch.classes})
        labels = np.array([names.index(name) for name in batch.classes], dtype=np.int64)
        if self._targets is not None:
            labels = np.array([json.loads(numbers) for numbers in batch.classes])
            names = [*self._data.file.classes]
        arrays = {"train_x": batch.x, "train_y": labels}
        if (share := overlapping_share(self._data)) is not None:
            test = last_groups(np.zeros(len(labels), np.int64), np.array(batch.calls), share)
            parts = (("train", ~test), ("test", test))
            arrays = {
                f"{n}_{v}": of[k] for n, k in parts for v, of in (("x", batch.x), ("y", labels))
            }
        save_arrays(folder, arrays)
        write_atomically(folder / "dataset.json", json.dumps({"class_names": names}), sync=True)
        sync_path(folder.parent)

    def _say(self, line: str) -> None:
        """Log what is wrong for now, once."""
        if line != self._told:
            log.error("client %s: %s", self._client, line)
            self._told = line

    def end(self) -> None:
        """End what goes on beside answers, and let another process have the file."""
        self._pool.shutdown()
        if (timer := self._timer) is not None:  # the pool's thread may forget it meanwhile
            timer.cancel()
        if self.store is not None:
            self.store.close()


def overlapping_share(data: ClientData) -> float | None:
    """Return the part that is for testing of windows that overlap; None where rows stand alone.

    Windows of one call have one part: an example for testing shares no rows with one of training.
    """
    how = parse_transform(data.file.transform, data.directory)
    columns = how.columns if isinstance(how, TableTransform) else None
    if (
        columns is None
        or columns.window is None
        or (columns.hop or columns.window) >= columns.window
    ):
        return None
    return columns.test_share


def places_of(inputs: NewInputs) -> tuple[list[int], int]:
    """Return which prediction of an answer each input has, and how many predictions it has.

    A row that makes no input has one, too, without a class.
    """
    count, left = len(inputs.x), inputs.left
    if not left:
        return [*range(count)], count
    firsts = [first for first, _ in inputs.places]
    order = sorted([*firsts, *(place for place, _, _ in left)])
    return [order.index(first) for first in firsts], len(order)
