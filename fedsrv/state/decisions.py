"""What was decided of a run, in ``run.db``: stored before whoever asked is answered.

Each kind of decision names its facts here. A run reads all of them before a round is due, also
after a crash: what was decided once holds until the run has done it, and is never decided twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fedmodels.errors import RunFailed
from fedsrv.state.ledger import Ledger
from fedsrv.state.run_directory import lock

EXCLUDE, RETIRE, CLOSE = "exclude", "retire", "close"
"""A ``client`` takes no part any more; it leaves an open run for good, and the run ``forgets`` what
it keeps of it alone; an open run ends, ``now`` or once all is learned."""
SET_ASIDE, CLASSES = "set aside", "classes"
"""A ``task`` of a ``client`` is neither trained nor scored; the class ``old`` is called ``now``, as
the change of this ``number``."""
FAILED = "failed round"
"""An ``interaction`` came to no commit, since ``reasons`` by client: the run had this many
``growths``."""
FILES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "excluded.json": (EXCLUDE, ("client",)),
    "set-aside.json": (SET_ASIDE, ("client", "task")),
    "classes.json": (CLASSES, ("number", "old", "now")),
}
"""Where the version before kept decisions: a row each, with these facts."""


def of_the_version_before(run: Path) -> Iterator[tuple[Path, str, list[dict[str, Any]]]]:
    """Yield each file of decisions that is left, their kind, and their facts.

    Raises:
        RunFailed: one is damaged.
    """
    for name, (what, keys) in FILES.items():
        if not (file := run / name).exists():
            continue
        try:
            rows = [
                row if isinstance(row, list) else [row]
                for row in json.loads(file.read_text("utf-8"))
            ]
            yield file, what, [_facts(keys, row) for row in rows]
        except (OSError, ValueError, TypeError) as error:
            raise RunFailed(
                f"{file} holds what was decided of the run, and cannot be read ({error}); delete "
                "it, and say it again"
            ) from None


def _facts(keys: Iterable[str], row: list[Any]) -> dict[str, Any]:
    kinds = {"old": str, "now": str}
    return {key: kinds.get(key, int)(value) for key, value in zip(keys, row, strict=True)}


def decide(run: Path, what: str, *facts: Mapping[str, Any]) -> None:
    """Store decisions of a run that nobody works on.

    Raises:
        RunFailed: somebody does.
        ArchiveError: its database is damaged.
    """
    held = lock(run)
    try:
        with closing(Ledger(run / "run.db", strict=True, new=False)) as ledger:
            ledger.decide(what, *facts)
    finally:
        os.close(held)
