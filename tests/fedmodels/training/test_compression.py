"""``[compression]``: what travels, what the server restores, and what a client still owes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.compact_forms import INDICES, SCALES, Floats, Int8, TopK
from fedmodels.training.compression import RESIDUAL, Compression
from fedmodels.training.run import RunFacts
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import method_of

SHAPES = {"w": (2,)}


def of(*values: float) -> Bundle:
    return Bundle(weights={"w": torch.tensor([*map(float, values)]), "mean": torch.ones(1)})


def test_feedback_by_hand():
    """One of two elements travels.

    Differences are (3, 2) each time. First 3 goes, and (0, 2) is owed; then (3, 4) is wanted, 4
    goes, and (3, 0) is owed. Without feedback the second element would never arrive.
    """
    how = Compression(up=TopK(0.5), feedback=True, fetched=SHAPES, returned=SHAPES)
    payload, trained, kept = of(10, 20), of(13, 22), {}
    for expected, owed in (((13.0, 20.0), [0.0, 2.0]), ((10.0, 24.0), [3.0, 0.0])):
        sent, kept = how.returned_by(trained, payload, kept)
        assert sent.weights.keys() == {"mean", INDICES, "compact/values"}
        assert kept[f"{RESIDUAL}w"].tolist() == owed
        upload = how.restored(sent, payload)
        assert tuple(upload.weights["w"].tolist()) == expected
        assert torch.equal(upload.weights["mean"], torch.ones(1))


def test_what_rounding_takes_from_the_downlink_comes_back():
    """3.01 goes down as 3 in bfloat16; a client that adds 1 brings the server to 4.01, not 4."""
    exact = of(3.01, 0)
    how = Compression(Floats(torch.bfloat16), fetched=SHAPES, returned=SHAPES)
    received = how.received(how.sent(exact))
    assert received.weights["w"].tolist() == [3.015625, 0.0]
    trained = replace(received, weights={**received.weights, "w": received.weights["w"] + 1})
    sent, residual = how.returned_by(trained, received, {})
    assert residual == {}
    assert how.restored(sent, exact).weights["w"].tolist() == pytest.approx([4.01, 1.0])


@pytest.mark.parametrize("form", [Floats(torch.float16), Floats(torch.bfloat16), Int8()])
def test_payloads_come_as_their_spec_says(form):
    how = Compression(form, fetched=SHAPES, returned=SHAPES)
    sent = how.sent(of(1, 2))
    spec = how.payload_spec(BundleSpec.of(of(0, 0)))
    assert spec.required == BundleSpec.of(sent).required
    assert how.received(sent).weights["w"].tolist() == pytest.approx([1.0, 2.0], abs=0.01)


def test_a_lie_in_an_upload_is_refused():
    how = Compression(up=Int8(), fetched=SHAPES, returned=SHAPES)
    sent, _ = how.returned_by(of(1, 2), of(0, 0), {})
    lie = replace(sent, weights={**sent.weights, SCALES: torch.tensor([-1.0])})
    with pytest.raises(PayloadError, match="a scale lies between 0"):
        how.restored(lie, of(0, 0))


def test_an_upload_that_could_not_travel_down_again_is_refused():
    """65,504 is the largest float16; clients would never get a mean beyond it."""
    how = Compression(Floats(torch.float16), fetched=SHAPES, returned=SHAPES)
    for largest in (65504.0, -65504.0):
        sent, _ = how.returned_by(of(largest, 0), of(4, 0), {})
        assert how.sent(how.restored(sent, of(4, 0)))
    for lie in (65600.0, -9e5, float("nan")):
        sent, _ = how.returned_by(of(lie, 0), of(4, 0), {})
        with pytest.raises(PayloadError, match="down carries no more"):
            how.restored(sent, of(4, 0))


def test_only_parameters_of_the_net_change_their_form(experiment):
    made = experiment(net="resnet20", compression={"up": "int8", "down": "float16"})
    run = RunFacts(made, Problem((1, 8, 8), 10))
    method = method_of(made)
    how = Compression.of(method, run)
    assert set(how.returned) == set(run.parameters)
    spec = how.upload_spec(method.upload_spec(run)).required
    for name, form in run.forms.items():
        expected = torch.int8 if name in run.parameters else form.dtype
        assert spec[f"weights/{name}"].dtype == expected
    assert spec["scalars/num_examples"].dtype == torch.float64


def test_nothing_changes_unless_asked_for(experiment):
    for table in ({}, {"compression": {"up": "float32"}}):
        made = experiment(**table)
        run = RunFacts(made, Problem((1, 8, 8), 10))
        assert Compression.of(method_of(made), run) == Compression()
    assert "compression" not in experiment().to_dict()
    bundle = of(1, 2)
    assert Compression().sent(bundle) is Compression().received(bundle) is bundle


def test_a_method_whose_parameters_stay_with_the_clients_is_told(experiment):
    made = experiment(method="fedproto", compression={"up": "int8"})
    with pytest.raises(ConfigError, match="no parameter travels both ways with method 'fedproto'"):
        Compression.of(make("fedproto"), RunFacts(made, Problem((1, 8, 8), 10)))


@pytest.mark.parametrize(
    "table",
    [
        {"up": "float16", "down": "float16"},
        {"up": "int8", "down": "int8"},
        {"up": "top-k", "share": 0.2, "down": "bfloat16"},
    ],
)
def test_runs_learn_and_send_less(table, experiment, digits, tmp_path):
    plain = run_in_process(experiment(), digits, tmp_path / "plain")
    found = run_in_process(experiment(compression=table), digits, tmp_path / "compact")
    for way in ("up", "down"):
        assert found["bytes"][way] < 0.53 * plain["bytes"][way]
    if table["up"] != "top-k":  # which needs more rounds to send everything
        accuracy = plain["metrics"]["a_glo"]
        assert found["metrics"]["a_glo"] == pytest.approx(accuracy, abs=0.02)
