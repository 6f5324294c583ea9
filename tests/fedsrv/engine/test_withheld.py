"""What a site keeps to itself is not 0: records and summaries lack it, and say so."""

import json

import pytest

from fedmodels.errors import FedtideError
from fedpb.failures import failed_by
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment

KEPT = ("loss", "seconds", "peak_rss_bytes")


def keeping(*clients, names=KEPT):
    def after(done):
        if done.order.client_id in clients and done.report.num_examples:
            for name in names:
                done.report.ClearField(name)
            done.report.withheld.extend(names)

    return after


def test_a_withheld_loss_is_no_loss_of_zero(digits, tmp_path):
    experiment = tiny_experiment(schedule={"rounds": 1})
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    told = run_in_process(experiment, digits, tmp_path / "run", after=keeping("1"))
    (before, *_), (record, *_) = records_of(tmp_path / "whole"), records_of(tmp_path / "run")
    assert told["state_sha256"] == whole["state_sha256"]
    assert record["withheld"] == {"1": sorted(KEPT)}
    assert not {*KEPT} & record["clients"]["1"].keys()
    assert record["clients"]["0"]["loss"] == before["clients"]["0"]["loss"]
    others = [before["clients"][c] for c in ("0", "2")]
    examples = sum(row["num_examples"] for row in others)
    mean = sum(row["num_examples"] * row["loss"] for row in others) / examples
    assert record["metrics"]["loss"] == pytest.approx(mean)
    assert told["withheld"] == dict.fromkeys(sorted(KEPT), 1)
    assert "withheld" not in whole
    run_in_process(experiment, digits, tmp_path / "none", after=keeping("0", "1", "2"))
    (record, *_) = records_of(tmp_path / "none")
    assert "loss" not in record["metrics"]
    assert json.loads(json.dumps(record["withheld"])).keys() == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("names", "line"),
    [(("num_examples",), "keeps 'num_examples'"), (("loss", "loss"), "keeps 'loss'")],
)
def test_what_a_run_needs_cannot_be_withheld(names, line, digits, tmp_path):
    with pytest.raises(FedtideError, match=line):
        run_in_process(
            tiny_experiment(schedule={"rounds": 1}), digits, tmp_path / "run",
            after=keeping("1", names=names),
        )  # fmt: skip


def test_the_kind_of_a_failure_says_that_a_client_declined_and_no_words_do():
    declined = rpc.FAILURE_REASON_DECLINED
    assert failed_by(0, "") == ""
    assert failed_by(0, "declined: no more") == "no more"
    assert failed_by(declined, "no more") == failed_by(declined, "declined: no more")
    assert failed_by(declined, "no more") == "declined: no more"
    assert failed_by(declined, "").startswith("declined: a limit of privacy")
    assert failed_by(rpc.FAILURE_REASON_STORAGE, "").startswith("its data or states")
    assert failed_by(99, "") == failed_by(99, "declined: ")
