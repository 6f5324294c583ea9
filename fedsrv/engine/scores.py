"""From the counts clients report to the metrics of a round and of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmodels.numerics.metrics import (
    VALIDATION,
    ClassCounts,
    iaa,
    mean_accuracy,
    mean_and_std,
)
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedmodels.training.scoring import ALL, SEEN
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.cohort import Answer
from fedsrv.engine.report_validator import GLOBAL_TEST

OF_CLASSES = re.compile(r"_class_mean$|_f1(_std)?$|^(personalization|generalization)")
"""Metrics that take counts by class; they are absent where clients tell sums over classes."""


@dataclass
class Scores:
    """The counts of one interaction: (client, view, rule) to counts by test set."""

    counts: dict[tuple[ClientId, str, str], dict[str, ClassCounts]] = field(default_factory=dict)
    confusions: dict[str, list[list[int]]] = field(default_factory=dict)
    """Examples by true class and predicted class (K, K), over all clients, by view."""
    probabilities: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    """By view and client: AUROC, and calibration error."""
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)
    """Of targets, by view, client and test set: each figure by name."""

    def add(self, results: Mapping[ClientId, Answer]) -> None:
        """Add the counts of a trip's reports."""
        for client, result in results.items():
            for each in result.report.confusions:
                self._add_confusion(each.view, np.array(each.counts))
            for told in result.report.probabilities:
                auroc = told.auroc if told.HasField("auroc") else None
                self.probabilities.setdefault(told.view, {})[str(client)] = [auroc, told.ece]
            for each in result.report.figures:
                of_client = self.figures.setdefault(each.view, {}).setdefault(str(client), {})
                of_client[each.test_set] = dict(sorted(each.values.items()))
            for c in result.report.counts:
                found = ClassCounts(
                    np.array(c.support), np.array(c.predicted), np.array(c.correct), c.loss_sum
                )
                self.counts.setdefault((client, c.view, c.rule), {})[c.test_set] = found

    def _add_confusion(self, view: str, cells: np.ndarray[Any, Any]) -> None:
        """Add one client's examples by true class and predicted class (K * K)."""
        classes = math.isqrt(len(cells))
        before = self.confusions.get(view, 0)
        self.confusions[view] = (cells.reshape(classes, classes) + before).tolist()

    def settle_global_test(self) -> list[ClientId]:
        """Drop scores on a global test set other than the most frequent one; return their clients.

        Clients do not announce a global test set, so the most frequent one counts. In a tie the
        evaluator's set wins, then the set of the client with the lowest id.
        """
        said: dict[tuple[int, ...], set[ClientId]] = {}
        for (client, _, _), sets in self.counts.items():
            if GLOBAL_TEST in sets:
                said.setdefault(tuple(sets[GLOBAL_TEST].support.tolist()), set()).add(client)

        def weight(support: tuple[int, ...]) -> tuple[int, bool, int]:
            whose = said[support]
            numbers = [c for c in whose if isinstance(c, int)]
            return len(whose), EVALUATOR in whose, -min(numbers, default=0)

        agreed = max(said, key=weight, default=())
        for (client, view, _), sets in self.counts.items():
            if GLOBAL_TEST in sets and tuple(sets[GLOBAL_TEST].support.tolist()) != agreed:
                del sets[GLOBAL_TEST]
                self.figures.get(view, {}).get(str(client), {}).pop(GLOBAL_TEST, None)
        return sorted({c for support in said if support != agreed for c in said[support]}, key=str)

    def to_json(self) -> str:
        """Return everything as text, to be stored with a commit."""
        rows = [
            [client, view, rule, name]
            + [counts.tolist() for counts in (c.support, c.predicted, c.correct)]
            + [c.loss_sum]
            for (client, view, rule), sets in self.counts.items()
            for name, c in sets.items()
        ]
        parts = {"probabilities": self.probabilities, "figures": self.figures}
        more = {name: part for name, part in parts.items() if part}
        return json.dumps({"counts": rows, "confusions": self.confusions, **more})

    @classmethod
    def from_json(cls, text: str) -> Scores:
        """Rebuild what :meth:`to_json` wrote."""
        found = json.loads(text)
        parts = {name: found.get(name, {}) for name in ("confusions", "probabilities", "figures")}
        scores = cls(**parts)
        for client, view, rule, name, support, predicted, correct, loss in found["counts"]:
            found = ClassCounts(np.array(support), np.array(predicted), np.array(correct), loss)
            scores.counts.setdefault((client, view, rule), {})[name] = found
        return scores

    def of(self, view: str, rule: str | None = None) -> dict[int, dict[str, ClassCounts]]:
        """Return the counts of every client by test set, for one view and rule."""
        out: dict[int, dict[str, ClassCounts]] = {}
        for (client, v, r), sets in self.counts.items():
            if isinstance(client, int) and v == view and rule in (None, r):
                out.setdefault(client, sets)  # a method's own rule comes first
        return out

    def of_everyone(self) -> ClassCounts | None:
        """Return the evaluator's counts of everyone's model on the global test set."""
        for (client, view, _), sets in self.counts.items():
            if client == EVALUATOR and view == "global" and GLOBAL_TEST in sets:
                return sets[GLOBAL_TEST]  # by the method's own rule, which comes first
        return None

    def rules(self) -> list[str]:
        """Return every prediction rule that was scored, the method's own first."""
        return list(dict.fromkeys(rule for _, _, rule in self.counts))


