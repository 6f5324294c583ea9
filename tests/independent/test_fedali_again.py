"""FedAli's layer and whole rounds against their second implementation."""

import copy

import pytest
import torch
from torch import nn

from fedmodels.nets.alp import ALP
from fedmodels.nets.split import SplitNet
from tests.independent import fedali
from tests.independent.rounds import Rounds, blobs

TOKENS, WIDTH, CLASSES, COUNTS = 3, 6, 4, (5, 3)
FAST = {"gamma": 0.5}
LAYERS = [
    ({}, {}),
    ({"beta": 0.5, **FAST}, {"beta": 0.5, **FAST}),
    ({"sets": "local_only", **FAST},) * 2,
    ({"sets": "global_only", **FAST},) * 2,
    ({"match": "cosine", **FAST},) * 2,
    ({"match": "euclidean", **FAST},) * 2,
    ({"last": "samples", **FAST}, {"samples_last": True, **FAST}),
    ({"epsilon": 0.5, "iterations": 7, **FAST},) * 2,
    ({"topk": "official", **FAST}, {"k": 1, **FAST}),
    ({"topk": 2, **FAST}, {"k": 2, **FAST}),
    ({"ema_features": "normalised", **FAST}, {"unit_features": True, **FAST}),
    ({"ema_weights": "raw", **FAST}, {"raw_weights": True, **FAST}),
    ({"update": "single", **FAST}, {"hard": True, **FAST}),
    ({"skip_cls": True, **FAST}, {"skip_first": True, **FAST}),
]


@pytest.mark.parametrize(
    ("switches", "plain"), LAYERS, ids=["-".join(switches) or "default" for switches, _ in LAYERS]
)
def test_layer(switches, plain):
    """Outputs, local prototypes and gradients, in training and at inference."""
    torch.manual_seed(0)
    ours = ALP(WIDTH, 5, **switches)
    ours.local_prototypes.add_(torch.randn(5, WIDTH) / 2)
    again = fedali.Alignment(WIDTH, 5, **plain)
    again.load_state_dict(ours.state_dict())
    x, direction = 3 * torch.randn(4, TOKENS, WIDTH), torch.randn(4, TOKENS, WIDTH)
    for training in (True, False):
        found = []
        for layer in (ours, again):
            given = x.clone().requires_grad_()
            out = layer.train(training)(given)
            slopes = torch.autograd.grad((out * direction).sum(), [given, *layer.glu.parameters()])
            found.append([out.detach(), layer.local_prototypes.clone(), *slopes])
        torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def net_of(layer):
    torch.manual_seed(5)
    base = fedali.Tokens([layer(WIDTH, n, gamma=0.9) for n in COUNTS], TOKENS, WIDTH)
    return SplitNet(base, nn.Linear(WIDTH, CLASSES), WIDTH)


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"wire_prototypes": "both", "kmeans_solver": "torch"},
        {"kmeans_solver": "neighbours", "weighting": "uniform"},
        {"keep_personal_prototypes": True},
        {"aggregate_prototypes": "fedavg", "round0_beta": "same"},
    ],
    ids=lambda switches: "-".join(switches) or "default",
)
def test_rounds(switches):
    """Three rounds of three clients: all weights, those of the gates too, and all P_glo."""
    data = blobs([[[0, 1]], [[2, 3, 0]], [[0, 3]]], CLASSES, (TOKENS, WIDTH), seed=2)
    training = {"lr": 0.01, "optimizer": "adam", "local_epochs": 3}
    ours = net_of(ALP)
    rounds = Rounds("fedali", ours, data, CLASSES, training, **switches)
    net = net_of(fedali.Alignment)
    net.load_state_dict(ours.state_dict())
    counts = [1 if "weighting" in switches else len(tasks[0][1]) for tasks in data]
    kept = [None] * len(data)
    for number in range(3):
        beta = 0.0 if number == 0 and "round0_beta" not in switches else 0.2
        nets = [
            fedali.trained(net, *tasks[0], epochs=3, lr=0.01, beta=beta, kept=begin)
            for tasks, begin in zip(data, kept, strict=True)
        ]
        if "keep_personal_prototypes" in switches:
            kept = [fedali.prototypes(each) for each in nets]
        net = fedali.aggregated(nets, counts, "aggregate_prototypes" in switches)
        rounds.interact(range(3), number, 0)
        expected = {k.replace(".", "/", 1): t for k, t in copy.copy(net.state_dict()).items()}
        for name, tensor in rounds.state.common.weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-8, atol=1e-10)
        for number_of_block, block in enumerate(net.base.blocks):
            found = rounds.state.common.prototypes[f"alp/{number_of_block}"].vectors
            torch.testing.assert_close(found, block.alp.global_prototypes, rtol=1e-8, atol=1e-10)
