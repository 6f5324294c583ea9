"""Least squares over many sums: what it finds of each client, by form of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.attacks import sums

Row = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def row() -> Row:
    """Return what finds the row of a form, of one seed and 20 rounds."""
    found = sums.attacked(20)
    return lambda name: next(row for row in found if row["what"] == name)


def test_honest_sums_over_drawn_clients_tell_the_mean_upload_of_each(row: Row) -> None:
    drawn = row("drawn, 6 of 10")
    assert drawn["cosine"] > 0.8
    assert drawn["apart"] == 10
    assert row("drop-outs of 5 %")["cosine"] > 0.6


def test_fixed_groups_tell_no_client_from_another(row: Row) -> None:
    fixed = row("fixed groups of 5")
    assert fixed["cosine"] < 0.35
    assert fixed["apart"] <= 2, "as many as groups, by their order"


def test_noise_of_clients_hides_a_mean_upload(row: Row) -> None:
    loud, quiet = (row(f"drawn, noise of clients × {noise}")["cosine"] for noise in (1, 0.3))
    assert loud < quiet < 0.4


def test_fixed_groups_do_not_hide_what_changes_in_one_client_alone(row: Row) -> None:
    """So open runs have none; and tasks of other sizes are sums with other weights."""
    assert row("fixed group, new tasks")["cosine"] > 0.9
    assert row("fixed groups of 5, tasks of other sizes")["cosine"] > 0.7


@pytest.mark.parametrize(("size", "share"), [(4, 0.0776), (8, 0.1492)])
def test_a_group_loses_rounds_by_its_size(size, share):
    lost = sums.lost_rounds(size)["lost"]
    assert lost == pytest.approx(100 * share, abs=0.5)
    assert share == pytest.approx(1 - 0.98**size, abs=1e-4)


def test_without_noise_as_many_sums_as_unknowns_are_solved_exactly():
    rng = np.random.default_rng(0)
    uploads = rng.normal(size=(sums.CLIENTS, 3))
    sets = [rng.integers(0, 2, sums.CLIENTS).astype(float) for _ in range(40)]
    found = sums.least_squares([sums.Sum(one, one @ uploads) for one in sets])
    assert np.allclose(found, uploads)
