"""The server half of a method in rounds that another system runs."""

import math
from pathlib import Path

import pytest
import torch

import fedtide

CONFIG = {"net": {"name": "mlp", "hidden": [4]}, "method": {"name": "fedavg"}}
EXTEND = Path(__file__).parents[2] / "examples" / "extend"


def half_of(**tables):
    return fedtide.ServerHalf({**CONFIG, **tables}, (1, 2, 2), 3)


def moved(half, by):
    return {name: tensor + by for name, tensor in half.weights.items()}


def is_moved(before, after, by):
    return all(torch.allclose(after[name] - before[name], torch.tensor(by)) for name in before)


def test_a_mean_counts_examples_as_fedavg_does():
    """(5 · 1 + 2 · 3) / 7."""
    half = half_of()
    before = half.weights
    assert half.reduce({9: (moved(half, 3.0), 2), 4: (moved(half, 1.0), 5)}) == {}
    assert is_moved(before, half.weights, 11 / 7)
    assert half.rounds == 1


def test_a_server_half_remembers_from_round_to_round():
    """FedAvgM, beta = 0.5: v = -1, w + 1; then v = -1 - 0.5, w + 1 + 1.5."""
    half = half_of(method={"name": f"{EXTEND / 'fedavgm.py'}:FedAvgM", "beta": 0.5})
    before = half.weights
    for _ in range(2):
        half.reduce({0: (moved(half, 1.0), 1)})
    assert is_moved(before, half.weights, 2.5)


def test_a_method_may_read_single_uploads():
    half = half_of(method={"name": f"{EXTEND / 'median.py'}:Median"})
    before = half.weights
    half.reduce({client: (moved(half, by), 1) for client, by in enumerate((0.0, 1.0, 90.0))})
    assert is_moved(before, half.weights, 1.0)


def test_what_a_method_keeps_private_is_not_among_the_weights():
    half = half_of(method={"name": "fedper"})
    before = half.weights
    assert before
    assert not any(name.startswith("head") for name in before)
    half.reduce({0: ({**moved(half, 1.0), "head.weight": torch.zeros(3, 4)}, 1)})
    assert is_moved(before, half.weights, 1.0)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"method": {"name": "fedproto"}}, "'fedproto' is more than a mean of the net's weights"),
        ({"method": {"name": "local"}}, "'local' is more than a mean"),
        ({"method": {"name": "scaffold"}}, "'scaffold' is more than a mean"),
        ({"method": {"name": "feddyn"}}, "'feddyn' is more than a mean"),
        ({"method": {"name": "mfcl"}}, "'mfcl' is more than a mean"),
        ({"method": {"name": "target"}}, "'target' is more than a mean"),
        ({"server": {"reduce": "median"}}, "reduce needs a coordinator"),
        ({"compression": {"up": "int8"}}, "up needs a coordinator, not a server half alone"),
    ],
)
def test_what_needs_a_coordinator_is_refused(tables, line):
    with pytest.raises(fedtide.FedtideError, match=line):
        half_of(**tables)


@pytest.mark.parametrize(
    ("spoilt", "count", "line"),
    [
        (lambda t: t[:1], 1, "client 7: .*expected float32"),
        (lambda t: t * math.nan, 1, "client 7: .* holds NaN"),
        (lambda t: t, -1, "client 7: num_examples is -1"),
        (lambda t: t, "many", "client 7: num_examples is 'many', and no whole number"),
        (lambda t: t.numpy(), 1, "client 7: 'base.1.weight' is no tensor"),
        (None, 1, "client 7: .* is missing"),
    ],
)
def test_an_upload_that_is_no_good_changes_nothing(spoilt, count, line):
    half = half_of()
    before, sent = half.weights, moved(half, 1.0)
    name = next(iter(sent))
    upload = {k: t for k, t in sent.items() if k != name}
    if spoilt is not None:
        upload[name] = spoilt(sent[name])
    with pytest.raises(fedtide.FedtideError, match=line):
        half.reduce({3: (sent, 1), 7: (upload, count)})
    assert is_moved(before, half.weights, 0.0)
    assert half.rounds == 0
