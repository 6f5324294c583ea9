"""The values that an upload's weights may hold."""

import pytest
import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Prototypes
from fedmodels.tensors.declared_counts import (
    check_classes,
    check_examples,
    check_histogram,
    check_numbers,
)
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout
from fedmodels.tensors.weighted_mean import MAX_INTEGER, RunningMean, weighted_mean


def normalised(variance: float = 1.0, counted: int = 7, weight: float = 0.5) -> dict[str, Tensor]:
    """Return a layer with batch normalisation."""
    return {
        "base/bn.weight": torch.tensor([weight, 1.0]),
        "base/bn.running_var": torch.tensor([2.0, variance]),
        "base/bn.num_batches_tracked": torch.tensor(counted),
    }


def packed(tensors: dict[str, Tensor]) -> PackedWeights:
    """Return tensors in one block, as they arrive."""
    names, layout = names_and_layout(tensors)
    block = layout.empty()
    for name, place in zip(names, layout.views(block), strict=True):
        place.copy_(tensors[name])
    return PackedWeights(names, layout, layout.clear(block))


@pytest.mark.parametrize("form", [dict, packed], ids=["single", "in one block"])
@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"variance": -1e-6}, "running_var' holds -1e-06; it cannot be below zero"),
        ({"variance": -1e15}, "running_var' holds -1e[+]15; it cannot be below zero"),
        ({"counted": -1}, "num_batches_tracked' holds -1; it cannot be below zero"),
        ({"counted": 10**12 + 1}, "num_batches_tracked' holds 1e[+]12, beyond 1e[+]12"),
        ({"weight": -1.1e6}, "weight' holds -1.1e[+]06, beyond 1e[+]06"),
        ({}, ""),
        ({"variance": 0.0, "counted": 10**12, "weight": -1e6}, ""),
        ({"variance": 1e15}, ""),
    ],
)
def test_weights_within_their_bounds(form, facts, line):
    upload = Bundle(form(normalised(**facts)))  # type: ignore[arg-type]
    if line:
        with pytest.raises(PayloadError, match=line):
            check_numbers(upload)
    else:
        check_numbers(upload)


@pytest.mark.parametrize("form", [dict, packed], ids=["single", "in one block"])
def test_an_integer_of_any_name_has_a_limit(form):
    """The bytes of 2**40 pass for two small floats."""
    weights = {"base/w": torch.ones(2), "base/seen": torch.tensor(MAX_INTEGER)}
    check_numbers(Bundle(form(weights)))
    weights["base/seen"] = torch.tensor(2**40)
    with pytest.raises(
        PayloadError, match=r"weights/base/seen' holds 1\.09951e[+]12, beyond 1e[+]12"
    ):
        check_numbers(Bundle(form(weights)))


@pytest.mark.parametrize("count", [-1.0, 2.5, 6.0, float("inf")])
def test_examples_are_counted_whole_and_within_what_was_announced(count):
    for fits in (0.0, 5.0):
        check_examples(fits, 5, "it")
    with pytest.raises(PayloadError, match=f"it is {count:g}; at most 5 examples were announced"):
        check_examples(count, 5, "it")


@pytest.mark.parametrize(
    ("labels", "counts", "line"),
    [
        ([0, 2], [2, 1], ""),
        ([0, 0], [1, 1], "labels' names class 0 twice"),
        ([0, 3], [1, 1], "labels' names class 3 of 3"),
        ([2, 0], [3, 0], "counts' says 0 examples of class 0; 2 were announced"),
        ([2, 0], [4, 1], "counts' says 4 examples of class 2; 3 were announced"),
    ],
)
def test_classes_come_once_with_counts_that_were_announced(labels, counts, line):
    rows = Prototypes(torch.zeros(2, 4), torch.tensor(labels), torch.tensor(counts))
    now = torch.tensor([2, 0, 3])
    if line:
        with pytest.raises(PayloadError, match=line):
            check_classes("class", rows, now)
    else:
        check_classes("class", rows, now)


@pytest.mark.parametrize(("part", "counted"), [("round", -1), ("round", 3), ("total", 5)])
def test_a_histogram_counts_no_more_than_was_announced(part, counted):
    now, total = torch.tensor([2, 3]), torch.tensor([4, 3])
    said = {"round": now.clone(), "total": total.clone()}
    check_histogram(Histogram(**said), now, total)
    said[part][0] = counted
    with pytest.raises(PayloadError, match=f"histogram/{part}' counts {counted} of class 0"):
        check_histogram(Histogram(**said), now, total)


def test_a_generators_variance():
    generator = GeneratorState(1, {"bn.running_var": torch.tensor([-1.0])})
    with pytest.raises(PayloadError, match=r"generators/3/tensors/bn\.running_var. holds -1; it"):
        check_numbers(Bundle(generators={"3": generator}))


@pytest.mark.needs("relays")
def test_clients_can_count_on_from_what_one_of_them_said():
    """One says that it saw as many batches as it may; the others count on from there."""
    from fedplugins.relays.grouped_intake import mean_of_sums

    liar, honest = packed(normalised(counted=MAX_INTEGER)), packed(normalised())
    running = RunningMean()
    running.add([liar, honest], [1.0, 1.0])
    sums = running.sums()
    assert sums is not None
    dtypes = {name: tensor.dtype for name, tensor in honest.items()}
    for mean in (
        weighted_mean([liar, honest], [1.0, 1.0], 2.0),
        weighted_mean([normalised(counted=MAX_INTEGER), normalised()], [1.0, 1.0], 2.0),
        running.mean(),
        mean_of_sums([sums], 2.0, dtypes),
    ):
        assert mean is not None
        counted = int(mean["base/bn.num_batches_tracked"])
        assert counted == MAX_INTEGER // 2
        check_numbers(Bundle(normalised(counted=counted + 10**9)))
