import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedmodels.errors import DataError
from fedmodels.numerics.metric_tables import is_known, metric
from fedmodels.numerics.metrics import ClassCounts
from fedmodels.tensors.bundle import EVALUATOR, Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.cohort import Answer
from fedsrv.engine.schedule import steps
from fedsrv.engine.scores import Scores, client_rows, own_test, round_metrics
from fedsrv.engine.summary import (
    accuracy_lost,
    run_metrics,
    summarise,
)
from fedsrv.parts.reference import afm_of, check_reference, iaa_series
from tests.conftest import tiny_experiment


def counts(correct, support, view="global", test_set="task/0", rule="classifier", predicted=None):
    """Return counts; what is not predicted rightly is predicted as the next class."""
    wrong = np.subtract(support, correct)
    predicted = np.add(correct, np.roll(wrong, 1)) if predicted is None else predicted
    return rpc.Counts(
        view=view, rule=rule, test_set=test_set, support=support, correct=correct,
        predicted=predicted, loss_sum=float(sum(support)),
    )  # fmt: skip


def scores_of(by_client):
    scores = Scores()
    scores.add({c: Answer(Bundle(), rpc.Report(counts=given)) for c, given in by_client.items()})
    return scores


def profile(*train):
    tasks = [{"train": list(row), "test": list(row)} for row in train]
    facts = {"format": 1, "input_shape": [1], "num_classes": len(train[0]), "tasks": tasks}
    return Profile.parse(0, json.dumps(facts))


BUFFER = {"order": "asynchronous", "buffer": 1}
PROFILES = {0: profile([50, 50], [100, 100]), 1: profile([25, 75], [0, 0])}


def metrics_of(scores, local_view="after_local", minority=(1,), profiles=PROFILES, tasks_seen=1):
    return round_metrics(scores, local_view, {"minority": list(minority)}, profiles, tasks_seen)


# --- one round ------------------------------------------------------------------------------------


def test_a_glo_is_the_mean_over_clients():
    """30 of 40 and 45 of 50 make (75 % + 90 %) / 2 = 82.50 %, not 75 of 90."""
    scores = scores_of({0: [counts([20, 10], [20, 20])], 1: [counts([25, 20], [25, 25])]})
    found = metrics_of(scores)
    assert found["a_glo"] == pytest.approx(0.825)
    assert "a_loc" not in found


def test_pooled_scores_count_a_client_by_its_test_examples():
    """30 of 40 and 45 of 50 are 75 of 90; models just trained have 60 of 80 and 9 of 10."""
    found = metrics_of(
        scores_of(
            {
                0: [
                    counts([10, 20], [20, 20]),
                    counts([30, 30], [40, 40], "after_local"),
                    counts([1, 1], [40, 40], "after_local", rule="all_classes"),
                ],
                1: [counts([20, 25], [25, 25]), counts([4, 5], [5, 5], "after_local")],
            }
        )
    )
    assert found["a_glo_pooled"] == pytest.approx(75 / 90)
    assert found["a_loc_received_pooled"] == found["a_glo_pooled"]
    assert found["a_loc_pooled"] == found["a_loc_trained_pooled"] == pytest.approx(69 / 90)
    assert found["a_loc_trained_all_classes_pooled"] == pytest.approx(2 / 80)
    assert found["a_loc_trained"] == pytest.approx((0.75 + 0.9) / 2)


def test_a_loc_is_of_the_local_view():
    scores = scores_of(
        {
            0: [counts([1, 1], [4, 4], "after_local"), counts([4, 2], [4, 4], "after_downlink")],
            1: [counts([4, 4], [4, 4], "after_local"), counts([0, 0], [4, 4], "after_downlink")],
        }
    )
    assert metrics_of(scores)["a_loc"] == pytest.approx(0.625)
    assert metrics_of(scores, "after_downlink")["a_loc"] == pytest.approx(0.375)


def test_a_loc_in_both_views_whatever_the_method_reports():
    """A private model before training (.375) and after it (.625), and everyone's where none is."""
    trained = [counts([1, 1], [4, 4], "after_local"), counts([4, 4], [4, 4], "after_local")]
    received = [counts([4, 2], [4, 4], "after_downlink"), counts([0, 0], [4, 4], "after_downlink")]
    everyones = [counts([2, 2], [4, 4]), counts([2, 0], [4, 4])]
    own = {c: [trained[c], received[c], everyones[c]] for c in (0, 1)}
    for local_view, paper in (("after_local", 0.625), ("after_downlink", 0.375)):
        found = metrics_of(scores_of(own), local_view)
        assert found["a_loc"] == pytest.approx(paper)
        assert found["a_loc_trained"] == pytest.approx(0.625)
        assert found["a_loc_received"] == pytest.approx(0.375)
        assert found["a_loc_trained_minority"] == pytest.approx(0.625)
        assert found["a_loc_received_minority"] == pytest.approx(0.25)
    shared = metrics_of(scores_of({c: [trained[c], everyones[c]] for c in (0, 1)}))
    assert shared["a_loc_received"] == shared["a_glo"] == pytest.approx(0.375)


