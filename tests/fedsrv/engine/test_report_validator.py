"""What a report may say, field by field."""

import json
import math
from dataclasses import replace

import pytest

from fedmodels.config.privacy import Privacy
from fedmodels.errors import PayloadError
from fedmodels.methods import make
from fedmodels.tensors.bundle import EVALUATOR, Problem
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.schedule import steps
from fedsrv.parts.refused_models import line_of
from tests.conftest import tiny_experiment

TRAIN, TEST = [[5, 3], [0, 4]], [[2, 1], [0, 0]]
HALVES = "0123456789abcdef" * 4


def terms_of(name="fedavg", **switches):
    experiment = tiny_experiment(method={"name": name, **switches})
    tasks = [{"train": a, "test": b} for a, b in zip(TRAIN, TEST, strict=True)]
    text = json.dumps({"format": 1, "input_shape": [4], "num_classes": 2, "tasks": tasks})
    profiles = {c: Profile.parse(c, text) for c in range(3)}
    visits = steps(experiment, range(3), dict.fromkeys(range(3), 2))
    run = RunFacts(experiment, Problem((4,), 2))
    return ReportValidator(make(name, **switches), run, profiles, visits)


def order(kind=rpc.ORDER_KIND_TRAIN, views=("after_local",), interaction=0, **facts):
    given = {"tasks_seen": 2, **facts}
    return rpc.Order(kind=kind, views=views, interaction=interaction, **given)


ASKED = order(confusion=True)
EVALUATE = order(rpc.ORDER_KIND_EVALUATE, ("global",))
FINISH = order(rpc.ORDER_KIND_FINISH, ())


def counts(test_set="task/0", view="after_local", rule="classifier", **facts):
    given = {"support": [2, 1], "predicted": [1, 2], "correct": [1, 1], "loss_sum": 2.5, **facts}
    return rpc.Counts(view=view, rule=rule, test_set=test_set, **given)


def empty(test_set="task/1", **facts):
    nobody = {"support": [0, 0], "predicted": [0, 0], "correct": [0, 0], "loss_sum": 0.0}
    return counts(test_set, **{**nobody, **facts})


def confusion(view="after_local", counts=(1, 1, 0, 1)):
    """Return what fits :func:`counts`: one example of class 0 is taken for class 1."""
    return rpc.Confusion(view=view, counts=counts)


def report(*given, **facts):
    return rpc.Report(counts=given, **facts)


def test_reports_as_they_should_be():
    terms = terms_of()
    terms.check_report(0, order(), report(counts(), empty(), num_examples=8, loss=0.5))
    terms.check_report(0, order(interaction=1), report(num_examples=4, seconds=3.5))
    terms.check_report(0, order(), report(num_examples=8, skipped_examples=8, loss=math.nan))
    terms.check_report(0, order(), report(loss=math.nan))  # no step was made
    terms.check_report(0, order(), report(counts(loss_sum=math.inf)))  # a class was ruled out
    terms.check_report(0, FINISH, report(state_sha256=HALVES))
    terms.check_report(EVALUATOR, FINISH, report())
    of_all = counts("global-test", "global", support=[200, 300], predicted=[250, 250])
    terms.check_report(EVALUATOR, EVALUATE, report(of_all))
    asked = order(confusion=True)
    terms.check_report(0, asked, report(counts(), empty(), confusions=[confusion()]))
    terms.check_report(0, asked, report(counts()))  # a client need not count it
    shown = order(views=("after_local",), global_test=True)
    mine = counts("global-test", support=[200, 300], predicted=[250, 250])
    terms.check_report(0, shown, report(counts(), mine))