def own_test(sets: Mapping[str, ClassCounts], part: str = "task") -> ClassCounts | None:
    """Return the counts over a client's own test data of its tasks so far; None without any.

    Args:
        sets: counts by test set.
        part: ``VALIDATION`` for what the client keeps for validation instead.
    """
    tasks = [counts for name, counts in sets.items() if name.startswith(f"{part}/")]
    total = sum(tasks[1:], tasks[0]) if tasks else None
    return total if total is not None and total.total() else None


def accuracy_over(found: Iterable[ClassCounts | None]) -> float | None:
    """Return the unweighted mean of the clients' accuracies; None when nobody has test data."""
    counts = [c for c in found if c is not None and c.total()]
    return mean_accuracy(counts) if counts else None


def _pooled(found: Iterable[ClassCounts | None]) -> float | None:
    """Return the accuracy over the test examples of all clients together; None without any."""
    known = [counts for counts in found if counts is not None]
    total = sum(known[1:], known[0]) if known else None
    return total.accuracy() if total is not None and total.total() else None


def round_metrics(
    scores: Scores,
    local_view: str,
    groups: Mapping[str, Sequence[int]],
    profiles: Mapping[int, Profile],
    tasks_seen: int,
    by_class: bool = True,
) -> dict[str, float]:
    """Return the metrics of one scored round (metrics of GLDP, FedMLP, pFedGRP and FedAli).

    ``a_loc`` is of the view a paper's tables fit best. Methods differ in it, so ``a_loc_received``
    and ``a_loc_trained`` score each method in both: before local training, and right after it.

    Args:
        scores: counts of the round.
        local_view: view that stands for "the client's model"; ``global`` where a client has none.
        groups: classes by name, such as ``minority``, for variants over these classes alone.
        profiles: the clients' descriptions; training examples met so far weigh ``iaa``, and say
            which classes a client has met.
        tasks_seen: how many tasks the clients have met.
        by_class: whether counts are by class; else they are sums, and some metrics are absent.
    """
    met = profiles if by_class else {}
    out: dict[str, float | None] = {}
    for key, view in {"a_glo": "global", **_local_views(scores, local_view)}.items():
        for suffix, found in _test_sets(scores, view, None, met, tasks_seen).items():
            out |= _variants(key + suffix, found, groups)
            if not suffix:
                out[f"{key}_pooled"] = _pooled(found)
        for rule in scores.rules()[1:] if key in ("a_glo", "a_loc") else (SEEN, ALL):
            for suffix, found in _test_sets(scores, view, rule, met, tasks_seen).items():
                if not suffix or rule in (SEEN, ALL):
                    out[f"{key}{suffix}_{rule}"] = accuracy_over(found)
                if not suffix:
                    out[f"{key}_{rule}_pooled"] = _pooled(found)
    out["iaa"] = _weighted_accuracy(scores, local_view, profiles, tasks_seen)
    models = {"a_glo": "global"} | ({} if local_view == "global" else {"a_loc": local_view})
    for key, view in models.items():
        out |= _spread(key, _test_sets(scores, view, None, met, tasks_seen)[""])
        out |= _trust(key, scores.probabilities.get(view, {}))
    out |= _validation(scores, local_view)
    out |= _f1(scores, "after_local" if scores.of("after_local") else "after_downlink")
    kept = {key: v for key, v in out.items() if v is not None and math.isfinite(v)}
    return kept if by_class else {k: v for k, v in kept.items() if not OF_CLASSES.search(k)}


