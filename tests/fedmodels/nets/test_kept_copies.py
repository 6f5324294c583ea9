"""Kept copies: one object for a net and a use, and nothing in it of what it was used for before."""

import gc
import weakref

import pytest
import torch
from torch import nn

from fedmodels.nets import make_net
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet, weights_of


class Restless(nn.Module):
    """A layer that keeps a number, a buffer that is not saved, and statistics."""

    def __init__(self):
        super().__init__()
        self.calls, self.norm = 0, nn.BatchNorm1d(4)
        self.register_buffer("last", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.last.copy_(x[-1])
        return self.norm(x)


def restless():
    return SplitNet(Restless(), nn.Linear(4, 3), 4).pack()


def everything(net):
    """Return what a net is: tensors, gradients and whether there are any, modes, numbers."""
    return (
        {key: t.tolist() for key, t in net.state_dict().items()},
        [(p.requires_grad, p.grad is None) for p in net.parameters()],
        [part.training for part in net.modules()],
        (net.base.calls, net.base.last.tolist()),
    )


def test_a_copy_is_what_a_new_one_would_be():
    net = restless()
    first = kept_copy(net, "teacher").train()
    for _ in range(3):  # one client's use: everything moves, and a gradient is left
        first(torch.randn(5, 4)).sum().backward()
    with torch.no_grad():
        for tensor in first.tensors().values():
            tensor.add_(1)
    first.requires_grad_(False).eval()
    net.train()
    net(torch.randn(5, 4))
    net.head.weight.requires_grad_(False)
    for mode in (True, False):
        net.train(mode)
        again = kept_copy(net, "teacher")
        assert again is first
        assert everything(again) == everything(net.copy()) == everything(net)


@pytest.mark.parametrize("name", ["mlp", "cnn5", "resnet20", "vit-tiny"])
def test_nets_of_this_repository_are_kept(name):
    net = make_net(name, num_classes=3, input_shape=(3, 32, 32)).pack()
    kept = kept_copy(net, "teacher")
    with torch.no_grad():
        next(kept.parameters()).add_(1)
    assert kept_copy(net, "teacher") is kept
    assert kept.packed() is not None
    for key, tensor in weights_of(net).items():
        assert torch.equal(weights_of(kept)[key], tensor), key


def test_each_use_and_each_net_has_its_own():
    one, other = restless(), restless()
    kept = kept_copy(one, "teacher"), kept_copy(one, "judge"), kept_copy(other, "teacher")
    assert len({id(net) for net in (one, other, *kept)}) == 5
    blocks = [net.packed().block.data_ptr() for net in (one, other, *kept)]
    assert len(set(blocks)) == 5


@pytest.mark.parametrize("what", ["a list", "a hook", "a new name", "another shape"])
def test_what_cannot_be_followed_is_copied_anew(what):
    net = restless()
    first = kept_copy(net, "teacher")
    if what == "a list":
        net.base.seen = first.base.seen = []
    elif what == "a hook":
        first.register_forward_hook(lambda *_: None)
    elif what == "a new name":
        first.base.left = 3
    else:
        net.base.last = torch.ones(5)
    again = kept_copy(net, "teacher")
    assert again is not first
    assert everything(again) == everything(net)
    assert not again._forward_hooks
    assert not hasattr(again.base, "left")


def test_copies_go_with_their_net():
    net = restless()
    kept = weakref.ref(kept_copy(net, "teacher"))
    del net
    gc.collect()
    assert kept() is None
