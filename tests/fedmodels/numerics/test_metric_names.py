"""One table of metrics: every name means one thing, and old names lead to it."""

import pytest

from fedmodels.numerics.metric_names import (
    METRICS,
    RETIRED,
    current,
    find,
    is_known,
    metric,
)
from fedmodels.numerics.metric_tables import is_written_by_runs


def test_endings_say_on_what_and_over_which_classes():
    found = metric("a_loc_received_balanced_minority")
    assert found.title == "clients' models, as received, on the global test set, rare classes"
    assert (found.unit, found.better) == ("%", 1)
    assert metric("a_glo_gldp_lp").title.endswith("by local prototypes")
    assert metric("best_a_glo_balanced").title.startswith("round that is best on test data")
    assert metric("replay_acceptance_7").title == "replayed images accepted, class 7"


@pytest.mark.parametrize(
    ("name", "unit", "better"),
    [
        ("a_glo", "%", 1),
        ("a_loc_minority", "%", 1),
        ("afm", "%", -1),
        ("forgetting", "%", -1),
        ("personalization_std", "%", 0),
        ("loss", "", -1),
        ("fid_of_my_own", "", 0),
    ],
)
def test_units_and_directions(name, unit, better):
    assert (metric(name).unit, metric(name).better) == (unit, better)


def test_what_the_tables_do_not_have():
    assert metric("a_glo_mine").title == "global model, clients' test data, by mine"
    assert not is_known("a_glo_mine")
    assert not is_known("fid_of_my_own")
    assert is_known("a_loc_trained_balanced_minority")
    title = "selected clients' models, just trained, after task 3"
    assert metric("a_sel_trained_task_3").title == title
    assert is_written_by_runs("a_sel_trained_task_3")


def test_no_two_names_for_one_thing():
    texts = [(m.title, m.meaning) for m in METRICS.values()]
    assert len(set(texts)) == len(texts)
    assert not {"bwt", *RETIRED} & METRICS.keys()


def test_old_summaries_read_under_the_new_names():
    """Old runs took these from the best round, and kept the last round's as ``…_last``."""
    old = {
        "a_glo_few": 0.2, "a_glo_minority": 0.1, "bwt": -0.3, "forgetting": 0.25,
        "personalization": 0.8, "personalization_std": 0.1, "personalization_last": 0.6,
        "personalization_acc": 0.7, "global_f1": 0.5, "global_f1_last": 0.4,
        "global_acc": 0.9, "global_acc_last": 0.85,
    }  # fmt: skip
    assert current(old) == {
        "a_glo_minority": 0.1, "forgetting": 0.25, "best_personalization": 0.8,
        "best_personalization_std": 0.1, "personalization": 0.6, "a_loc_trained": 0.7,
        "best_global_f1": 0.5, "global_f1": 0.4, "best_a_glo_balanced": 0.9, "a_glo_balanced": 0.85,
    }  # fmt: skip
    assert current(current(old)) == current(old)


@pytest.mark.parametrize(
    ("name", "stayed", "value"),
    [
        ("a_glo_few", "a_glo_minority", 0.1),
        ("global_acc", "a_glo_balanced", 0.2),
        ("bwt", "forgetting", -0.3),
        ("a_sel", "a_loc", 0.4),
    ],
)
def test_an_old_name_is_answered_with_a_warning(name, stayed, value):
    metrics = {"a_glo_minority": 0.1, "a_glo_balanced": 0.2, "forgetting": 0.3, "a_loc": 0.4}
    with pytest.warns(FutureWarning, match=f"the metric {name} is now {stayed}"):
        assert find(metrics, name) == value
    assert find(metrics, stayed) == abs(value)
    assert find(metrics, "afm") is None