def figure_metrics(scores: Scores, local_view: str) -> dict[str, float]:
    """Return the metrics of one scored round where targets are learned: means over clients.

    ``mae_loc`` is to ``mae`` what ``a_loc`` is to accuracy, and likewise each figure and model.
    """
    out: dict[str, float] = {}
    models = {"a_glo": "global", **_local_views(scores, local_view)}
    for key, view in models.items():
        of_view = scores.figures.get(view, {})
        whole = {str(EVALUATOR): of_view.get(str(EVALUATOR), {})} if view == "global" else of_view
        for ending, rows, name in (("", of_view, "task"), ("_balanced", whole, GLOBAL_TEST)):
            means = _means(sets[name] for sets in rows.values() if name in sets)
            out |= {f"{figure}_{key[2:]}{ending}": mean for figure, mean in means.items()}
    received = "after_downlink" if local_view == "after_downlink" else "global"
    for view in ("after_local", received):
        kept = scores.figures.get(view, {}).values()
        means = _means(sets[VALIDATION] for sets in kept if VALIDATION in sets)
        out |= {f"{VALIDATION}_{figure}": mean for figure, mean in means.items()}
    return out


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the unweighted mean over clients of each figure that one of them has."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for figure, value in row.items():
            found.setdefault(figure, []).append(value)
    return {figure: float(np.mean(values)) for figure, values in found.items()}


def _test_sets(
    scores: Scores,
    view: str,
    rule: str | None,
    profiles: Mapping[int, Profile],
    tasks_seen: int,
) -> dict[str, list[ClassCounts | None]]:
    """Return the counts of one view and rule on each test set, by the ending of its columns.

    ``""`` is a client's own test data, ``_balanced`` the global test set. ``_own_classes`` is what
    the global test set has of the classes that the client has met: a private head can hardly name
    another one, so on the whole set its accuracy has a ceiling near the share of classes met.
    """
    found = scores.of(view, rule)
    own = [own_test(sets) for sets in found.values()]
    union = {c: sets.get(GLOBAL_TEST) for c, sets in found.items()}
    whole = list(union.values())
    if view == "global":  # the evaluator scores the one model that clients have in common
        whole = [scores.of_everyone() if rule is None else None]
        union = dict.fromkeys(found, whole[0])
    met = [c and c.subset(profiles[i].met(tasks_seen)) for i, c in union.items() if i in profiles]
    return {"": own, "_balanced": whole, "_own_classes": met}


def _local_views(scores: Scores, local_view: str) -> dict[str, str]:
    """Return the views behind ``a_loc`` by column; none as received where a client keeps no model.

    A client without a private part receives everyone's model: that is what it holds then.
    """
    trained = {"a_loc_trained": "after_local"}
    if local_view == "global":
        return trained
    private = local_view == "after_downlink" or bool(scores.of("after_downlink"))
    received = "after_downlink" if private else "global"
    return {"a_loc": local_view, "a_loc_received": received, **trained}


def _variants(
    key: str, found: Sequence[ClassCounts | None], groups: Mapping[str, Sequence[int]]
) -> dict[str, float | None]:
    """Return a mean accuracy over clients, and the same over each group of classes."""
    known = [counts for counts in found if counts is not None]
    rows = {f"{key}_{name}": [c.subset(classes) for c in known] for name, classes in groups.items()}
    return {key: accuracy_over(known), **{k: accuracy_over(row) for k, row in rows.items()}}


def _weighted_accuracy(
    scores: Scores, local_view: str, profiles: Mapping[int, Profile], tasks_seen: int
) -> float | None:
    """Return IAA: the accuracy of what clients hold after the downlink, by examples met."""
    view = "after_downlink" if local_view == "after_downlink" else "global"
    own = {c: own_test(sets) for c, sets in scores.of(view).items()}
    met = {c: int(profiles[c].train[:tasks_seen].sum()) for c, counts in own.items() if counts}
    holders = sum(bool(profiles[c].train.sum()) for c in met)
    if not sum(met.values()) or (holders == 1 and len(met) > 1):
        return None  # all data are pooled at one client: its accuracy alone would be the mean
    return iaa([counts.accuracy() for counts in own.values() if counts], list(met.values()))


def _spread(key: str, found: Sequence[ClassCounts | None]) -> dict[str, float | None]:
    """Return how a model's accuracy spreads over clients, and its mean balanced accuracy."""
    counts = [c for c in found if c is not None and c.total()]
    if not counts:
        return {}
    each = np.sort([c.accuracy() for c in counts])
    return {
        f"{key}_std": float(each.std()),
        f"{key}_worst_tenth": float(each[: math.ceil(len(each) / 10)].mean()),
        f"{key}_class_mean": float(np.mean([np.nanmean(c.per_class()) for c in counts])),
    }


