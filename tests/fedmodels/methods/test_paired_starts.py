"""Runs of two methods on one seed are pairs: they start from the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedmodels.methods import names
from fedmodels.nets import make_net
from fedmodels.nets.split import weights_of
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Weights
from fedtide.testing.trial import context_of, method_of, payload_of
from tests.fedmodels.methods.test_conformance import ADAPTED, ALIGNED, NEEDS, NORMED, experiment_for

PLAIN = {key: value for key, value in ALIGNED.items() if key not in ("alp", "prototypes")}
NETS: list[dict[str, object]] = [
    {"name": "mlp"},
    {"name": "digits-cnn"},
    {"name": "digits-cnn", "norm": "layer"},
    {"name": "resnet20"},
]
"""Nets of other kinds that take the digits; 8x8 images are too small for ``cnn5``."""

FIRST = {"ifca": {"models": 1}}
"""What leaves a client no choice between several models, of which the first one begins so."""


def beginning(name: str, net: dict[str, object], digits: Path) -> Weights:
    """Return the weights that client 0 of a method begins to train with."""
    experiment = experiment_for((name, FIRST.get(name, {})), net=net)
    ctx = context_of(experiment, digits)
    payload, state = payload_of(experiment, ctx)
    method_of(experiment).load(ctx, payload, state)
    return weights_of(ctx.net)


def differing(plain: Weights, other: Weights) -> list[str]:
    """Return the names of the plain net's tensors that the other net has not, or has otherwise."""
    return [k for k, t in plain.items() if k not in other or not torch.equal(other[k], t)]


@pytest.fixture(scope="module")
def of_fedavg(digits: Path) -> Weights:
    return beginning("fedavg", PLAIN, digits)


@pytest.mark.parametrize("name", names())
def test_every_method_starts_from_the_weights_of_fedavg(name, digits, of_fedavg):
    net = ALIGNED if name == "fedali" else NORMED if name == "fedbn" else PLAIN
    plain = beginning("fedavg", NORMED, digits) if name == "fedbn" else of_fedavg
    if name == "pilora":  # its bias follows from prototypes
        plain, net = beginning("fedavg", ADAPTED, digits), ADAPTED
        plain = {key: t for key, t in plain.items() if key != "head/bias"}
    assert differing(plain, beginning(name, net, digits)) == []


@pytest.mark.parametrize("net", NETS, ids=lambda net: "-".join(map(str, net.values())))
def test_so_it_is_on_every_kind_of_net(net, digits):
    """FedAli needs a net with alignment, FedBN one with batch normalisation, PILoRA one with
    adapters: the test above has them, and the one below alignment."""
    plain = beginning("fedavg", net, digits)
    others = [name for name in names() if name not in NEEDS]
    found = {name: differing(plain, beginning(name, net, digits)) for name in others}
    assert {name: tensors for name, tensors in found.items() if tensors} == {}


@pytest.mark.parametrize(
    ("net", "shape", "blocks"), [("vit-tiny", (1, 8, 8), 3), ("hart", (32, 6), 3)]
)
def test_alignment_changes_no_other_weight(net, shape, blocks):
    """Nor does the number of prototypes: the layer draws from a stream of its own."""

    def made(**options: object) -> Weights:
        with seeded(5):
            built = make_net(net, num_classes=4, input_shape=shape, blocks=blocks, **options)
        return weights_of(built)

    plain = made()
    few, many = (made(alp=True, prototypes=[count] * blocks) for count in (2, 8))
    assert differing(plain, few) == differing(plain, many) == []
    assert len(few) > len(plain)
    layers = [few[k] for k in few if k.endswith("local_prototypes")]
    assert not torch.equal(layers[0], layers[1])


def test_another_seed_is_other_noise():
    def noise(seed: int) -> torch.Tensor:
        with seeded(seed):
            built = make_net("vit-tiny", num_classes=2, input_shape=(1, 8, 8), **_aligned())
        return weights_of(built)["base/blocks.0.alp.local_prototypes"]

    assert torch.equal(noise(0), noise(0))
    assert not torch.equal(noise(0), noise(1))


def _aligned() -> dict[str, object]:
    return {key: value for key, value in ALIGNED.items() if key != "name"}
