"""What an accuracy has to be better than: guesses, and the most frequent class."""

from __future__ import annotations

from collections.abc import Sequence

from fedsrv.report.run_record import SeedGroup

MOST_FREQUENT = {"a_loc": "own", "a_loc_received": "own", "a_loc_trained": "own", "a_glo": "all"}
"""Metrics that are accuracies on clients' own test data: whose most frequent class is answered."""


def least_of(groups: Sequence[SeedGroup], name: str) -> float | None:
    """Return what a metric has to be better than in every group; None where it is not known."""
    found = [max(each) for group in groups if (each := _without_model(group, name))]
    return max(found, default=None)


def guesses_text(groups: Sequence[SeedGroup], name: str) -> str:
    """Return the two accuracies of a metric in words, in percent; empty where not known.

    Where groups have other data, each of the two goes from the least to the largest.
    """
    found = [each for group in groups if (each := _without_model(group, name))]
    if not found:
        return ""
    chance, frequent = (_span(values) for values in zip(*found, strict=True))
    return f"chance {chance}, most frequent class {frequent}"


def _without_model(group: SeedGroup, name: str) -> tuple[float, float] | None:
    """Return the accuracy of guesses and of the most frequent class, means over a group's runs."""
    key = MOST_FREQUENT.get(name)
    found = [run.guesses for run in group.runs]
    if key is None or not all("chance" in each and key in each for each in found):
        return None
    return (
        sum(each["chance"] for each in found) / len(found),
        sum(each[key] for each in found) / len(found),
    )


def _span(values: Sequence[float]) -> str:
    low, high = (f"{100 * value:.1f} %" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
