"""Every method's own rule among the classes a client has met, and among all."""

import math

import torch

from fedmodels.methods import make
from fedmodels.training.scoring import candidates_of, mask_scores, rules_of
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for

SCORES = torch.tensor([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])


def test_the_own_rule_by_hand():
    """Without class 0 the first example is taken for 1; nothing else of the answer changes."""
    other = SCORES.flip(1)
    found = mask_scores({"own": SCORES, "other": other}, torch.tensor([False, True, True]))
    assert list(found) == ["own", "seen_classes", "all_classes", "other"]
    assert found["seen_classes"].argmax(1).tolist() == [1, 2]
    assert found["seen_classes"][0].tolist() == [-math.inf, 2.0, 1.0]
    assert torch.equal(found["all_classes"], SCORES)
    assert torch.equal(found["other"], other)


def test_a_client_that_met_nothing_chooses_among_all():
    assert (
        candidates_of(torch.zeros(3, dtype=torch.bool), torch.device("cpu")).tolist() == [True] * 3
    )


def test_a_method_with_a_mask_of_its_own_says_what_it_does_without():
    """Reports are checked by the order of the rules, so both functions have to agree."""
    method = make("gldp")
    answer = {rule: SCORES + place for place, rule in enumerate(method.rules)}
    found = mask_scores(answer, torch.tensor([True, True, False]))
    experiment = tiny_experiment(evaluate={"class_masks": True})
    assert tuple(found) == rules_of(method, experiment)
    assert torch.equal(found["all_classes"], answer["all_classes"])
    assert rules_of(method, tiny_experiment()) == method.rules


def test_runs_have_both_columns_where_they_ask_for_them(digits, tmp_path):
    """GLDP's own rule is the masked one, FedAvg's is not; a mask never makes a model worse."""
    found = {
        name: run_in_process(
            experiment_for((name, {}), evaluate={"class_masks": True}),
            digits,
            tmp_path / name,
        )["metrics"]
        for name in ("fedavg", "gldp")
    }
    for metrics in found.values():
        for column in ("a_glo", "a_loc", "a_loc_received", "a_loc_trained"):
            assert metrics[f"{column}_seen_classes"] >= metrics[f"{column}_all_classes"]
    assert found["fedavg"]["a_loc"] == found["fedavg"]["a_loc_all_classes"]
    assert found["gldp"]["a_loc"] == found["gldp"]["a_loc_seen_classes"]
    assert found["gldp"]["a_loc_seen_classes"] > found["gldp"]["a_loc_all_classes"]
