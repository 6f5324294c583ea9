"""``[privacy] announce``: what clients tell of class counts, and what is checked without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fedcli.data.store.client_data import ClientData
from fedcli.joining import count_detail_in
from fedcli.runtime.worker import Result
from fedmodels.errors import ConfigError, LinkError, PayloadError
from fedmodels.facts.data_description import ClientFile, TaskCounts
from fedmodels.tensors.bundle import Problem
from fedmodels.training.asked import check_announcement
from fedmodels.training.run import RunFacts
from fedpb.tables import client_json_of, description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.schedule import Step
from fedtide.inprocess import run_in_process
from tests.conftest import method_of, tiny_experiment

TASKS = (TaskCounts(train=(0, 5, 8, 1, 0), test=(0, 3, 2, 0, 0)),)
FILE = ClientFile(input_shape=(4,), num_classes=5, tasks=TASKS)


def experiment_of(how: str, **more: Any) -> Any:
    return tiny_experiment(privacy={"announce": how}, **more)


def test_what_is_announced():
    assert FILE.told("exact") is FILE
    assert [(t.train, t.test) for t in FILE.told("rounded").tasks] == [
        ((0, 8, 8, 1, 0), (0, 4, 2, 0, 0))
    ]
    assert [(t.train, t.test) for t in FILE.told("none").tasks] == [
        ((14, 0, 0, 0, 0), (5, 0, 0, 0, 0))
    ]
    assert "counted" not in json.loads(FILE.text())
    told = FILE.told("rounded").text("transform")
    assert json.loads(client_json_of(description_of(told))) == json.loads(told)


def test_a_run_learns_the_same_whatever_is_announced(digits, tmp_path):
    found, sent = {}, list[Result]()
    for how in ("exact", "rounded", "none"):
        out = tmp_path / how
        experiment = experiment_of(how, schedule={"rounds": 1})
        found[how] = run_in_process(experiment, digits, out, evaluator=True, after=sent.append)
    assert len({summary["state_sha256"] for summary in found.values()}) == 1
    exact, rounded, none = (found[how]["metrics"] for how in found)
    for metrics in (rounded, none):
        assert {"a_glo", "a_loc_trained", "a_glo_balanced", "forgetting"} <= metrics.keys()
        assert {"personalization", "global_f1", "a_glo_class_mean"} & metrics.keys() == set()
        for name in metrics.keys() - {"iaa", "aa", "best_iaa", "best_aa"}:
            assert metrics[name] == exact[name], name
    assert none["iaa"] == exact["iaa"], "sums of tasks weigh as their classes do"
    last = [result for result in sent if result.report.counts][-1].report
    assert all(len(counts.support) == 1 for counts in last.counts)
    assert not last.confusions
    told = json.loads((tmp_path / "none" / "data.json").read_text())
    assert (told["examples"], told["rare"]) == ([], [])


@pytest.mark.parametrize(
    ("how", "method", "more", "line"),
    [
        ("rounded", "gldp", {}, "uploads of gldp hold prototypes/class/counts"),
        ("rounded", "pfedgrp", {}, "uploads of pfedgrp hold histogram/total"),
        ("none", "af-fcl", {}, "af-fcl has to tell which classes a client has"),
        ("rounded", "af-fcl", {}, ""),
        ("none", "fedali", {"net": {"name": "vit-tiny", "alp": True}}, ""),
        ("none", "fedavg", {"schedule": {"order": "tasks_outer", "open": True}}, "an open run"),
        (
            "none", "fedavg",
            {"schedule": {"patience": 2}, "data": {"validation_share": 0.2}}, "leaves no F1",
        ),
    ],
)  # fmt: skip
def test_who_can_do_without(how, method, more, line):
    """A method is asked when its tensors are known, the rest of the config when it is read."""

    def checked() -> None:
        experiment = experiment_of(how, method=method, **more)
        check_announcement(method_of(experiment), RunFacts(experiment, Problem((1, 8, 8), 10)))

    if not line:
        checked()
        return
    with pytest.raises(ConfigError, match=f'announce = "{how}".*{line}'):
        checked()


def test_who_rounds_is_no_client_of_a_run_that_needs_exact_counts(digits):
    data = ClientData(digits / "1")
    told = {how: data.announcement(how=how) for how in ("exact", "rounded", "none")}  # type: ignore
    for needed, welcome in {"exact": 1, "rounded": 2, "none": 3}.items():
        admission = Admission.of(experiment_of(needed), {})
        for number, text in enumerate(told.values()):
            if number < welcome:
                admission.check(1, text)
                continue
            with pytest.raises(PayloadError, match=f"this run needs {needed} ones: leave out"):
                admission.check(1, text)


@pytest.mark.parametrize(("right", "total"), [(True, 5), (True, 6), (False, 7), (False, 2)])
def test_a_client_scores_what_it_announced(right, total):
    """It announced six test examples, up to a power of two each: there are three at least."""
    experiment = experiment_of("rounded")
    run = RunFacts(experiment, FILE.problem)
    profile = Profile.parse(0, FILE.told("rounded").text("transform"))
    rules = ReportValidator(
        method_of(experiment), run, {0: profile}, [Step(0, 0, 0, (0,), True, True)]
    )
    order = rpc.Order(kind=rpc.ORDER_KIND_EVALUATE, views=["global"], tasks_seen=1)
    counts = rpc.Counts(
        view="global", rule="classifier", test_set="task/0", support=[total], predicted=[total],
        correct=[1],
    )  # fmt: skip
    if right:
        rules.check_report(0, order, rpc.Report(counts=[counts]))
        counts.support.append(0)
    with pytest.raises(PayloadError, match=r"counts other than 1|other examples of task/0"):
        rules.check_report(0, order, rpc.Report(counts=[counts]))


def test_a_word_of_a_later_server_is_refused():
    assert [count_detail_in(word) for word in ("", "exact", "none")] == ["exact", "exact", "none"]
    with pytest.raises(LinkError, match="announced as 'halved': update fedcli"):
        count_detail_in("halved")