def _trust(key: str, told: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Return the means over clients of what they tell of a model's probabilities."""
    out: dict[str, float | None] = {}
    for place, ending in enumerate(("auroc", "ece")):
        known = [each[place] for each in told.values()]
        if numbers := [number for number in known if number is not None]:
            out[f"{key}_{ending}"] = float(np.mean(numbers))
    return out


def _validation(scores: Scores, local_view: str) -> dict[str, float | None]:
    """Return what may choose a round: scores of the models that clients hold, on validation parts.

    They are of the models right after training where no others are scored.
    """
    received = "after_downlink" if local_view == "after_downlink" else "global"
    views = (scores.of(view).values() for view in (received, "after_local"))
    each = [[c for sets in found if (c := own_test(sets, VALIDATION))] for found in views]
    counts = each[0] or each[1]
    if not counts:
        return {}
    return {
        f"{VALIDATION}_accuracy": accuracy_over(counts),
        f"{VALIDATION}_f1": float(np.mean([c.macro_f1() for c in counts])),
        f"{VALIDATION}_loss": float(np.mean([c.loss() for c in counts])),
    }


def _f1(scores: Scores, view: str) -> dict[str, float | None]:
    """Return Personalization, Generalization and Global as FedAli defines them."""
    found = scores.of(view)
    out: dict[str, float | None] = {}
    own = [c for sets in found.values() if (c := own_test(sets))]
    union = [sets[GLOBAL_TEST] for sets in found.values() if GLOBAL_TEST in sets]
    for key, counts in (("personalization", own), ("generalization", union)):
        if counts:
            out[key], out[f"{key}_std"] = mean_and_std(c.macro_f1() for c in counts)
    everyone = scores.of_everyone()
    if everyone is not None:
        out["global_f1"] = everyone.macro_f1()
    return out


def client_rows(
    scores: Scores,
    tasks_seen: int,
    minority: Sequence[int] = (),
    by_class: bool = True,
    *,
    of_targets: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return every client's accuracies by view: overall, on rare classes, per task and per class.

    Where targets are learned, a view has the figures that the client told, if any, and the loss.

    A row covers the tasks seen so far and no more. Accuracies per task begin with ``first_task``,
    which is left out where it is 0. A view by its own name is scored by the method's
    own rule, which clients report first; ``view:rule`` by another one. Accuracies per class are
    empty where counts are sums over classes.
    """
    out: dict[str, dict[str, Any]] = {}
    for (client, view, rule), sets in scores.counts.items():
        views = out.setdefault(str(client), {}).setdefault("views", {})
        name = view if view not in views else f"{view}:{rule}"
        total = own_test(sets) or sets.get(GLOBAL_TEST)
        if total is None:
            continue
        if of_targets:
            of_view = scores.figures.get(view, {}) if name == view else {}
            told = of_view.get(str(client), {})
            own = told.get("task") or told.get(GLOBAL_TEST) or {}
            views[name] = {**own, "loss": _loss(total)}
            continue
        tasks = [t for name in sets if (t := _task_of(name)) is not None and t < tasks_seen]
        first, end = min(tasks, default=0), max(tasks, default=-1) + 1
        views[name] = {
            "accuracy": total.accuracy(),
            **({"minority": _accuracy(total.subset(minority))} if minority else {}),
            "loss": _loss(total),
            **_told_by(scores, view if name == view else "", str(client)),
            **({"first_task": first} if first else {}),
            "tasks": [_accuracy(sets.get(f"task/{t}")) for t in range(first, end)],
            "classes": [None if math.isnan(a) else float(a) for a in total.per_class()]
            if by_class
            else [],
        }
    return out


def _loss(counts: ClassCounts) -> float | None:
    """Return the mean loss of an example; None where a rule excludes a class."""
    return counts.loss() if math.isfinite(counts.loss()) else None


def _told_by(scores: Scores, view: str, client: str) -> dict[str, float]:
    """Return the AUROC that a client told of a view's own rule; nothing where it told none."""
    auroc = scores.probabilities.get(view, {}).get(client, [None])[0]
    return {} if auroc is None else {"auroc": auroc}


def _task_of(name: str) -> int | None:
    """Return the task of a client's own test set, by its name; None for another set."""
    part, _, task = name.partition("/")
    return int(task) if part == "task" else None


def _accuracy(counts: ClassCounts | None) -> float | None:
    return counts.accuracy() if counts is not None and counts.total() else None