def test_a_private_head_is_scored_on_its_own_classes():
    """Two of ten classes met, all of their examples right: 1 on own classes, 0.2 on the whole set.

    FedMLP's A_loc is the former. The latter has a ceiling of (classes met) / (all classes).
    """
    both = [10, 10, *[0] * 8]
    own = [
        counts([1, 1, *[0] * 8], [1, 1, *[0] * 8], "after_downlink"),
        counts(both, [10] * 10, "after_downlink", "global-test"),
    ]
    found = metrics_of(
        scores_of({0: own}), "after_downlink", (1, 2, 3), {0: profile([7, 3, *[0] * 8])}
    )
    for view in ("a_loc", "a_loc_received"):
        assert found[f"{view}_own_classes"] == 1
        assert found[f"{view}_own_classes_minority"] == 1
        assert found[f"{view}_balanced"] == pytest.approx(0.2)
        assert found[f"{view}_balanced_minority"] == pytest.approx(1 / 3)


def test_own_classes_are_those_met_so_far_by_each_client():
    """Client 0 met class 0 and has half of it right, client 1 met class 1 and has all of it."""
    tested = {
        0: counts([2, 4], [4, 4], "after_local", "global-test"),
        1: counts([0, 4], [4, 4], "after_local", "global-test"),
    }
    given = {0: profile([5, 0], [0, 5]), 1: profile([0, 5], [5, 0])}
    scores = scores_of({c: [each] for c, each in tested.items()})
    first = metrics_of(scores, profiles=given)
    assert first["a_loc_trained_own_classes"] == pytest.approx((2 / 4 + 4 / 4) / 2)
    both = metrics_of(scores, profiles=given, tasks_seen=2)
    assert both["a_loc_trained_own_classes"] == both["a_loc_trained_balanced"]


def test_everyones_model_is_scored_on_each_clients_own_classes():
    """Class 0 half right, class 1 wholly: client 0 met the one, client 1 the other: .75."""
    given = {
        0: [counts([1, 1], [4, 4])],
        1: [counts([1, 1], [4, 4])],
        EVALUATOR: [counts([2, 4], [4, 4], test_set="global-test")],
    }
    shared = {c: [*sets, counts([1, 1], [4, 4], "after_local")] for c, sets in given.items()}
    found = metrics_of(scores_of(shared), profiles={0: profile([5, 0]), 1: profile([0, 5])})
    assert found["a_loc_received_own_classes"] == found["a_glo_own_classes"] == 0.75
    assert found["a_loc_received_balanced"] == found["a_glo_balanced"] == 0.75
    one = metrics_of(scores_of(shared), profiles={0: profile([5, 0]), 1: profile([5, 0])})
    assert (one["a_loc_received_own_classes"], one["a_glo_balanced"]) == (0.5, 0.75)


def test_what_was_not_scored_is_in_no_column():
    """Private models that nobody scored after the downlink are not everyone's model."""
    given = {0: [counts([4, 2], [4, 4]), counts([1, 1], [4, 4], "after_local")]}
    found = metrics_of(scores_of(given), "after_downlink")
    assert "a_loc" not in found
    assert "a_loc_received" not in found
    assert found["a_loc_trained"] == pytest.approx(0.25)


def test_a_method_of_one_model_has_a_loc_of_models_just_trained_alone():
    """FedMLP's tables have CReFF's A_loc: its clients train, and keep nothing."""
    given = {0: [counts([4, 2], [4, 4]), counts([1, 1], [4, 4], "after_local")]}
    found = metrics_of(scores_of(given), "global")
    assert found["a_glo"] == pytest.approx(0.75)
    assert found["a_loc_trained"] == pytest.approx(0.25)
    others = {key for key in found if key.startswith("a_loc")}
    assert not {key for key in others if not key.startswith("a_loc_trained")}


def test_tasks_count_by_their_examples():
    """A client's accuracy is over all its test examples: (9 + 1) / (10 + 10 + 0), not by task."""
    sets = [
        counts([9, 0], [10, 0], test_set="task/0"),
        counts([0, 1], [0, 30], test_set="task/1"),
        counts([9, 9], [9, 9], test_set="global-test"),
    ]
    assert metrics_of(scores_of({0: sets}))["a_glo"] == pytest.approx(10 / 40)


