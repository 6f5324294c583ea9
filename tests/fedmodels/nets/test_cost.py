"""Multiply-adds against counts by hand."""

from fedmodels.nets import make_net
from fedmodels.nets.cost import multiply_adds


def test_an_mlp_costs_its_weights():
    net = make_net("mlp", num_classes=10, input_shape=(1, 8, 8), hidden=[16])
    assert multiply_adds(net, (1, 8, 8)) == 64 * 16 + 16 * 10


def test_a_convolution_costs_its_kernel_at_every_place():
    net = make_net("resnet20", num_classes=10, input_shape=(3, 32, 32))
    stem = 32 * 32 * 16 * 3 * 9
    first = 6 * 32 * 32 * 16 * 16 * 9
    second = 16 * 16 * (32 * 16 * 9 + 5 * 32 * 32 * 9)
    third = 8 * 8 * (64 * 32 * 9 + 5 * 64 * 64 * 9)
    assert multiply_adds(net, (3, 32, 32)) == stem + first + second + third + 64 * 10
