"""FedMLP against its second implementation: two rounds of two tasks, three of four clients each."""

import numpy as np
import pytest
import torch

from tests.independent import fedmlp
from tests.independent.rounds import Rounds, blobs, mean_of, normalised_net, same, same_rows

HELD = [[[0, 1], [1, 2]], [[2, 3], [0, 4]], [[0, 3], [1, 3, 4]], [[1, 2, 4], [0, 3]]]
COHORTS = [(0, 1, 2), (1, 2, 3)]
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "local_epochs": 3}
PLAIN = {"lr": 0.05, "momentum": 0.9, "decay": 1e-2, "epochs": 3}
CASES = [
    ({}, {}),
    ({"loss_i": False, "loss_s": False}, {"used": "p"}),
    ({"loss_p": False, "loss_s": False, "tau": 2.0}, {"used": "i", "tau": 2.0}),
    ({"loss_p": False, "loss_i": False, "alpha": 0.3}, {"used": "s", "alpha": 0.3}),
    ({"u": 1, "v": 2}, {"u": 1}),
    ({"kl_norm": "l2_softmax", "kl_dir": "c_z"}, {"unit": True, "backwards": True}),
    ({"share": "all"}, {}),
    ({"heads": "round", "weighting": "examples"}, {}),
]


def counted(y):
    return {int(k): int(n) for k, n in zip(*y.unique(return_counts=True), strict=True)}


@pytest.mark.parametrize(
    ("switches", "plain"),
    CASES,
    ids=["-".join(map(str, s.values())) or "default" for s, _ in CASES],
)
def test_rounds(switches, plain):
    """All weights, heads and memories, prototypes of both levels, and the minority."""
    data, net = blobs(HELD, 5, (6,)), normalised_net(classes=5)
    rounds = Rounds("fedmlp", net, data, 5, SGD, **switches)
    extractor, head = net.base, net.head
    heads, memory = dict.fromkeys(range(4), head), {i: {} for i in range(4)}
    levels, counts = fedmlp.Levels(), {}
    together, renewed = switches.get("share") == "all", switches.get("heads") == "round"
    for number, cohort in enumerate(COHORTS):
        for task in range(2):
            bases, reported = [], []
            for i in cohort:
                begin = head if together or (renewed and task == 0) else heads[i]
                f, heads[i], memory[i], found = fedmlp.trained(
                    extractor, begin, memory[i], levels, *data[i][task], **PLAIN, **plain
                )
                bases.append(f)
                reported.append(found)
                counts[i, task] = counted(data[i][task][1])
            sizes = [len(data[i][task][1]) for i in cohort]
            weights = [n / sum(sizes) for n in sizes] if "weighting" in switches else None
            extractor, levels = fedmlp.aggregated(
                bases, reported, levels, counts, switches.get("v", 3), weights
            )
            head = mean_of([heads[i] for i in cohort], weights)
            rounds.interact(cohort, number, task)
            check_server(rounds.state.common, extractor, levels)
            if together or renewed:
                same(rounds.state.common.weights, head, "head/")
            for i in range(4):
                same_rows(rounds.private[i].prototypes["class"], memory[i])
                if not (together or renewed):
                    same(rounds.private[i].weights, heads[i], "head/")


def check_server(common, extractor, levels):
    same(common.weights, extractor, "base/")
    g = common.prototypes["class"]
    same_rows(g, levels.everyone)
    centres = common.prototypes["semantic"].vectors[common.weights["levels/cluster"].long()]
    expected = torch.stack([levels.centres[levels.cluster[int(k)]] for k in g.labels])
    torch.testing.assert_close(centres, expected, rtol=1e-8, atol=1e-10)
    bits = np.unpackbits(common.weights["levels/minority"].numpy())
    assert frozenset(np.flatnonzero(bits).tolist()) == levels.minority