def test_clients_without_test_data_are_left_out():
    scores = scores_of({0: [counts([3, 0], [4, 0])], 1: [counts([0, 0], [0, 0])]})
    assert metrics_of(scores)["a_glo"] == 0.75
    assert "a_glo" not in metrics_of(scores_of({1: [counts([0, 0], [0, 0])]}))
    assert metrics_of(Scores()) == {}


def test_iaa_is_weighted_by_what_was_met():
    """Accuracies .8 and .5, 100 and 100 examples met on the first task: .65; then 300 and 100."""
    scores = scores_of({0: [counts([4, 4], [5, 5])], 1: [counts([2, 3], [5, 5])]})
    assert metrics_of(scores)["iaa"] == pytest.approx(0.65)
    assert metrics_of(scores, tasks_seen=2)["iaa"] == pytest.approx((300 * 0.8 + 100 * 0.5) / 400)


def test_there_is_no_iaa_of_data_pooled_at_one_client():
    scores = scores_of({0: [counts([4, 4], [5, 5])], 1: [counts([2, 3], [5, 5])]})
    pooled = {0: profile([75, 125]), 1: profile([0, 0])}
    assert "iaa" not in metrics_of(scores, profiles=pooled)


def test_one_client_without_training_data_takes_no_metric_away():
    scores = scores_of({c: [counts([4, n], [5, 5])] for c, n in enumerate((4, 2, 0))})
    idle = {**PROFILES, 2: profile([0, 0], [0, 0])}
    assert metrics_of(scores, profiles=idle)["iaa"] == pytest.approx((0.8 + 0.6) / 2)


def test_iaa_is_of_the_model_after_the_downlink():
    given = {0: [counts([4, 4], [5, 5], "global"), counts([1, 1], [5, 5], "after_downlink")]}
    assert metrics_of(scores_of(given), "after_local")["iaa"] == pytest.approx(0.8)
    assert metrics_of(scores_of(given), "after_downlink")["iaa"] == pytest.approx(0.2)


def test_minority_is_of_the_examples_of_rare_classes():
    scores = scores_of(
        {
            0: [counts([9, 1], [10, 4])],
            1: [counts([9, 3], [10, 4])],
            2: [counts([9, 0], [10, 0])],  # has no example of a rare class
        }
    )
    profiles = {**PROFILES, 2: PROFILES[0]}
    found = metrics_of(scores, profiles=profiles)
    assert found["a_glo_minority"] == pytest.approx(0.5)
    assert found["a_glo"] == pytest.approx((10 / 14 + 12 / 14 + 0.9) / 3)
    assert "a_glo_minority" not in metrics_of(scores, minority=(), profiles=profiles)


def test_other_rules_are_scored_beside_the_own_one():
    given = {
        0: [
            counts([4, 4], [4, 4], rule="prototypes"),
            counts([1, 1], [4, 4], rule="classifier"),
        ]
    }
    found = metrics_of(scores_of(given))
    assert found["a_glo"] == 1.0
    assert found["a_glo_classifier"] == 0.25


def test_personalization_and_generalization():
    """Macro F1: with everything right 1; with one of two classes never found 1/3."""
    right, half = ([2, 2], [2, 2]), ([2, 0], [2, 2])
    given = {
        0: [counts(*right, "after_local"), counts(*half, "after_local", "global-test")],
        1: [counts(*half, "after_local"), counts(*half, "after_local", "global-test")],
        EVALUATOR: [counts(*half, "global", "global-test")],
    }
    given[1][0].predicted[:] = [4, 0]
    for found in (given[0][1], given[1][1], given[EVALUATOR][0]):
        found.predicted[:] = [4, 0]
    found = metrics_of(scores_of(given))
    assert found["personalization"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["personalization_std"] == pytest.approx(1 / 3)
    assert found["generalization"] == pytest.approx(1 / 3)
    assert found["generalization_std"] == pytest.approx(0.0)
    assert found["global_f1"] == pytest.approx(1 / 3)
    assert "a_glo" not in found, "the evaluator is no client"
    assert found["a_glo_balanced"] == 0.5


def test_everyones_model_on_the_global_test_set_by_groups_of_classes():
    """FedMLP's A_glo and A^{glo-t}: the evaluator's, by the method's own rule."""
    given = {
        EVALUATOR: [
            counts([4, 1], [4, 4], "global", "global-test"),
            counts([0, 0], [4, 4], "global", "global-test", rule="other"),
        ]
    }
    found = metrics_of(scores_of(given))
    assert found["a_glo_balanced"] == 5 / 8
    assert found["a_glo_balanced_minority"] == 1 / 4


def test_spread_over_clients_and_balanced_accuracy():
    """Accuracies .9, .8 … .0 of eleven clients: the worst two make a tenth, rounded up."""
    right = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10]
    scores = scores_of({c: [counts([n, 0], [10, 0])] for c, n in enumerate(right)})
    found = metrics_of(scores, profiles=dict.fromkeys(range(11), PROFILES[0]))
    assert found["a_glo_worst_tenth"] == pytest.approx((0.0 + 0.1) / 2)
    assert found["a_glo_std"] == pytest.approx(float(np.std(right)) / 10)
    classes = metrics_of(scores_of({0: [counts([30, 5], [40, 10])], 1: [counts([45, 0], [50, 0])]}))
    assert classes["a_glo_class_mean"] == pytest.approx(((0.75 + 0.5) / 2 + 0.9) / 2)
    assert "a_loc_std" not in found