def test_the_methods_own_rules_and_numbers():
    rules = [counts(rule=rule) for rule in ("nearest", "all_classes", "classifier")]
    terms_of("fedproto").check_report(0, order(), report(*rules))
    terms_of("fedproto").check_report(0, order(), report(rules[0]))
    with pytest.raises(PayloadError, match="rule 'classifier' out of place"):
        terms_of("fedproto").check_report(0, order(), report(*rules[::-1]))
    terms_of("apfl").check_report(0, order(), report(extra={"alpha": 0.5}))
    own = {"generator_ratio_1": 0.5, "replay_examples": 3.0}
    terms_of("pfedgrp").check_report(0, order(), report(extra=own, num_examples=8 + 2 * 5))
    with pytest.raises(PayloadError, match="generator_ratio_2"):
        terms_of("pfedgrp").check_report(0, order(), report(extra={"generator_ratio_2": 0.5}))
    terms_of("centralized", data="own").check_report(
        0, order(interaction=1), report(num_examples=12)
    )


def test_a_client_that_came_late_may_have_fewer_tasks_than_the_schedule_gave_it():
    """Nobody knew client 2 at the start, so it counted as one with two tasks; it has one."""
    terms = terms_of()
    tasks = [{"train": TRAIN[0], "test": TEST[0]}]
    text = json.dumps({"format": 1, "input_shape": [4], "num_classes": 2, "tasks": tasks})
    terms.profiles[2] = Profile.parse(2, text)
    again = terms.steps[2]
    assert (again.task, 2 in terms.steps[1].cohort) == (0, True)
    told = order(interaction=again.interaction, tasks_seen=1)
    terms.check_report(2, told, report(counts(), num_examples=8))
    assert terms.announced(2, again).trained.tolist() == [10, 6], "twice task 0, never task 1"


def test_what_a_client_was_ordered_to_train_does_not_depend_on_what_was_asked_before():
    one_by_one = terms_of()
    for step in (*one_by_one.steps, one_by_one.steps[1]):  # onwards, and back
        for client in (0, 2):
            asked, alone = (t.announced(client, step) for t in (one_by_one, terms_of()))
            sums = [each.trained.tolist() for each in (asked, alone)]
            assert sums[0] == sums[1], (step, client)
            assert (asked.now.tolist(), asked.met.tolist()) == (
                alone.now.tolist(), alone.met.tolist(),
            )  # fmt: skip


def test_what_was_trained_as_one_class_stays_counted_when_it_is_part_of_another():
    """A client that says how much it has trained of class 0 goes on saying so."""
    terms = terms_of()
    one = replace(terms, run=replace(terms.run, merged=((0, 1),)))
    alone, found = (each.announced(0, each.steps[1]) for each in (terms, one))
    assert alone.trained.tolist() != found.trained.tolist() == [alone.trained[1]] * 2
    assert found.now.tolist() == alone.now.tolist()


