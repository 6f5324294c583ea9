"""What the papers show beside tables: t-SNE of embeddings, and how prototypes converge."""

from __future__ import annotations

from benchmarks.embeddings import picture
from benchmarks.fid import distance, fid
from benchmarks.prototype_convergence import distances
from fedcli.parts.drawing import draw
from fedtide.inprocess import launch_in_process
from tests.conftest import tiny_experiment


def test_t_sne_of_a_finished_run(tmp_path):
    """Classes lie apart: a point's nearest neighbour is mostly of its own class."""
    experiment = tiny_experiment(
        schedule={"rounds": 4}, training={"local_epochs": 5}, data={"max_per_class": 40}
    )
    launch_in_process(experiment, tmp_path / "run")
    found = picture(tmp_path / "run", 100)
    assert found.points.shape == (100, 2)
    away = (found.points[:, None] - found.points[None]).norm(dim=2).fill_diagonal_(float("inf"))
    same = found.labels[away.argmin(1)] == found.labels
    assert same.float().mean() > 0.5, "ten classes: chance is 0.1"
    draw(found, tmp_path / "t-sne.svg")
    drawn = (tmp_path / "t-sne.svg").read_text()
    assert "t-SNE" in drawn
    assert "principal" not in drawn


def test_local_prototypes_converge_unless_gamma_is_near_one():
    """33 images a client are three steps an epoch: 0.999 keeps nearly all of a beginning."""

    def moved(gamma: float) -> list[float]:
        net = {"name": "vit-tiny", "patch": 4, "blocks": 1, "alp": True, "prototypes": [4]}
        experiment = tiny_experiment(
            net={**net, "alignment": {"gamma": gamma}},
            method={"name": "fedali", "round0_beta": "same"},
            training={"local_epochs": 4, "optimizer": "adam", "lr": 1e-4},
        )
        return distances(experiment)[0]

    slow, fast = moved(0.999), moved(0.9)
    assert len(slow) == len(fast) == 4
    assert slow[-1] > 0.9 * slow[-2], "all epochs have as many steps"
    assert fast == sorted(fast, reverse=True)
    assert max(slow) < min(fast) / 10


def test_frechet_distance_is_of_all_that_a_client_of_a_finished_run_replays(tmp_path, monkeypatch):
    """pFedGRP's table 9: generators of single classes together, so that one for all compares."""
    small = {"generator_width": 4, "generator_epochs": 1, "n_check": 4, "w_epochs": 1}
    experiment = tiny_experiment(method={"name": "pfedgrp", **small}, schedule={"rounds": 1})
    launch_in_process(experiment, tmp_path / "run")
    compared = []
    monkeypatch.setattr("benchmarks.fid.fid", lambda *both: compared.append(both) or fid(*both))
    found = distance(tmp_path / "run", 20)
    assert found["generators"] > len(compared) == experiment.schedule.clients
    assert found["fid"] > 0