def test_what_clients_tell_of_probabilities_is_averaged_and_survives_as_text():
    told = {0: {"auroc": 0.75, "ece": 0.5}, 1: {"ece": 0.25}}  # one client has one class
    scores = scores_of({c: [counts([1, 1], [2, 2])] for c in told})
    for client, each in told.items():
        of_view = rpc.Probabilities(view="global", **each)
        scores.add({client: Answer(Bundle(), rpc.Report(probabilities=[of_view]))})
    for each in (scores, Scores.from_json(scores.to_json())):
        found = metrics_of(each)
        assert (found["a_glo_auroc"], found["a_glo_ece"]) == (0.75, 0.375)
        rows = client_rows(each, 1)
        assert [rows[c]["views"]["global"].get("auroc") for c in "01"] == [0.75, None]


def test_scores_survive_as_text():
    scores = scores_of(
        {
            0: [counts([1, 2], [3, 4]), counts([3, 4], [3, 4], "after_local", "task/1")],
            EVALUATOR: [counts([1, 1], [5, 5], test_set="global-test")],
        }
    )
    scores.confusions["global"] = [[1, 2], [0, 4]]
    again = Scores.from_json(scores.to_json())
    assert again.confusions == scores.confusions
    assert again.counts.keys() == scores.counts.keys()
    assert metrics_of(again) == metrics_of(scores)
    assert client_rows(again, 3) == client_rows(scores, 3)
    assert again.to_json() == scores.to_json()


def test_confusions_add_up_over_clients():
    scores = Scores()
    for client, cells in enumerate([[1, 1, 0, 1], [2, 0, 3, 0]]):
        told = rpc.Report(confusions=[rpc.Confusion(view="global", counts=cells)])
        scores.add({client: Answer(Bundle(), told)})
    assert scores.confusions == {"global": [[3, 1], [3, 1]]}


def test_rows_of_clients():
    scores = scores_of(
        {
            0: [counts([2, 0], [4, 0]), counts([1, 1], [1, 1], test_set="task/2")],
            EVALUATOR: [counts([1, 1], [5, 5], test_set="global-test")],
        }
    )
    rows = client_rows(scores, 3)
    assert client_rows(scores, 3, [1])["0"]["views"]["global"]["minority"] == 1
    assert rows["0"]["views"]["global"] == {
        "accuracy": pytest.approx(4 / 6),
        "loss": 1.0,
        "tasks": [0.5, None, 1.0],
        "classes": [pytest.approx(3 / 5), 1.0],
    }
    assert rows["evaluator"]["views"]["global"]["accuracy"] == 0.2
    json.dumps(rows, allow_nan=False)


def test_a_row_begins_with_the_first_task_that_was_scored():
    """A record of an open run is as large after hundreds of tasks as after the first."""
    given = [
        counts([2, 0], [4, 0], test_set="task/478"),
        counts([3, 0], [4, 0], test_set="task/479"),
    ]
    found = client_rows(scores_of({0: given}), 480)["0"]["views"]["global"]
    assert (found["first_task"], found["tasks"]) == (478, [0.5, 0.75])


def test_a_view_by_its_own_name_is_scored_by_the_methods_own_rule():
    """What a run forgets is read from there: of the model as the method predicts with it."""
    own, head = counts([3, 1], [4, 4], rule="nearest"), counts([1, 0], [4, 4])
    views = client_rows(scores_of({0: [own, head]}), 1)["0"]["views"]
    assert {name: view["accuracy"] for name, view in views.items()} == {
        "global": 0.5,
        "global:classifier": 0.125,
    }