LIES = {
    "no-number": (order(), report(counts("task/x")), "unknown test set 'task/x'"),
    "far-away": (order(), report(counts("task/30000000")), "unknown test set"),
    "not-met": (order(tasks_seen=1), report(empty()), "unknown test set 'task/1'"),
    "not-there": (order(tasks_seen=9), report(empty("task/2")), "unknown test set 'task/2'"),
    "written-otherwise": (order(), report(counts("task/00")), "unknown test set 'task/00'"),
    "global": (order(), report(counts("global-test")), "unknown test set 'global-test'"),
    "global-view": (
        order(rpc.ORDER_KIND_EVALUATE, ("global",), global_test=True),
        report(counts("global-test", "global")), "unknown test set",
    ),
    "two-global": (
        order(views=("after_local", "after_downlink"), global_test=True),
        report(counts("global-test"), empty("global-test", view="after_downlink")), "two global",
    ),
    "another-view": (order(), report(counts(view="global")), "unknown view 'global'"),
    "no-view": (order(views=()), report(counts()), "more scores than were ordered"),
    "another-rule": (order(), report(counts(rule="c:")), "rule 'c:' out of place"),
    "twice": (order(), report(counts(), counts()), "rule 'classifier' out of place"),
    "rules": (order(), report(*[counts(rule=str(n)) for n in range(9000)]), "more scores"),
    "support": (order(), report(counts(support=[1, 2])), "other examples of task/0 than announced"),
    "classes": (order(), report(counts(support=[3])), "other than 2 classes"),
    "predicted": (order(), report(counts(predicted=[1, 1])), "contradict"),
    "correct": (order(), report(counts(correct=[1, 2])), "contradict"),
    "negative": (order(), report(counts(support=[-1, 4], predicted=[1, 2])), "contradict"),
    "many": (order(), report(counts(support=[2**62, 0], predicted=[2**62, 0])), "contradict"),
    "confusion": (order(), report(counts(), confusions=[confusion()]), "were not requested"),
    "two-confusions": (ASKED, report(counts(), confusions=[confusion()] * 2), "were not requested"),
    "no-counts": (ASKED, report(confusions=[confusion(counts=[0] * 4)]), "contradicts its counts"),
    "view-of-confusion": (
        ASKED, report(counts(), confusions=[confusion("x", [0] * 4)]), "contradicts its counts",
    ),
    "size-of-confusion": (
        ASKED, report(counts(), confusions=[confusion(counts=[1, 1, 0])]), "not of 2 classes",
    ),
    "sums-of-confusion": (
        ASKED, report(counts(), confusions=[confusion(counts=[0, 2, 1, 0])]), "contradicts",
    ),
    "negative-confusion": (
        ASKED, report(counts(), confusions=[confusion(counts=[2, 0, -1, 2])]), "contradicts",
    ),
    "huge-confusion": (
        ASKED, report(counts(), confusions=[confusion(counts=[2**63 - 1] * 4)]), "contradicts",
    ),
    "loss-sum": (order(), report(counts(loss_sum=-1.0)), "impossible loss"),
    "huge-loss-sum": (order(), report(counts(loss_sum=1e300)), "impossible loss"),
    "views": (order(), report(extra={"views": 1.0}), "holds 'views', unknown to the method"),
    "reserved": (order(), report(extra={"num_examples": 1.0}), "holds 'num_examples'"),
    "unknown": (order(), report(extra={"x" * 10_000: 1.0}), "holds 'x{50}', unknown"),
    "extra": (EVALUATE, report(extra={"alpha": 1.0}), "holds 'alpha'"),
    "examples": (order(), report(num_examples=2**62), "at most 8 examples were announced"),
    "one-more": (order(), report(num_examples=9), "at most 8 examples were announced"),
    "other-task": (order(interaction=1), report(num_examples=5), "at most 4 examples"),
    "skips": (order(), report(num_examples=8, skipped_examples=9), "leaves out more examples"),
    "skips-less": (order(), report(num_examples=8, skipped_examples=-1), "leaves out more"),
    "skips-in-scoring": (EVALUATE, report(skipped_examples=1), "leaves out more examples"),
    "fewer": (order(), report(num_examples=-1), "number of examples is -1"),
    "not-trained": (EVALUATE, report(num_examples=1), "at most 0 examples"),
    "loss": (order(), report(loss=1e300), "'loss' is 1e\\+300"),
    "seconds": (order(), report(seconds=1e300), "impossible seconds"),
    "no-seconds": (order(), report(seconds=math.nan), "impossible seconds"),
    "memory": (order(), report(peak_rss_bytes=-1), "impossible seconds or bytes"),
    "digest": (FINISH, report(state_sha256="0" * 63 + "g"), "no digest of a state"),
    "line": (FINISH, report(state_sha256=HALVES + "\n"), "no digest of a state"),
    "no-digest": (FINISH, report(), "no digest of a state"),
    "early-digest": (order(), report(state_sha256=HALVES), "digest that was not requested"),
}  # fmt: skip


