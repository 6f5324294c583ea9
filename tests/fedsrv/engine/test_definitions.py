"""What metrics come to for given counts: another formula has another number of definitions.

``definitions.json`` has the figures of counts that a seed draws. Where one of them changes or goes,
the metric means something else in new records than in old ones. Then ``DEFINITIONS`` of
``fedmodels/numerics/metric_names.py`` is raised, and ``FEDTIDE_REWRITE_DEFINITIONS=1 pytest`` of
this file writes the figures anew. A metric that is new changes no old one: the figures alone are
written anew.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fedmodels.numerics.metric_names import DEFINITIONS
from fedmodels.numerics.metrics import ClassCounts
from fedmodels.tensors.bundle import EVALUATOR
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.report_validator import GLOBAL_TEST
from fedsrv.engine.scores import VALIDATION, Scores, client_rows, round_metrics
from fedsrv.engine.summary import run_metrics
from tests.conftest import tiny_experiment

KEPT = Path(__file__).with_name("definitions.json")
GROUPS = {"many": [0], "minority": [2, 3]}
CLASSES, TASKS = 4, 2
CHANGED = (
    "{}: other figures than before. Where a metric means something else now, or is gone, raise "
    "DEFINITIONS of fedmodels/numerics/metric_names.py; then FEDTIDE_REWRITE_DEFINITIONS=1 pytest "
    + KEPT.with_name("test_definitions.py").name
    + " writes the figures anew"
)


def drawn(draw):
    """Return counts of some test examples of each class."""
    support = draw.integers(1, 30, CLASSES)
    predicted = np.bincount(draw.integers(0, CLASSES, support.sum()), minlength=CLASSES)
    return ClassCounts(
        support, predicted, draw.integers(0, np.minimum(support, predicted) + 1), draw.random()
    )


def scores_of(draw, tasks):
    found = Scores()
    for client in range(3):
        for view in ("global", "after_local", "after_downlink"):
            for rule in ("classifier", "nearest"):
                sets = {f"task/{task}": drawn(draw) for task in range(tasks)}
                sets |= {f"{VALIDATION}/0": drawn(draw), GLOBAL_TEST: drawn(draw)}
                found.counts[client, view, rule] = sets
            told = [float(draw.random()), float(draw.random())]
            found.probabilities.setdefault(view, {})[str(client)] = told
    found.counts[EVALUATOR, "global", "classifier"] = {GLOBAL_TEST: drawn(draw)}
    return found


def figures():
    """Return all metrics of two rounds of two tasks, and of the run that they are."""
    draw, records, found = np.random.default_rng(0), [], {}
    train = draw.integers(0, 40, (3, TASKS, CLASSES)).tolist()
    profiles = {
        c: Profile.parse(c, json.dumps({
            "format": 1, "input_shape": [1], "num_classes": CLASSES,
            "tasks": [{"train": task, "test": task} for task in tasks],
        }))
        for c, tasks in enumerate(train)
    }  # fmt: skip
    for number in range(2 * TASKS):
        task, seen = number // 2, 1 + number // 2
        scores = scores_of(draw, seen)
        metrics = round_metrics(scores, "after_local", GROUPS, profiles, seen)
        found |= {f"{number}/{name}": value for name, value in metrics.items()}
        rows = client_rows(scores, seen, GROUPS["minority"])
        record = {"interaction": number, "round": number, "task": task, "cohort": [0, 1, 2]}
        records.append({**record, "metrics": metrics, "clients": rows})
    schedule = {"order": "tasks_outer", "rounds": 2}
    experiment = tiny_experiment(schedule=schedule, evaluate={"last_rounds": 2})
    whole = run_metrics(records, experiment, "after_local")
    return found | {f"run/{name}": value for name, value in whole.items()}


def test_another_formula_has_another_number():
    kept, found = json.loads(KEPT.read_text()), figures()
    same = {k for k, v in kept["figures"].items() if found.get(k) == pytest.approx(v, rel=1e-9)}
    changed = sorted(kept["figures"].keys() - same)
    if os.environ.get("FEDTIDE_REWRITE_DEFINITIONS"):
        assert not changed or kept["definitions"] < DEFINITIONS, CHANGED.format(changed)
        told = {"definitions": DEFINITIONS, "figures": dict(sorted(found.items()))}
        KEPT.write_text(json.dumps(told, indent=1) + "\n")
        return
    assert (kept["definitions"], changed) == (DEFINITIONS, []), CHANGED.format(changed)
    assert found.keys() == kept["figures"].keys(), CHANGED.format("new metrics")
