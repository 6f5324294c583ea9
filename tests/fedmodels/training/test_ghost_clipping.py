"""Norms and sums of examples' gradients by one pass, beside each example's own gradient."""

import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.nets import make_net
from fedmodels.nets.adapters import add_adapters
from fedmodels.nets.own_net import as_split_net
from fedmodels.nets.split import embeddings
from fedmodels.numerics.weight_terms import squared_distance
from fedmodels.training import ghost_clipping
from fedmodels.training.ghost_clipping import apart_in, bounded, per_example
from fedmodels.training.stepped import Batch
from tests.fedmodels.training.test_private_steps import RUN, loss, steps_of

NETS = {
    "mlp": ((6,), {"hidden": [5, 4]}),
    "digits-cnn": ((1, 24, 24), {"norm": "layer"}),
    "cnn5": ((3, 17, 17), {"norm": "group"}),
    "vit-tiny": ((3, 8, 8), {"blocks": 1}),
}


def net_of(name, **options):
    torch.manual_seed(0)
    shape, own = NETS[name]
    return make_net(name, num_classes=3, input_shape=shape, **{**own, **options}).double()


def batch_of(shape, size=5):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(size, *shape, generator=draw, dtype=torch.float64)
    return Batch(x, torch.arange(size) % 3, torch.arange(size))


def trained_in(net):
    return {k: p for k, p in net.parameters_by_key().items() if p.requires_grad}


def check(net, batch, loss_of=loss):
    """Compare with gradients that are there, in float64."""
    trained, factors = trained_in(net), torch.linspace(0.1, 1, len(batch.y)).double()
    apart = apart_in(net, trained, batch)
    assert apart is not None, "the net need not be mapped"
    found = bounded(net, trained, batch, loss_of, apart)
    gradients, losses = per_example(net, trained, batch, loss_of)
    assert torch.allclose(found.total(factors), factors @ gradients, rtol=1e-7, atol=1e-10)
    norms = gradients.norm(dim=1)
    assert torch.allclose(found.squares.sqrt(), norms, rtol=1e-3)
    assert (found.squares.sqrt() >= norms * (1 - 1e-9)).all(), "never below the true norm"
    assert torch.allclose(found.losses, losses)
    assert all(p.grad is None for p in trained.values())


@pytest.mark.parametrize("name", NETS)
def test_nets_tell_the_gradients_of_examples(name):
    check(net_of(name), batch_of(NETS[name][0]))


def test_every_way_through_a_convolution_is_the_same(monkeypatch):
    """By a group for each example, unfolded in parts, and by comparing places."""
    net, batch = net_of("cnn5"), batch_of((3, 17, 17))
    for places, at_once, wins in ((1, 1 << 21, 128), (10**9, 1, 128), (10**9, 1 << 21, 0)):
        monkeypatch.setattr(ghost_clipping, "PLACES", places)
        monkeypatch.setattr(ghost_clipping, "CHANNELS", 1)
        monkeypatch.setattr(ghost_clipping, "AT_ONCE", at_once)
        by_places = lambda t, i, o, wins=wins: wins * t**2 < i * o  # noqa: E731
        monkeypatch.setattr(ghost_clipping, "by_places", by_places)
        check(net, batch)


class Lines(nn.Module):
    rows_are_independent = True

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, 2, 1, 1, bias=False), nn.LayerNorm(4)
        self.act, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def features(self, x):
        tokens = self.act(self.conv(x)).transpose(1, 2)
        return self.drop(self.norm(self.fc(tokens))).mean(1)


def own(built, shape=(2, 9)):
    torch.manual_seed(0)
    return as_split_net(built(), "own", 3, shape).double()


def test_a_net_with_lines_tokens_and_dropout_tells_them_without_its_dropout():
    net, batch = own(Lines), batch_of((2, 9))
    assert apart_in(net.train(), trained_in(net), batch) == frozenset()
    check(net.eval(), batch)


def test_what_is_frozen_takes_no_part():
    net = net_of("cnn5")
    add_adapters(net.base, 2)
    for adapter in (m for m in net.modules() if hasattr(m, "up")):
        nn.init.normal_(adapter.up.weight)
    check(net.double(), batch_of((3, 17, 17)))


class Unmarked(Lines):
    """Who overrides what a marked class does has to say so again."""


class Twice(Lines):
    rows_are_independent = True

    def features(self, x):
        return self.fc(super().features(x))


class Turned(Lines):
    """Its last layer has tokens first."""

    rows_are_independent = True

    def features(self, x):
        tokens = self.act(self.conv(x)).permute(2, 0, 1)
        return self.norm(self.fc(tokens)).mean(0)


class Multiplied(Lines):
    rows_are_independent = True

    def features(self, x):
        return super().features(x) @ self.fc.weight