def test_a_loss_that_overflowed_is_no_number():
    given = counts([1, 1], [2, 2])
    given.loss_sum = float("inf")
    assert client_rows(scores_of({0: [given]}), 3)["0"]["views"]["global"]["loss"] is None


def test_own_test_leaves_the_global_test_set_out():
    sets = {"global-test": ClassCounts.of(np.array([0, 1]), np.array([0, 1]), 2)}
    assert own_test(sets) is None


# --- a whole run ----------------------------------------------------------------------------------


def record(round, task=0, clients=None, **metrics):
    return {
        "round": round,
        "interaction": round,
        "task": task,
        "metrics": metrics,
        "bytes": {"down": 10, "up": 20, "wire_down": 11, "wire_up": 21},
        "seconds": {"train": 1.0, "server": 0.5, "wall": 2.0},
        "cohort": [int(client) for client in clients or () if client.isdigit()],
        "clients": clients or {},
    }


def row(*tasks, view="after_local"):
    return {"views": {view: {"tasks": list(tasks)}}}


def run_of(records, view="after_local", **evaluate):
    experiment = tiny_experiment(evaluate=evaluate)
    return run_metrics(records, experiment, view) | afm_of(records, experiment)


SERIES = [record(r, a_glo=a, a_loc=1 - a) for r, a in enumerate([0.1, 0.4, 0.2, 0.3])]


@pytest.mark.parametrize(("last", "a_glo"), [(1, 0.3), (2, 0.25), (4, 0.25), (10, 0.25)])
def test_last_rounds(last, a_glo):
    found = run_of(SERIES, last_rounds=last)
    assert found["a_glo"] == pytest.approx(a_glo)
    assert found["a_loc"] == pytest.approx(1 - a_glo)


def test_a_score_that_the_last_rounds_lack_has_no_value():
    """The last cohort has no frequent class: that of an earlier one is no score of the end."""
    early = [record(0, a_loc=0.5, a_loc_trained_many=0.9, generator_ratio_3=0.7)]
    found = run_of([*early, *SERIES[1:]])
    assert "a_loc_trained_many" not in found
    assert found["generator_ratio_3"] == 0.7, "a method's own figure keeps its last value"
    assert run_of([*early, *SERIES[1:]], last_rounds=4)["a_loc_trained_many"] == 0.9


def test_rounds_that_were_not_scored_do_not_count():
    unscored = [record(4, loss=9.0), record(5, loss=9.0)]
    assert run_of([*SERIES, *unscored], last_rounds=2)["a_glo"] == pytest.approx(0.25)
    assert "loss" not in run_of([*SERIES, *unscored])


def test_the_best_round_by_personalization():
    """Generalization is that of the round with the best Personalization, ties: the earliest."""
    records = [
        record(r, a_loc=0.0, personalization=p, generalization=g, personalization_std=p / 10)
        for r, (p, g) in enumerate([(0.5, 0.9), (0.8, 0.3), (0.8, 0.7), (0.6, 1.0)])
    ]
    found = run_of(records)
    assert (found["best_personalization"], found["best_generalization"]) == (0.8, 0.3)
    assert found["best_personalization_std"] == pytest.approx(0.08)
    assert (found["personalization"], found["generalization"]) == (0.6, 1.0), "the last round's"


@pytest.mark.parametrize(
    ("select_by", "best"), [("f1", (0.7, 0.1)), ("accuracy", (0.2, 0.9))], ids=["f1", "accuracy"]
)
def test_global_scores_are_of_their_own_best_round(select_by, best):
    records = [
        record(r, a_glo=0.0, global_f1=f, a_glo_balanced=a)
        for r, (f, a) in enumerate([(0.2, 0.9), (0.7, 0.1), (0.3, 0.5)])
    ]
    found = run_of(records, select_by=select_by)
    assert (found["best_global_f1"], found["best_a_glo_balanced"]) == best
    assert (found["global_f1"], found["a_glo_balanced"]) == (0.3, 0.5)


def test_every_view_has_the_best_of_its_own_rounds():
    records = [
        record(r, a_glo=g, a_loc_received=loc, a_loc_received_pooled=p, iaa=i)
        for r, (g, loc, p, i) in enumerate(
            [(0.2, 0.9, 0.3, 0.1), (0.7, 0.1, 0.4, 0.5), (0.3, 0.5, 0.2, 0.4)]
        )
    ]
    found = run_of(records)
    best = {name: value for name, value in found.items() if name.startswith("best_")}
    assert best == {
        "best_a_glo": 0.7,
        "best_a_loc_received": 0.9,
        "best_a_loc_received_pooled": 0.4,
        "best_iaa": 0.5,
    }
    assert found["a_loc_received"] == 0.5, "the last round's"
    assert metric("best_iaa").meaning.startswith("the highest `iaa`")
    assert all(is_known(name) for name in best)


