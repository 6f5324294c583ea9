"""The record of an interaction, and the scores that are put into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedmodels.numerics.data_drift import ALPHA
from fedmodels.numerics.metric_tables import DRIFT_PARTS
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine import odd_uploads
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.cohort import Answer, Answers
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step
from fedsrv.engine.scores import Scores, accuracy_over, client_rows, own_test, round_metrics
from fedsrv.state.record import Record, Traffic


def record_of(
    step: Step,
    results: Answers,
    found: Reduced,
    count: Callable[[Bundle], float],
) -> Record:
    """Return the record of an interaction, without its scores.

    Args:
        step: which interaction.
        results: what clients answered, without those that do not count.
        found: what the server half came to.
        count: gives what an upload counts in the mean.
    """
    clients = {c: r for c, r in results.by_client.items() if isinstance(c, int)}
    reports = {c: r.report for c, r in clients.items()}
    trained = [
        (r.num_examples - r.skipped_examples, r.loss)
        for r in reports.values()
        if r.num_examples > r.skipped_examples and math.isfinite(r.loss)
    ]
    examples = sum(n for n, _ in trained)
    loss = sum(n * mean for n, mean in trained)
    record: Record = {
        "round": step.round,
        "interaction": step.interaction,
        "task": step.task,
        "cohort": sorted(clients),
        "metrics": _finite(
            {
                "loss": loss / examples if examples else math.nan,
                **_drift_of(reports),
                **found.metrics,
            }
        ),
        "bytes": _traffic_of(results, clients),
        "seconds": {"train": max((r.seconds for r in reports.values()), default=0.0)},
        "clients": {
            str(c): _finite(
                {
                    "loss": r.loss,
                    "seconds": r.seconds,
                    "num_examples": r.num_examples,
                    **({"skipped_examples": r.skipped_examples} if r.skipped_examples else {}),
                    "peak_rss_bytes": r.peak_rss_bytes,
                    **dict(sorted(r.extra.items())),
                }
            )
            for c, r in reports.items()
        },
    }
    measured = results.measured()
    counts = {c: count(results.by_client[c].upload) for c in measured}
    for client, row in odd_uploads.rows(measured, counts, results.aside).items():
        record["clients"].setdefault(client, {}).update(row)
    for number, share in found.shares.items():
        if (known := record["clients"].get(str(number))) is not None and math.isfinite(share):
            known[odd_uploads.SHARE] = share
    if warned := odd_uploads.standing_out(measured):
        record["warned"] = {str(client): why for client, why in warned.items()}
    if results.failed:
        record["failed"] = {str(c): why for c, why in results.failed.items()}
    if results.secure_sum is not None:
        record["secure_sum"] = dict(results.secure_sum)
    if results.arrivals:
        record["arrivals"] = [*results.arrivals.items()]
        record["under_way"] = [*results.under_way.items()]
    if found.series:
        record["series"] = found.series
    return record


def _drift_of(reports: Mapping[int, rpc.Report]) -> dict[str, float]:
    """Return the mean drift of the clients that report one, by part."""
    names = [f"{part}_drift" for part in DRIFT_PARTS]
    found = {name: [r.extra[name] for r in reports.values() if name in r.extra] for name in names}
    return {name: math.fsum(values) / len(values) for name, values in found.items() if values}


def drifted_in(record: Record) -> dict[str, dict[str, float]]:
    """Return the clients whose examples moved beyond chance, and how far, by part."""
    return {
        part: moved
        for part in DRIFT_PARTS
        if (
            moved := {
                client: row[f"{part}_drift"]
                for client, row in record["clients"].items()
                if row.get(f"{part}_drift_p", 1.0) < ALPHA
            }
        )
    }


def left_out_of(record: Record) -> dict[str, str]:
    """Return lines on the training examples that a record's clients left out, by what they are.

    ``some`` are of a last batch of one; ``all`` are of clients that took no step.
    """
    rows = {c: r for c, r in record["clients"].items() if r.get("skipped_examples")}
    idle = [c for c, r in rows.items() if r["skipped_examples"] == r["num_examples"]]
    some = {c: r["skipped_examples"] for c, r in rows.items() if c not in idle}
    why = "the net normalises over the batch, and a batch of one example cannot be normalised"
    found = {}
    if some:
        found["some"] = (
            f"round {record['round'] + 1} left {sum(some.values())} training examples out, at "
            f"{clients_text([*some])}: {why}; in other epochs they are others"
        )
    if idle:
        found["all"] = (
            f"round {record['round'] + 1} trained nothing at {clients_text(idle)}: {why}; give "
            "them more examples, or take a net without batch normalisation"
        )
    return found


def put_scores(record: Record, scores: Scores, plan: Plan, step: Step) -> None:
    """Put the scores of a step into its record."""
    own, seen = scores.of(plan.method.local_view), plan.tasks_seen(step)
    a_sel = accuracy_over(own_test(own[c]) for c in record["cohort"] if c in own)
    if a_sel is not None:
        record["metrics"]["a_sel"] = a_sel
    if step.ends_round:
        view = plan.method.local_view
        record["metrics"] |= round_metrics(
            scores, view, plan.groups, plan.profiles, seen, plan.scores_classes
        )
    for client, row in client_rows(
        scores, seen, plan.groups.get("minority", ()), plan.scores_classes
    ).items():
        record["clients"].setdefault(client, {}).update(row)
    if step.tasks:
        for number, task in step.tasks.items():
            record["clients"].get(str(number), {})["task"] = task
    if scores.confusions:
        record["confusions"] = scores.confusions


def add_wire(record: Record, answers: Answers) -> None:
    """Add the bytes of a trip of scores to a record."""
    record["bytes"]["wire_down"] += answers.wire_down
    record["bytes"]["wire_up"] += answers.wire_up


def _traffic_of(results: Answers, clients: Mapping[int, Answer]) -> Traffic:
    """Return what tensors held, in all and by client, and what crossed the wire."""
    per_client = {
        str(c): {
            "down": r.logical_down,
            "up": r.logical_up,
            **({"eval_up": extra} if (extra := r.upload.num_evaluation_bytes()) else {}),
        }
        for c, r in clients.items()
    }
    return {
        "down": sum(b["down"] for b in per_client.values()),
        "up": sum(b["up"] for b in per_client.values()),
        "wire_down": results.wire_down,
        "wire_up": results.wire_up,
        "per_client": per_client,
    }


def commit_facts(record: Record) -> dict[str, Any]:
    """Return what listeners are told of a committed record."""
    return {
        "interaction": record["interaction"],
        "round": record["round"],
        "task": record["task"],
        "loss": record["metrics"].get("loss"),
        "bytes": {way: record["bytes"][way] for way in ("down", "up")},
        "seconds": record["seconds"]["wall"],
        "failed": record.get("failed", {}),
        **({"privacy": record["privacy"]} if "privacy" in record else {}),
    }


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers, which JSON can hold; the loss of no step at all is NaN."""
    return {key: value for key, value in numbers.items() if math.isfinite(value)}