@pytest.mark.parametrize("built", [Twice, Turned, Multiplied])
def test_nets_whose_layers_do_not_tell_all_are_mapped(built):
    """A layer is used twice, rows are not first in one, a weight is multiplied bare."""
    net, batch = own(built), batch_of((2, 9), size=4)
    apart = apart_in(net, trained_in(net), batch)
    assert bounded(net, trained_in(net), batch, loss, apart) is None
    assert all(p.grad is None for p in net.parameters())


def hooked():
    net = own(Lines)
    net.base.net.fc.register_forward_hook(lambda part, given, out: out - out.mean(0))
    return net


def patched():
    net = own(Lines)
    net.base.net.act.forward = lambda x: x - x.mean(0)
    return net


def flat():
    return as_split_net(nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 18)), nn.Linear(18, 3)),
                        "own", 3, (2, 9)).double()  # fmt: skip


@pytest.mark.parametrize("made", [lambda: own(Unmarked), hooked, patched, flat])
def test_nets_of_which_nobody_says_that_rows_are_independent_are_mapped(made):
    """Its class, a hook, another function in a layer's place, and a layer that joins rows."""
    net = made()
    assert apart_in(net, trained_in(net), batch_of((2, 9))) is None


def test_what_torch_cannot_map_is_taken_one_by_one():
    """It looks at its values; sums are those of a net that does the same without looking."""

    class Looks(Lines):
        def features(self, x):
            return super().features(x) if float(x.sum()) < 1e9 else x

    found = []
    batch = Batch(torch.randn(5, 2, 9), torch.arange(5) % 3, torch.arange(5))
    for built in (Lines, Looks):
        net = own(built).float().eval()
        steps_of(net, 5, 4).put_gradients(batch, loss, "fedavg")
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_a_net_that_keeps_something_of_its_examples_is_refused():
    class Keeps(Lines):
        rows_are_independent = True

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(9))

        def features(self, x):
            self.seen.copy_(x.detach().mean((0, 1)))
            return super().features(x)

    batch = Batch(torch.randn(5, 2, 9), torch.arange(5) % 3, torch.arange(5))
    with pytest.raises(ConfigError, match=r"keeps 'base/net.seen' of its examples"):
        steps_of(own(Keeps).float(), 5, 4).put_gradients(batch, loss, "fedavg")


def test_class_means_and_lessons_of_such_a_net_are_of_each_example_alone():
    net = as_split_net(nn.Sequential(FillsIn(nn.Linear(6, 8)), nn.Linear(8, 3)), "own", 3, (6,))
    x = torch.zeros(3, 6)
    x[2] = 9.0
    alike = embeddings(net, x[:2])
    assert not torch.allclose(embeddings(net, x)[:2], alike)
    net.alone = True
    assert torch.equal(embeddings(net, x)[:2], alike)


def test_a_loss_with_a_term_of_the_weights_is_mapped():
    net, batch = net_of("mlp"), batch_of((6,))
    weights = list(net.parameters())
    before = [each.detach() + 1 for each in weights]

    def pulled(some, out):
        return loss(some, out) + squared_distance(weights, before)

    assert bounded(net, trained_in(net), batch, pulled) is None
    assert all(each.grad is None for each in weights), "nothing is left of the try"


@pytest.mark.parametrize("pull", [0.0, 0.1])
def test_steps_are_those_of_mapped_gradients(pull):
    """With and without what only mapping takes; the noise is nearly none."""
    shape, found = RUN.problem.input_shape, []
    batch = Batch(torch.randn(5, *shape), torch.arange(5) % 3, torch.arange(5))
    for maps in (False, True):
        net = RUN.make_net()

        def pulled(some, out, net=net):
            return loss(some, out) + pull * sum(p.square().sum() for p in net.parameters())

        steps = steps_of(net, 5, 4)
        steps._maps = maps
        steps.put_gradients(batch, pulled if pull else loss, "fedavg")
        assert steps._maps == (maps or bool(pull))
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


class FillsIn(nn.Sequential):
    """Cells that are missing, which are 0, get the mean of the batch."""

    def forward(self, x):
        return super().forward(torch.where(x == 0, x.mean(0), x))


def test_one_example_moves_the_sum_by_one_clip_whatever_a_net_does_with_its_batch():
    """Trials with made-up examples saw no cell that is missing. One that has huge cells where all
    others miss them moved the sum by several clips, as all others' gradients followed it."""
    torch.manual_seed(0)
    base = FillsIn(nn.Linear(6, 8), nn.Tanh())
    net = as_split_net(nn.Sequential(base, nn.Linear(8, 3)), "own", 3, (6,)).train()
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    x[:7, :3] = 0.0
    x[7] = 50.0
    moved = []
    for size in (8, 7):
        steps = steps_of(net, 8, 1, noise=1e-12)
        steps.put_gradients(Batch(x[:size], y[:size], torch.arange(size)), loss, "fedavg")
        moved.append(torch.cat([p.grad.flatten() for p in net.parameters_by_key().values()]))
    assert float((moved[0] - moved[1]).norm()) <= 0.5 * 1.001