def test_aa_and_afm(tmp_path):
    """AA is the mean of the IAA series; AFM the reference's minus this run's, round by round."""
    lines = [json.dumps(record(r, iaa=a)) for r, a in enumerate([0.9, 0.8])]
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines))
    records = [record(r, a_glo=a, iaa=a) for r, a in enumerate([0.5, 0.7])]
    found = run_of(records, reference=str(tmp_path))
    assert found["aa"] == pytest.approx(0.6)
    assert found["afm"] == pytest.approx(0.25)
    assert found["iaa"] == 0.7
    assert "afm" not in run_of(records)


def test_afm_needs_the_same_rounds(tmp_path):
    """Each scored two rounds, the reference rounds 0 and 1, the run rounds 1 and 3."""
    lines = [json.dumps(record(r, iaa=0.9)) for r in (0, 1)]
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"scored 2 rounds, this run 2, and not after the same"):
        run_of([record(r, a_glo=0.5, iaa=0.5) for r in (1, 3)], reference=str(tmp_path))


@pytest.mark.parametrize(
    ("scored", "every", "fits", "how"),
    [((1, 3), 2, True, {}), ((0, 1, 2, 3), 1, True, {}), ((1, 3), 1, False, {}),
     ((0, 1, 2, 3), 1, True, BUFFER), ((0, 1), 1, False, BUFFER)],
)  # fmt: skip
def test_a_reference_of_other_rounds_is_refused_at_the_start(tmp_path, scored, every, fits, how):
    """Of four rounds, those that the reference scored have to be those that the run will score."""
    lines = [json.dumps(record(r, iaa=0.9)) for r in scored]
    (tmp_path / "rounds.jsonl").write_text("\n".join(lines))
    experiment = tiny_experiment(
        schedule={"rounds": 4, "clients": 2, **how},
        evaluate={"reference": str(tmp_path), "every": every},
    )
    planned = steps(experiment, [0, 1], {0: 1, 1: 1})
    refused = pytest.raises(DataError, match=rf"scored {len(scored)} rounds, this run 4")
    with nullcontext() if fits else refused:
        check_reference(experiment, planned)


