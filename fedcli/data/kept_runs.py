"""What a site that stays keeps of the runs that it took part in: the last ones, and no more.

A server names its runs itself. So nobody but the site bounds how many directories of states, with
a copy of its data in each, lie on its disk.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from fedmodels.host.files import write_atomically

INDEX = "runs.json"
"""File of a site's directory of states: when each run that it holds was joined last."""
KEPT = 20
"""Runs whose states a site keeps. One that is joined after more than so many others begins anew."""
GROWN = "own-data/*/*/task-*/source.json"
"""What a run's directory has where tasks were added there: rows that may be nowhere else."""
log = logging.getLogger(__name__)


def make_room(
    states: Path,
    run: str,
    now: Callable[[], float] = time.time,
    under_way: Collection[str] = (),
    incoming: Path | None = None,
) -> None:
    """Note that a run is joined, and remove the states of those that were joined long ago.

    A directory that the site did not begin itself stays, and one to which tasks were added.

    Args:
        states: where each run has a directory.
        run: the one that is joined now.
        now: the time, in seconds.
        under_way: runs in which the site takes part meanwhile; theirs stay.
        incoming: the folder whose files every run takes, and from which they do not go.
    """
    known = _joined(states)
    known.pop(run, None)
    last = list(known)[-(KEPT - 1) :]
    kept = [one for one in known if one in last or one in under_way]
    for old in (one for one in known if one not in kept):
        if not all(_lies_in(incoming, of) for of in (states / old).glob(GROWN)):
            log.warning("run %s: its data in %s have grown, and are kept", old, states / old)
            continue
        shutil.rmtree(states / old, ignore_errors=True)
        log.info("run %s: its states are removed: %d other runs were joined since", old, KEPT)
    states.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {**{one: known[one] for one in kept}, run: now()}
    write_atomically(states / INDEX, json.dumps(found, indent=1) + "\n", private=True)


def _lies_in(incoming: Path | None, source: Path) -> bool:
    """Tell whether what a task was made of lies in a folder still, as its ``source.json`` says."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        name = str(json.loads(source.read_text("utf-8"))["name"])
        return incoming is not None and bool(name) and (incoming / Path(name).name).exists()
    return False


def last_run(states: Path) -> Path:
    """Return the directory of the run that a site which stays has joined last.

    It is the given one where no site stays, or has joined a run yet.
    """
    return states / next(reversed(_joined(states)), "")


def _joined(states: Path) -> dict[str, float]:
    """Return when runs were joined, in this order; nothing where that is not known."""
    try:
        found = json.loads((states / INDEX).read_text("utf-8"))
        times = {str(run): float(when) for run, when in dict(found).items()}
    except (OSError, ValueError, TypeError):
        return {}
    plain = {run: when for run, when in times.items() if run.replace("-", "").isalnum()}
    return dict(sorted(plain.items(), key=lambda item: item[1]))