@pytest.mark.needs("drift")
@pytest.mark.parametrize(
    ("asks", "told", "line"),
    [
        (False, {}, "'input_drift[_p]*', unknown to the method"),
        (True, {"input_drift": 1.01}, "'input_drift' is 1.01, not from 0 to 1"),
        (True, {"input_drift": -0.1}, "not from 0 to 1"),
        (True, {"input_drift_p": math.nan}, "not from 0 to 1"),
        (True, {"input_drift_p": None}, "holds 'input_drift' without 'input_drift_p'"),
        (True, {"input_drift": None}, "holds 'input_drift_p' without 'input_drift'"),
        (True, {"prediction_drift_number": 0.0}, "without 'prediction_drift'"),
        (True, {"input_drift_number": -1.0}, "is -1, no place in a list of "),
        (True, {"input_drift_number": 0.5}, "is 0.5, no place in a list of "),
        (True, {"input_drift_number": math.inf}, "is inf, no place in a list of "),
        (True, {"input_drift_number": 3e38}, r"is 3e\+38, no place in a list of "),
        (True, {"input_drift_number": 4.0}, ""),
        (True, {}, ""),
    ],
)
def test_drift_is_asked_for_and_has_bounds(asks, told, line):
    terms = terms_of()
    evaluate = terms.run.experiment.evaluate.model_copy(update={"drift": asks})
    experiment = terms.run.experiment.model_copy(update={"evaluate": evaluate})
    terms = replace(terms, run=replace(terms.run, experiment=experiment))
    figures = {"input_drift": 1.0, "input_drift_p": 0.5, **told}
    extra = {name: value for name, value in figures.items() if value is not None}
    said = report(counts(), empty(), extra=extra)
    if not line:
        return terms.check_report(0, order(), said)
    with pytest.raises(PayloadError, match=line):
        terms.check_report(0, order(), said)


@pytest.mark.parametrize(
    ("hides", "told", "line"),
    [
        (False, 1.0, "'epsilon', unknown to the method"),
        (True, -1.0, "'epsilon' is -1, not a number from 0 on"),
        (True, math.nan, "not a number from 0 on"),
        (True, math.inf, "not a number from 0 on"),
        (True, 1.0, ""),
    ],
)
def test_what_was_spent_is_told_where_examples_are_hidden(hides, told, line):
    terms = terms_of()
    table = Privacy(level="example", noise_multiplier=1.0, delta=0.1) if hides else None
    experiment = terms.run.experiment.model_copy(update={"privacy": table})
    terms = replace(terms, run=replace(terms.run, experiment=experiment))
    said = report(
        counts(), empty(), extra={"epsilon": told, **({"epsilon_next": 2.0} if hides else {})}
    )
    if not line:
        return terms.check_report(0, order(), said)
    with pytest.raises(PayloadError, match=line):
        terms.check_report(0, order(), said)


@pytest.mark.parametrize("name", ["epsilon", "epsilon_next"])
def test_what_was_spent_may_not_be_left_out(name):
    """The coordinator stops a run by it, and would take a missing one for nothing."""
    table = Privacy(level="example", noise_multiplier=1.0, delta=0.1)
    terms = terms_of()
    experiment = terms.run.experiment.model_copy(update={"privacy": table})
    terms = replace(terms, run=replace(terms.run, experiment=experiment))
    spent = {key: 1.0 for key in ("epsilon", "epsilon_next") if key != name}
    with pytest.raises(PayloadError, match=f"does not say what was spent: '{name}' is missing"):
        terms.check_report(0, order(), report(counts(), empty(), extra=spent))
    with pytest.raises(PayloadError, match="'epsilon' is missing"):
        terms.check_report(0, order(), report(counts(), empty(), num_examples=8))


@pytest.mark.parametrize("name", LIES)
def test_what_a_report_may_not_say(name):
    asked, said, line = LIES[name]
    with pytest.raises(PayloadError, match=line) as caught:
        terms_of("apfl" if name in ("reserved", "views") else "fedavg").check_report(0, asked, said)
    assert len(str(caught.value)) < 200