def test_what_depends_on_how_often_one_evaluates_says_so():
    """Of two tasks with two rounds each, the first round of each is scored, and the last."""
    every = [record(r, r // 2, {"0": row(*[0.5] * (r // 2 + 1))}, iaa=0.1 * r) for r in range(4)]
    found = run_of(every)
    assert {"aa", "forgetting"} <= found.keys()
    assert not {"aa_scored", "forgetting_scored"} & found.keys()
    some = [each if r != 1 else record(1, 0, {"0": {"loss": 1.0}}) for r, each in enumerate(every)]
    found = run_of(some)
    assert found["aa_scored"] == pytest.approx((0.0 + 0.2 + 0.3) / 3)
    assert "forgetting_scored" in found
    assert not {"aa", "forgetting"} & found.keys()


def test_a_sel_is_there_where_clients_are_selected():
    records = [record(0, a_loc=0.5, a_sel=0.4)]
    assert "a_sel" not in run_of(records)
    selecting = tiny_experiment(schedule={"clients": 4, "per_round": 2})
    assert run_metrics(records, selecting, "after_local")["a_sel"] == 0.4


def test_a_sel_by_task():
    """The mean of the cohort after task K, over its last scored rounds; others do not count."""
    accuracies = {0: (0.1, 0.3), 1: (0.5, 0.6), 2: (0.9, 0.8), 3: (0.7, 0.6)}
    records = [
        {
            **record(place, place % 2, {str(c): scored_as(a) for c in range(3)}),
            "cohort": [0, 1],
        }
        for place, a in accuracies.items()
    ]
    records[3]["clients"]["2"] = scored_as((0.0, 0.0))
    records.append({**record(4, 0, {"0": {"loss": 1.0}}), "cohort": [0]})
    how = {"schedule": {"clients": 3, "per_round": 2}}
    last = run_metrics(records, tiny_experiment(**how), "after_local")
    how["evaluate"] = {"last_rounds": 10}
    whole = run_metrics(records, tiny_experiment(**how), "after_local")
    names = ["a_sel_received_task_0", "a_sel_received_task_1"]
    assert [whole[name] for name in names] == pytest.approx([0.5, 0.6])
    names = ["a_sel_trained_task_0", "a_sel_trained_task_1"]
    assert [whole[name] for name in names] == pytest.approx([0.55, 0.6])
    assert [last[name] for name in names] == pytest.approx([0.8, 0.6])
    one_task = run_metrics(records[::2], tiny_experiment(**how), "after_local")
    assert not any(name.startswith("a_sel_") for name in one_task)
    assert not any(name.startswith("a_sel_") for name in run_of(records))


def test_a_sel_of_rare_classes_by_task():
    """Clients 0 and 1 are the cohort: .2 and .4 after task 0; client 1 has no rare example then."""
    views = [{"accuracy": 0.9, "minority": m} for m in (0.2, None, 0.9, 0.4, 0.6, 0.9)]
    rows = [
        {str(c): {"views": {"after_local": views[3 * t + c]}} for c in range(3)} for t in (0, 1)
    ]
    records = [{**record(t, t, rows[t]), "cohort": [0, 1]} for t in (0, 1)]
    selecting = tiny_experiment(schedule={"clients": 3, "per_round": 2})
    found = run_metrics(records, selecting, "after_local")
    assert found["a_sel_trained_minority_task_0"] == pytest.approx(0.2)
    assert found["a_sel_trained_minority_task_1"] == pytest.approx(0.5)
    assert found["a_sel_trained_task_0"] == pytest.approx(0.9)


def scored_as(accuracies):
    views = zip(("after_downlink", "after_local"), accuracies, strict=True)
    return {"views": {view: {"accuracy": a, "tasks": [a]} for view, a in views}}


def test_a_reference_that_is_none(tmp_path):
    with pytest.raises(DataError, match="is no run directory"):
        iaa_series(tmp_path / "nothing")
    (tmp_path / "rounds.jsonl").write_text(json.dumps(record(0)))
    with pytest.raises(DataError, match="has no IAA series"):
        iaa_series(Path(tmp_path))
    iaa = '{"interaction": 0, "metrics": {"iaa": "high"}}'
    for damaged in (b'{"interaction": 0', b"[1]", b"{}", b"\xff", iaa.encode()):
        (tmp_path / "rounds.jsonl").write_bytes(damaged)
        with pytest.raises(DataError, match=r"rounds\.jsonl is damaged"):
            iaa_series(tmp_path)


def test_accuracy_lost():
    """On task j since the last round of task i, over the clients that have both figures."""
    records = [
        record(0, 0, {"0": row(0.1), "1": row(0.1)}),
        record(1, 0, {"0": row(0.8), "1": row(0.6)}),
        record(2, 1, {"0": row(0.0, 0.0)}),
        record(3, 1, {"0": row(0.5, 1.0), "1": row(0.3, None), "evaluator": {"views": {}}}),
    ]
    lost = accuracy_lost(records, "after_local")
    np.testing.assert_allclose(lost, [[0.3, np.nan], [0.0, 0.0]], atol=1e-12)
    found = run_of(records)
    assert found["forgetting"] == found["forgetting_trained"] == pytest.approx(0.3)
    assert "forgetting_received" not in found


def test_models_that_stay_as_they_are_forget_nothing_whoever_is_scored():
    """Rounds that select clients score the cohort after a task, and everybody at the end."""
    strong, weak, idle = row(0.9), row(0.3), {"loss": 1.0}
    records = [
        record(0, 0, {"0": strong, "1": idle}),
        record(1, 1, {"0": row(0.9, 0.5), "1": row(0.3, 0.5)}),
    ]
    assert run_of(records)["forgetting"] == 0.0
    records[0]["clients"] = {"1": weak}
    records[1]["clients"]["1"] = row(0.1, 0.5)
    assert run_of(records)["forgetting"] == pytest.approx(0.2), "client 1's alone"
    records[0]["clients"] = {"2": weak}
    assert "forgetting" not in run_of(records), "nobody is scored at both times"


def test_accuracy_lost_of_tasks_within_each_round():
    """With every task in every round, only the last round's tasks count."""
    records = [
        record(r, task, {"0": row(*[0.1 * (r + 1 - task)] * (task + 1))})
        for r in range(2)
        for task in range(2)
    ]
    lost = accuracy_lost(records, "after_local")
    np.testing.assert_allclose(lost, [[0.1, np.nan], [0.0, 0.0]])


def test_accuracy_lost_falls_back_on_the_global_model():
    records = [record(t, t, {"0": row(*[0.5] * (t + 1), view="global")}) for t in range(3)]
    assert accuracy_lost(records, "after_local").shape == (3, 3)
    assert "forgetting_trained" not in run_of(records)
    assert run_of(records)["forgetting_received"] == 0.0


def test_clients_that_did_not_train_are_not_scored_as_just_trained():
    """Client 1 is scored by everyone's model in round 1: that is no model just trained."""
    own, other = row(0.8), row(0.5, 0.9)
    idle = row(0.1, 0.1, view="global")
    records = [record(0, 0, {"0": own, "1": own}), record(1, 1, {"0": other, "1": idle})]
    np.testing.assert_allclose(
        accuracy_lost(records, "after_local"), [[0.3, np.nan], [0.0, 0.0]], atol=1e-12
    )
    assert run_of(records)["forgetting_trained"] == pytest.approx(0.3)


def test_no_forgetting_with_one_task_or_no_scores():
    assert "forgetting" not in run_of([record(0, 0, {"0": row(0.5)}, a_glo=0.5)])
    assert run_of([record(0, clients={"0": {"loss": 1.0}})]) == {}
    assert accuracy_lost([], "global").shape == (0, 0)


def test_summary():
    rows = {"0": {"num_examples": 10, "peak_rss_bytes": 7}, "1": {"num_examples": 5}, "2": {}}
    records = [record(r, clients=rows, a_glo=0.1 * r) for r in range(4)]
    experiment = tiny_experiment(training={"local_epochs": 2})
    found = summarise(records, experiment, "after_local", "digest", lambda: [100])
    json.dumps(found, allow_nan=False)
    assert found["metrics"] == pytest.approx({"a_glo": 0.3, "best_a_glo": 0.3})
    assert found["bytes"] == {"down": 40, "up": 80, "wire_down": 44, "wire_up": 84}
    assert found["seconds"] == {"train": 4.0, "server": 2.0, "wall": 8.0}
    assert found["compute"] == {
        "macs_per_example": 100,
        "training_macs": 3 * 100 * 2 * 4 * 15,
        "peak_client_rss_bytes": 7,
    }
    facts = ("format", "method", "data", "scenario", "seed", "rounds", "state_sha256")
    assert [found[key] for key in facts] == [
        2, "fedavg", "digits", "per_class_shards", 0, 4, "digest",
    ]  # fmt: skip


def test_a_figure_that_cannot_be_computed_is_missing_and_fails_no_run(tmp_path):
    """The reference has gone since the run began, and the net cannot be counted."""
    experiment = tiny_experiment(evaluate={"reference": str(tmp_path / "gone")})
    records = [record(r, clients={}, a_glo=0.1, iaa=0.2) for r in range(2)]

    def fails():
        raise ValueError("Expected more than 1 value per channel\nand more")

    afm = {"afm": partial(afm_of, experiment=experiment)}
    found = summarise(records, experiment, "after_local", "digest", fails, of_parts=afm)
    assert found["metrics"] == pytest.approx(
        {"a_glo": 0.1, "iaa": 0.2, "aa": 0.2, "best_a_glo": 0.1, "best_iaa": 0.2}
    )
    assert found["compute"] == {"peak_client_rss_bytes": 0}
    assert (
        found["figures_missing"]["compute"] == "ValueError: Expected more than 1 value per channel"
    )
    assert "is no run directory" in found["figures_missing"]["afm"]
    records[0]["clients"] = {"0": {"views": "damaged"}}
    assert "metrics" in summarise(records, experiment, "x", "digest", fails)["figures_missing"]


def test_the_global_test_set_is_what_most_scored_on():
    """Nobody announces it: whoever scored on another one has no score on it."""

    def on(*support):
        return [counts([1, 1], support, "after_local", "global-test")]

    scores = scores_of({0: on(9, 9), 1: on(4, 4), 2: on(4, 4)})
    assert scores.settle_global_test() == [0]
    assert metrics_of(scores)["a_loc_trained_balanced"] == pytest.approx(2 / 8)
    assert scores.settle_global_test() == []
    scores = scores_of({0: on(9, 9), EVALUATOR: on(4, 4)})
    assert scores.settle_global_test() == [0], "the evaluator's counts where as many say otherwise"
    assert Scores().settle_global_test() == []


def test_a_row_is_as_long_as_what_was_scored():
    """However it came in, no number of a record says how much memory to take."""
    scores = scores_of({0: [counts([1], [2]), counts([1], [1], test_set="task/30000000000")]})
    assert client_rows(scores, 3)["0"]["views"]["global"]["tasks"] == [0.5]
