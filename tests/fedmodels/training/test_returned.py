"""What functions of a custom method return by mistake: one line, which names the function."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedtide
from fedmodels.errors import FedtideError
from tests.conftest import records_of
from tests.fedtide.test_front_door import TINY

METHOD = """
from dataclasses import dataclass, replace
import numpy
import torch
from fedtide import Bundle, FedAvg

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    citation = "none"

    def reported(self, run):
        return frozenset({"known"})

    def FUNCTION:
        BODY
"""
LOSS = "loss(self, ctx, batch, out, refs)"
LOSSES = "torch.nn.functional.cross_entropy(out.logits, batch.y, reduction='none')"
AGGREGATE = "aggregate(self, ctx, state, uploads)"
FINISH = "finish(self, ctx, state, uploads)"
UPLINK = "uplink(self, ctx, state, refs)"
AFTER_LOCAL = "after_local(self, ctx, state, refs)"
PREDICT = "predict(self, ctx, payload, state, x)"
SENT = "up = super().uplink(ctx, state, refs); return"
SUMMED = "found = super().aggregate(ctx, state, uploads); return"
KNOWN = "ctx.metrics"


def run(place: Path, function: str, body: str, **changes: object) -> fedtide.Run:
    text = METHOD.replace("FUNCTION", function).replace("BODY", body)
    (place / "mine.py").write_text(text)
    given = {"method.name": f"{place}/mine.py:Mine", "schedule.rounds": 2, **changes}
    return fedtide.run(TINY, given, backend="inprocess", out=place / "run")


@pytest.mark.parametrize(
    ("function", "body", "line"),
    [
        (LOSS, "return 0.3", "loss of Mine returns a float; return a tensor with one number"),
        (LOSS, f"return {LOSSES}", r"loss of Mine returns a tensor of shape \[\d+\]; .* the mean"),
        (LOSS, f"return {LOSSES}.mean().detach()", "returns a tensor without a gradient; "),
        (
            AGGREGATE,
            "pass",
            "finish of Mine returns a NoneType as the state; return what aggregate",
        ),
        (
            FINISH,
            "return state",
            "finish of Mine returns a ServerState; return .* return state, {}",
        ),
        (FINISH, "return state, 3", "finish of Mine returns a int as metrics; "),
        (FINISH, "return state, {'own': 'good'}", "finish of Mine reports 'own' as a str; give a"),
        (FINISH, "return state, {'own': torch.ones(2)}", r"'own' as a Tensor of shape \[2\]; give"),
        (UPLINK, "return {}", "uplink of Mine returns a dict; return a Bundle"),
        (
            UPLINK,
            f"{SENT} replace(up, scalars={{**up.scalars, 'extra': 1.0}})",
            "uplink of Mine does not fit its upload_spec: unexpected tensor 'scalars/extra'",
        ),
        (
            UPLINK,
            f"{SENT} replace(up, weights={{k: w[:1] for k, w in up.weights.items()}})",
            "uplink of Mine does not fit its upload_spec: tensor 'weights/.*' is float32",
        ),
        (AFTER_LOCAL, "return None", "after_local of Mine returns a NoneType; return a Bundle"),
        (AFTER_LOCAL, "ctx.metrics['known'] = 'x'; return Bundle()", "'known' as a str; give a nu"),
        (
            AFTER_LOCAL,
            "ctx.metrics['knwon'] = 1.0; return Bundle()",
            "ctx.metrics of Mine holds 'knwon', which its function reported does not name. Did you",
        ),
        (
            AGGREGATE,
            f"{SUMMED} replace(found, common=Bundle({{k: w[:1] for k, w in "
            "found.common.weights.items()}))",
            "of Mine does not fit its payload_spec: tensor 'weights/.*' is float32",
        ),
        (PREDICT, "return ctx.net(x)", "predict of Mine returns a Tensor; return a dict from"),
        (
            PREDICT,
            "return {'classifier': torch.zeros(len(x), 11)}",
            r"scores of shape \[\d+, 11\] by the rule 'classifier'; return a tensor of shape \[",
        ),
    ],
)
def test_the_line_names_the_function(function, body, line, tmp_path, caplog):
    with pytest.raises(FedtideError, match=line):
        run(tmp_path, function, body)
    assert "Traceback" not in caplog.text


def test_numbers_of_torch_and_numpy_are_metrics(tmp_path):
    body = "return state, {'own': torch.tensor(0.5), 'other': numpy.float32(0.25), 'whole': 3}"
    made = run(tmp_path, FINISH, body)
    record = records_of(made.path)[0]
    assert {key: record["metrics"][key] for key in ("own", "other", "whole")} == {
        "own": 0.5,
        "other": 0.25,
        "whole": 3,
    }
