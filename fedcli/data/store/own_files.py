"""Whether a directory holds a site's own files, and what was cut of them before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcli.data.store.client_data import ABOUT, STORE, TABLE, has_grown
from fedmodels.config.data import Data
from fedmodels.facts.resolution import received_data

CUT_FILE = "cut.json"
"""File beside a directory that was cut of a client's own files: the run's ``[data]``, its seed, and
what stood in for the files then."""
How = tuple[Data, int]
"""How a site's files are cut: the run's ``[data]``, and its seed."""


def is_cut(data: Path) -> bool:
    """Tell whether a path holds clients' directories or a store, and no files as a site has them.

    A path that is not there or holds neither counts as such: whoever opens it says so.
    """
    if not data.is_dir():
        return not data.exists()
    known = (data / "client.json", data / TABLE, data / STORE, data / "global-test")
    if any(path.exists() for path in known) or any(data.glob("*/client.json")):
        return True
    from fedcli.data.folders import TABLE_ENDS, ending, files_below
    from fedcli.data.image_files import ENDS, is_image

    read = (*TABLE_ENDS, *ENDS, ".npy", ".arrow", ".zip")
    return not any(ending(path) in read or is_image(path) for path in files_below(data))


def cut_before(cache: Path, client: int, how: How | None = None) -> Path | None:
    """Return the directory above data of a client that were cut last, if any; grown ones first.

    ``how`` is ``[data]`` and seed by which they were cut; by default any.
    """
    places = [path.parent for path in cache.glob(f"[!.]*/{client}/{ABOUT}")]
    known = [place for place in places if how is None or remembered(place.parent) == how]
    last = max(known, key=lambda p: (has_grown(p), (p / ABOUT).stat().st_mtime_ns), default=None)
    return None if last is None else last.parent


def remembered(root: Path) -> How | None:
    """Return how the data below a root were cut, ``[data]`` and the run's seed, if that is known.

    Raises:
        ConfigError: the file that says it is malformed.
    """
    tables, seed, _ = _facts_in(root)
    return None if seed is None else (received_data(tables, str(root / CUT_FILE)), int(seed))


def files_of(root: Path) -> str:
    """Return the digest of the files of which the data below a root were cut; empty if unknown."""
    return str(_facts_in(root)[2])


def _facts_in(root: Path) -> tuple[Any, Any, Any]:
    """Return what the file beside cut data says: ``[data]``, the seed, and what the files were."""
    try:
        tables, seed, *rest = json.loads((root / CUT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError, TypeError):
        return None, None, ""
    return tables, seed, rest[0] if len(rest) == 1 else ""


def how_of(tables: Mapping[str, Any], seed: int) -> How:
    """Return ``[data]`` and seed of a run, as its server says them.

    Raises:
        ConfigError: the table ``[data]`` is malformed.
    """
    return received_data(tables, "the server's [data]"), seed
