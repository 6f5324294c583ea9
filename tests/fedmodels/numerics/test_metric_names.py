"""One table of metrics: every name means one thing."""

import pytest

from fedmodels.numerics.metric_names import OF_TARGETS, OF_UPLOADS, is_written_by_runs
from fedmodels.numerics.metric_tables import (
    FIGURES,
    METRICS,
    REPORTED,
    SCORES,
    UPLOADS,
    is_known,
    metric,
)


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


def test_runs_know_the_names_that_the_tables_explain():
    assert [each.name for each in UPLOADS] == [*OF_UPLOADS]
    assert [*FIGURES] == [*OF_TARGETS]
    assert all(is_written_by_runs(each.name) for each in SCORES)
    of_runs = {each.name for each in REPORTED if is_written_by_runs(each.name)}
    assert of_runs == {*OF_UPLOADS, "loss", "prototype_drift"}
