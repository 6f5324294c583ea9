"""Several nets run as one of groups: each comes to what it comes to alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedmodels.nets import make_net
from fedmodels.nets.grouped import Grouped, can_be_grouped
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded

NETS = {
    "digits-cnn": ("digits-cnn", (1, 8, 8), {}),
    "three colours": ("digits-cnn", (3, 10, 9), {}),
    "groups": ("digits-cnn", (1, 8, 8), {"norm": "group"}),
    "layers": ("digits-cnn", (1, 8, 8), {"norm": "layer"}),
    "cnn5": ("cnn5", (1, 20, 16), {"norm": "layer"}),
    "mlp": ("mlp", (1, 8, 8), {}),
    "mlp of vectors": ("mlp", (12,), {}),
    "mlp of windows": ("mlp", (6, 2), {}),
    "no base": ("mlp", (12,), {"hidden": ()}),
}


def made(kind: str, count: int, batch: int = 5) -> tuple[list[SplitNet], Tensor]:
    """Return nets of a kind, each with weights of its own, and inputs (count, batch, …)."""
    name, shape, options = NETS[kind]
    nets = []
    for number in range(count):
        with seeded(number):
            nets.append(make_net(name, num_classes=3, input_shape=shape, **options))
    draw = torch.Generator().manual_seed(0)
    return nets, torch.randn(count, batch, *shape, generator=draw)


def grouped(nets: list[SplitNet], x: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return logits (N, B, K), and the gradients of their squares by net and name."""
    names = [name for name, _ in nets[0].named_parameters()]
    rows = {
        name: torch.stack([dict(net.named_parameters())[name].detach() for net in nets])
        for name in names
    }
    for each in rows.values():
        each.requires_grad_()
    how = Grouped(len(nets))
    inputs = how.inputs(x)
    with how:
        logits = torch.func.functional_call(_Forward(nets[0]), _prefixed(rows), (inputs,))
    logits.square().sum().backward()
    gradients = [
        {name: row.grad[number] for name, row in rows.items() if row.grad is not None}
        for number in range(len(nets))
    ]
    return logits.detach(), gradients


class _Forward(torch.nn.Module):
    def __init__(self, net: SplitNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.head(self.net.embedded(x))


def _prefixed(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"net.{name}": tensor for name, tensor in rows.items()}


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("batch", [5, 3])
def test_each_net_comes_to_what_it_comes_to_alone(kind, batch):
    nets, x = made(kind, 3, batch)
    logits, gradients = grouped(nets, x)
    for number, net in enumerate(nets):
        alone = net(x[number])
        torch.testing.assert_close(logits[number], alone, rtol=1e-4, atol=1e-5)
        alone.square().sum().backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                gradients[number][name], parameter.grad, rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("kind", ["digits-cnn", "layers", "mlp"])
@pytest.mark.parametrize("batch", [1, 13, 16])
def test_the_number_of_nets_changes_rounding_alone(kind, batch):
    nets, x = made(kind, 13, batch)
    logits, gradients = grouped(nets, x)
    for count in (1, 3, 8, 13):
        fewer, some = grouped(nets[-count:], x[-count:])
        torch.testing.assert_close(fewer, logits[-count:], rtol=1e-4, atol=1e-5)
        for one, other in zip(some, gradients[-count:], strict=True):
            for name in one:
                torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", NETS)
def test_such_nets_are_found_out(kind):
    name, shape, options = NETS[kind]
    net = make_net(name, num_classes=3, input_shape=shape, **options).train()
    before = {key: tensor.clone() for key, tensor in net.tensors().items()}
    assert can_be_grouped(net, shape)
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.tensors().items())


class Halved(nn.Module):
    """A base that mixes channels: the mean over them is taken away."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)).flatten(1)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        ("resnet20", (1, 8, 8)),
        ("hart", (128, 6)),
        ("vit-tiny", (1, 8, 8)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), (1, 4, 4)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.1), nn.Flatten(1)), (1, 4, 4)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), Halved()), (1, 4, 4)),
    ],
    ids=["resnet20", "hart", "vit-tiny", "batch norm", "dropout", "mean of channels"],
)
def test_nets_that_mix_channels_in_other_ways_are_no_such_nets(net, shape):
    if isinstance(net, str):
        made = make_net(net, num_classes=3, input_shape=shape)
    else:
        made = SplitNet(net, nn.Linear(16, 3), 16)
    assert not can_be_grouped(made.train(), shape)
