import pytest
import torch

from fedmodels.tensors.packed_weights import flatten, unflatten

SHAPES = ((3, 2, 2, 2), (), (0, 4), (5,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_joined_and_separated_again(dtype):
    tensors = [torch.arange(max(torch.Size(s).numel(), 0)).reshape(s).to(dtype) for s in SHAPES]
    vector = flatten(tensors)
    assert vector.shape == (30,)
    for tensor, again in zip(tensors, unflatten(vector, tensors), strict=True):
        assert again.shape == tensor.shape
        assert torch.equal(again, tensor)


def test_elements_come_in_the_order_of_the_shape():
    plain = torch.arange(24.0).reshape(2, 3, 2, 2)
    odd = plain.to(memory_format=torch.channels_last)
    assert torch.equal(flatten([odd, odd]), torch.cat([plain.reshape(-1)] * 2))


def test_what_is_joined_is_a_copy():
    weight = torch.nn.Parameter(torch.zeros(4))
    vector = flatten([weight])
    vector += 1
    assert not vector.requires_grad
    assert torch.equal(weight, torch.zeros(4))
