"""pFedGRP against its second implementation: three rounds of three clients on tiny images."""

import itertools

import numpy as np
import pytest
import torch

from fedmodels.numerics.algebra import replay_volumes
from fedmodels.numerics.randomness import derive_seed
from fedmodels.techniques.generators import Painter
from tests.independent import pfedgrp
from tests.independent.rounds import Rounds, blobs, mean_of, normalised_net, same

SHAPE, CLASSES, DRAWN = (1, 8, 8), 4, 16
HELD = [[[0, 1], [2, 3], [0, 2]], [[2, 3], [0, 1], [0, 2]], [[0, 3], [1, 2], [1, 3]]]
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "local_epochs": 4}
PLAIN = {"epochs": 4, "lr": 0.05, "momentum": 0.9, "decay": 0.01}
VOLUME, CHECKED = 20, 40
SMALL = {
    "generator_epochs": 2, "generator_batch": DRAWN, "server_volume": VOLUME, "n_check": CHECKED,
    "w_batch": 10**6, "w_epochs": 10, "w_lr": 0.05,
}  # fmt: skip
CASES = [
    ({}, {}, {}),
    ({"replay_filter": False}, {}, {"filters": False}),
    ({"lam": 0.0, "init_from": "personal", "generator_update": "always"}, {"lam": 0.0}, {}),
    ({"shortage": "fill_top", "w_init": "self"}, {}, {"fills": True}),
    ({"replay_attempts": 1, "th_g": 1.1, "cap": "generated"}, {}, {"attempts": 1}),
]  # fmt: skip


def batches(family, tensors, seed):
    """Yield what a generator draws, batch after batch."""
    painter = Painter(family, tensors)
    return (painter.inputs(DRAWN, seed + number) for number in itertools.count())


def seed_of(word, interaction):
    return derive_seed(0, word, interaction, "method")


@pytest.mark.parametrize(
    ("switches", "plain", "drawing"), CASES, ids=["-".join(s) or "default" for s, _, _ in CASES]
)
def test_rounds(switches, plain, drawing):
    """What is replayed, all models, which generators train, and the aggregation weights."""
    data = [
        [(x.clamp(-1, 1), y) for x, y in tasks] for tasks in blobs(HELD, CLASSES, SHAPE, seed=3)
    ]
    net = normalised_net(inputs=64)
    rounds = Rounds("pfedgrp", net, data, CLASSES, SGD, **SMALL, **switches)
    family = rounds.method.replay.of(rounds.run).family
    everyone, personal, held = net, [net] * 3, [{}, {}, {}]
    history = [np.zeros(CLASSES, dtype=int) for _ in data]

    def drawn(client, wanted, judge, word, interaction):
        """Return accepted images of each class that has a generator."""
        return {
            k: pfedgrp.accepted(
                batches(family, held[client][k], seed_of(f"{word}/{k}", interaction)),
                k, int(wanted[k]), judge, **drawing,
            )
            for k in held[client] if wanted[k]
        }  # fmt: skip

    for t in range(3):
        local = []
        for i, tasks in enumerate(data):
            now = np.bincount(tasks[t][1], minlength=CLASSES)
            history[i] = history[i] + now
            wanted = pfedgrp.volumes(history[i], now, switches.get("cap") == "generated")
            replayed = pfedgrp.gathered(drawn(i, wanted, personal[i], f"{i}/0/draw", t), SHAPE)
            begin = personal[i] if "init_from" in switches else everyone
            options = {"lam": 0.3, **PLAIN, **plain}
            local.append(pfedgrp.trained(begin, personal[i], tasks[t], replayed, **options))
        rounds.interact(range(3), 0, t)
        for i, tasks in enumerate(data):
            same(rounds.uploads[i].weights, local[i])
            due = {
                k
                for k in tasks[t][1].unique().tolist()
                if k not in held[i]
                or "generator_update" in switches
                or recognised(family, held[i][k], k, local[i], seed_of(f"{i}/0/check/{k}", t))
                < switches.get("th_g", 0.25)
            }
            assert rounds.metrics[i]["generators_trained"] == len(due)
            assert set(rounds.uploads[i].generators) == set(map(str, due))
            held[i] = {int(k): g.tensors for k, g in rounds.private[i].generators.items()}
        for i in range(3):
            wanted = np.round(VOLUME * history[i] / history[i].max())
            x, y = pfedgrp.gathered(drawn(i, wanted, local[i], f"server/{i}/0/draw", t), SHAPE)
            first = (
                [0.9 if j == i else 0.05 for j in range(3)] if "w_init" in switches else [1 / 3] * 3
            )
            w = torch.full((3,), 1 / 3)
            if len(y):
                w = pfedgrp.aggregation_weights(local, x, y, epochs=10, lr=0.05, first=first)
            found = torch.tensor(rounds.series["aggregation_weights"][i])
            torch.testing.assert_close(found, w.float(), rtol=1e-4, atol=1e-5)
            personal[i] = pfedgrp.mixed(local, w.float())
            same_personal = rounds.state.clients[i].weights
            same({k.removeprefix("personal/"): v for k, v in same_personal.items()}, personal[i])
        everyone = mean_of(local)
        same(rounds.state.common.weights, everyone)


def recognised(family, tensors, label, net, seed):
    """Return the share of a generator's first images that a net takes for their class."""
    drawn = batches(family, tensors, seed)
    images = torch.cat([next(drawn) for _ in range(CHECKED // DRAWN + 1)])[:CHECKED]
    with torch.no_grad():
        return float((net.eval()(images).argmax(1) == label).float().mean())


def test_volumes():
    """Random histories; ours calculates in integers."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        now = draw.integers(0, 300, 5) * (draw.random(5) < 0.6)
        now[0] += 1
        history = now + draw.integers(0, 1500, 5)
        for cap in ("total", "generated"):
            expected = pfedgrp.volumes(history, now, cap == "generated")
            assert replay_volumes(history, now, cap=cap).tolist() == expected.tolist()
