"""The values that an upload's weights may hold."""

import pytest
import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.announced import check_numbers
from fedmodels.tensors.bundle import Bundle, GeneratorState
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout
from fedmodels.tensors.weighted_mean import MOST_COUNTED, RunningMean, mean_of_sums, weighted_mean


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
def test_weights_within_their_bounds(form: type, facts: dict[str, float], line: str) -> None:
    upload = Bundle(form(normalised(**facts)))  # type: ignore[arg-type]
    if line:
        with pytest.raises(PayloadError, match=line):
            check_numbers(upload)
    else:
        check_numbers(upload)


def test_a_generators_variance() -> None:
    generator = GeneratorState(1, {"bn.running_var": torch.tensor([-1.0])})
    with pytest.raises(PayloadError, match=r"generators/3/tensors/bn\.running_var. holds -1; it"):
        check_numbers(Bundle(generators={"3": generator}))


def test_clients_can_count_on_from_what_one_of_them_said() -> None:
    """One says that it saw as many batches as it may; the others count on from there."""
    liar, honest = packed(normalised(counted=MOST_COUNTED)), packed(normalised())
    running = RunningMean()
    running.add([liar, honest], [1.0, 1.0])
    sums = running.sums()
    assert sums is not None
    dtypes = {name: tensor.dtype for name, tensor in honest.items()}
    for mean in (
        weighted_mean([liar, honest], [1.0, 1.0], 2.0),
        weighted_mean([normalised(counted=MOST_COUNTED), normalised()], [1.0, 1.0], 2.0),
        running.mean(),
        mean_of_sums([sums], 2.0, dtypes),
    ):
        assert mean is not None
        counted = int(mean["base/bn.num_batches_tracked"])
        assert counted == MOST_COUNTED // 2
        check_numbers(Bundle(normalised(counted=counted + 10**9)))
