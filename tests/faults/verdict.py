"""Compares a run that was struck with the one that nothing happened to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmodels.tensors.archive import PERSONAL
from fedsrv.state.verification import verified
from tests.faults.playing import Played
from tests.faults.processes import Site

MEASURED = {"seconds", "peak_rss_bytes", "wire_down", "wire_up"}
"""What a record says that no two runs have in common."""


SHOWN, LETTERS, ABSENT = 12, 160, "nothing"
"""Lines of a record that differs, letters of a value in them, and a key's value where it is not."""


def troubles(played: Played, undisturbed: Played) -> list[str]:
    """Return what is not as it would have been; nothing where the promise holds.

    Args:
        played: the run that was struck.
        undisturbed: the run that nothing happened to.
    """
    found = [*played.troubles, *_promises(played), *_tracebacks(played)]
    if not played.troubles:
        found += verified(played.site.out).wrong
        one, other = (outcome(each.site) for each in (played, undisturbed))
        for key in other:
            if one[key] != other[key]:
                lines = [*_differences(one[key], other[key], key)]
                found += lines[:SHOWN]
                found += [f"{key}: {len(lines) - SHOWN} more differ"] if lines[SHOWN:] else []
    return found


def troubles_of_the_living(played: Played, interactions: int) -> list[str]:
    """Return what went wrong in a run from which clients were gone for good; the others end it."""
    found = [*played.troubles, *_promises(played), *_tracebacks(played)]
    if played.troubles:
        return found
    found += verified(played.site.out).wrong
    came_to = outcome(played.site)
    gone = [played.site.clients[role] for role in played.plan.gone]
    if came_to["clients_missing"] != gone:
        found.append(f"missing are {came_to['clients_missing']}, gone is {gone}")
    if len(came_to["records"]) != interactions:
        found.append(f"{len(came_to['records'])} interactions instead of {interactions}")
    return found


def outcome(site: Site) -> dict[str, Any]:
    """Return everything of a run's directories that a crash must not change."""
    out = site.out
    summary = json.loads((out / "summary.json").read_text())
    models = sorted(site.states.glob(f"*/{PERSONAL}"))
    return {
        "state_sha256": summary["state_sha256"],
        "metrics": summary["metrics"],
        "clients_missing": summary.get("clients_missing", []),
        "records": [_lasting(json.loads(line)) for line in _lines(out / "rounds.jsonl")],
        "models": {path.parent.name: _sha256(path) for path in models},
    }


def _lasting(value: Any) -> Any:
    """Return a record without what is measured."""
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in MEASURED}
    return value


def _promises(played: Played) -> Iterator[str]:
    """Yield each commit that was taken back: a kill takes none, a loss of power none that is safe.

    The watermark says what is safe; nothing older than it may be asked for again.
    """
    committed = watermark = -1
    has_power = True
    for fact in played.trace():
        committed = max(committed, fact.get("committed", -1))
        watermark = max(watermark, fact.get("watermark", -1))
        has_power = has_power and "power" not in fact
        least = committed if has_power else watermark
        if fact.get("position", least) < least:
            what = "committed" if has_power else "called safe"
            yield f"went back to interaction {fact['position']}, {least} was {what}"


def _tracebacks(played: Played) -> Iterator[str]:
    logs = [*(played.site.out.parent / "logs").glob("*.log"), *played.site.out.glob("logs/*.log")]
    for log in sorted(logs):
        if "Traceback" in log.read_text(errors="replace"):
            yield f"a traceback in {log.name}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Yield a line of each place at which two records differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            pair = one.get(key, ABSENT), other.get(key, ABSENT)
            yield from _differences(*pair, f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(*pair, f"{where}[{place}]")
    elif one != other:
        yield f"{where}: {_shown(one)} instead of {_shown(other)}"


def _shown(value: Any) -> str:
    said = json.dumps(value, sort_keys=True)
    return said if len(said) <= LETTERS else f"{said[:LETTERS]}… ({len(said)} letters)"
