"""GLDP against its second implementation: two rounds of two tasks, three of four clients each."""

import copy

import pytest
import torch

from tests.independent import gldp
from tests.independent.rounds import Rounds, blobs, mean_of, normalised_net, same, same_rows

HELD = [[[0, 1], [1, 2]], [[2, 3], [0, 2]], [[0, 3], [1, 3]], [[1, 2], [0, 3]]]
COHORTS = [(0, 1, 2), (1, 2, 3)]
SGD = {"lr": 0.05, "momentum": 0.5, "weight_decay": 1e-2}
STEPS = {"t": 2, "s": 2}
X = 2 * torch.randn(40, 6, generator=torch.Generator().manual_seed(9))
CASES = [
    ({}, {}),
    ({"lam": 0.2, "beta": 0.3, "tau": 2.0}, {"lam": 0.2, "beta": 0.3, "tau": 2.0}),
    ({"use_lp": False}, {"use_lp": False}),
    ({"use_gp": False, "lam": 1.0}, {"use_gp": False, "lam": 1.0}),
    ({"order": "head_first"}, {"head_first": True}),
    ({"kl_space": "head"}, {"in_head_space": True}),
    ({"gp_mode": "per_sample"}, {"per_sample": True}),
    ({"proto_pass": "running"}, {"running": True}),
    ({"own_moves": "epoch"}, {"moves_each_epoch": True}),
    (
        {"own_moves": "epoch", "order": "head_first"},
        {"moves_each_epoch": True, "head_first": True},
    ),
    ({"uplink_proto": "ema"}, {}),
    ({"heads": "round"}, {}),
    (
        {"own_moves": "epoch", "proto_pass": "running", "kl_space": "head", "heads": "round"},
        {"moves_each_epoch": True, "running": True, "in_head_space": True},
    ),
    ({"weighting": "examples", "eval_upload_head": True}, {}),
]


@pytest.mark.parametrize(
    ("switches", "plain"), CASES, ids=["-".join(switches) or "default" for switches, _ in CASES]
)
def test_rounds(switches, plain):
    """All weights, heads and prototypes on both sides, and what all rules predict."""
    data, net = blobs(HELD, 4, (6,)), normalised_net()
    rounds = Rounds("gldp", net, data, 4, SGD, **STEPS, **switches)
    theta, head = net.base, net.head
    heads, own, everyone = dict.fromkeys(range(4), head), {i: {} for i in range(4)}, {}
    beta = plain.get("beta", 0.5)
    for number, cohort in enumerate(COHORTS):
        for task in range(2):
            found = {}
            for i in cohort:
                begin = head if switches.get("heads") == "round" and task == 0 else heads[i]
                found[i] = gldp.trained(
                    theta, begin, own[i], everyone, *data[i][task],
                    lr=0.05, momentum=0.5, decay=1e-2, **STEPS, **plain,
                )  # fmt: skip
                _, heads[i], own[i], _ = found[i]
            reported = [found[i][3] for i in cohort]
            if "uplink_proto" in switches:
                reported = [{k: own[i][k] for k in found[i][3]} for i in cohort]
            sizes = [len(data[i][task][1]) for i in cohort]
            weights = [n / sum(sizes) for n in sizes] if "weighting" in switches else None
            bases = [found[i][0] for i in cohort]
            theta, everyone = gldp.aggregated(bases, reported, everyone, beta, weights)
            head = mean_of([heads[i] for i in cohort], weights)
            rounds.interact(cohort, number, task)
            same(rounds.state.common.weights, theta, "base/")
            same_rows(rounds.state.common.prototypes["class"], everyone)
            for i in range(4):
                if "head/weight" in rounds.private[i].weights:
                    same(rounds.private[i].weights, heads[i], "head/")
                same_rows(rounds.private[i].prototypes.get("class"), own[i])
    served, x = copy.deepcopy(theta).eval(), X.float()
    for i in range(4):
        scores = rounds.scores(i, 1, 1, COHORTS[-1], x)
        assert scores["gldp_gp"].equal(gldp.nearest(theta, x, everyone, own[i].keys()))
        assert scores["gldp_lp"].equal(gldp.nearest(theta, x, own[i] or everyone, own[i].keys()))
        assert scores["all_classes"].equal(gldp.nearest(theta, x, everyone))
        last = head if switches.get("heads") == "round" else heads[i]
        assert scores["classifier"].equal(last(served(x)).argmax(1))