def test_what_is_kept_for_validation_is_scored_where_the_config_says_so():
    part = {"name": "digits", "validation_share": 0.5}
    terms = terms_of()
    kept = replace(terms, run=RunFacts(tiny_experiment(data=part), terms.run.problem))
    most = [int(n) for n in terms.profiles[0].train[0]]
    scored = counts("validation/0", support=most, predicted=most, correct=most)
    with pytest.raises(PayloadError, match="unknown test set 'validation/0'"):
        terms.check_report(0, order(), report(counts(), scored))
    kept.check_report(0, order(), report(counts(), scored))
    over = [n + 1 for n in most]
    scored = counts("validation/0", support=over, predicted=over, correct=over)
    with pytest.raises(PayloadError, match="more examples of validation/0 than announced"):
        kept.check_report(0, order(), report(counts(), scored))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([{"view": "after_local", "ece": 1.5}], "impossible auroc or ece"),
        ([{"view": "after_local", "auroc": -0.1}], "impossible auroc or ece"),
        ([{"view": "after_local", "auroc": math.nan}], "impossible auroc or ece"),
        ([{"view": "after_local"}] * 2, "that were not requested"),
        ([{"view": "global"}], "that were not requested"),
    ],
)
def test_what_a_report_may_not_say_of_probabilities(told, said):
    terms = terms_of()
    asks = tiny_experiment(evaluate={"probabilities": True})
    asking = replace(terms, run=RunFacts(asks, terms.run.problem))
    fine = report(counts(), probabilities=[rpc.Probabilities(view="after_local", auroc=1, ece=0)])
    asking.check_report(0, order(), fine)
    with pytest.raises(PayloadError, match="that were not requested"):
        terms.check_report(0, order(), fine)
    found = [rpc.Probabilities(**each) for each in told]
    with pytest.raises(PayloadError, match=said):
        asking.check_report(0, order(), report(counts(), probabilities=found))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([{"values": {"mae": math.nan}}], "figure 'mae' is nan"),
        ([{"values": {"mae": math.inf}}], "figure 'mae' is inf"),
        ([{"values": {"mae": -1.0}}], "figure 'mae' is -1"),
        ([{"values": {"r2": 1.5}}], "figure 'r2' is 1.5"),
        ([{"values": {"auroc": 0.5}}], "figure 'auroc'"),
        ([{"values": {"pinball": 0.5}}], "figure 'pinball'"),
        ([{"view": "global"}], "of what was not scored"),
        ([{"test_set": "global-test"}], "of what was not scored"),
        ([{}, {}], "of what was not scored"),
    ],
)
def test_what_a_report_may_not_say_of_targets(told, said):
    terms = terms_of()
    data = {"name": "table", "root": "table.csv", "columns": {"target": "price"}}
    experiment = tiny_experiment(data=data, scenario={"kind": "natural"}, net={"name": "mlp"})
    asking = replace(terms, run=RunFacts(experiment, terms.run.problem))
    of_task = {"view": "after_local", "test_set": "task"}
    fine = report(counts(), figures=[rpc.Figures(**of_task, values={"mae": 2.5, "r2": -3.0})])
    asking.check_report(0, order(), fine)
    with pytest.raises(PayloadError, match="of what was not scored"):
        terms.check_report(0, order(), fine)
    found = [rpc.Figures(**{**of_task, **each}) for each in told]
    with pytest.raises(PayloadError, match=said):
        asking.check_report(0, order(), report(counts(), figures=found))


def test_what_a_report_may_say_of_a_model_that_was_refused():
    """The order is of round 0: there is no later model."""
    terms = terms_of()
    for fine in ({}, {"accuracy": 0.5, "live": 1.0}, {"accuracy": 0.5}):
        terms.check_report(0, order(), report(counts(), refused_model=rpc.RefusedModel(**fine)))
    line = line_of(3, rpc.RefusedModel(accuracy=0.5))
    assert line.endswith("it names 50.0 % of the client's own examples rightly"), "none is live"
    wrong = ({"round": 1}, {"round": -1}, {"accuracy": 1.5}, {"live": -0.1}, {"live": math.nan})
    for told in wrong:
        with pytest.raises(PayloadError, match="impossible model that was refused"):
            terms.check_report(0, order(), report(counts(), refused_model=rpc.RefusedModel(**told)))


def test_what_the_evaluator_may_not_say():
    with pytest.raises(PayloadError, match="unknown test set 'task/0'"):
        terms_of().check_report(EVALUATOR, EVALUATE, report(counts(view="global")))
    both = order(rpc.ORDER_KIND_EVALUATE, ("global", "after_downlink"))
    with pytest.raises(PayloadError, match="unknown view 'after_downlink'"):
        terms_of().check_report(EVALUATOR, both, report(counts("global-test", "after_downlink")))
