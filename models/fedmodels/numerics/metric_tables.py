"""What every metric and every view means: the one table of each.

Reports, ``fedsrv metrics`` and ``docs/metrics.md`` are made from these tables. A name is an entry
of :data:`METRICS`, or one of its accuracies with endings from :data:`ENDINGS`:
``a_loc_received_balanced_minority`` is the accuracy of clients' models as received, on the global
test set, over the rare classes alone. A run
needs the names alone: :mod:`fedmodels.numerics.metric_names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from fedmodels.numerics.metric_names import ACCURACY, BEST, CHOSEN, OF_FIGURE, family_of
from fedmodels.plugins import loaded

SCORERS, COHORT, EVERYONE = "all that score", "the cohort", "–"
"""Whose scores a metric averages: all clients that score, or those of them that trained last. With
``[evaluate] trained = "all"`` the others train for the score, and the two are the same. A figure of
everyone's model or of the whole run has no clients to average over."""


@dataclass(frozen=True)
class View:
    """One of a client's models, at one moment."""

    title: str
    meaning: str


VIEWS: Mapping[str, View] = {
    "global": View("global model", "everyone's model, the same for all clients"),
    "after_local": View("after local training", "a client's model, right after it trained"),
    "after_downlink": View("after the downlink", "what a client holds before it trains again"),
}
"""The models that are scored, in the order in which reports show them."""


@dataclass(frozen=True)
class Metric:
    """One figure that a run may write."""

    name: str
    title: str
    """A few words for a reader who does not know the name."""
    meaning: str
    """The formula, or one line where there is none."""
    source: str = "–"
    """The paper that defines it."""
    population: str = field(default=EVERYONE, kw_only=True)
    """Over which clients it is a mean."""
    better: Literal[1, -1, 0] = 1
    """1 where more is better, -1 where less is, 0 where neither is."""
    unit: Literal["%", ""] = "%"
    """``%``: a fraction of one, which reports show as a percentage."""
    range: str = "0 … 1"

    @property
    def label(self) -> str:
        """Return how a table calls it: in words, with its name beside them."""
        named = self.name if self.title == self.name else f"{self.title} ({self.name})"
        return f"{named} %" if self.unit else named


_BY_CLIENTS = "with the best `personalization`, or the best `a_loc_trained` by `select_by`"
_BY_SERVER = "with the best `global_f1`, or the best `a_glo_balanced` by `select_by`"

SCORES = (
    Metric(
        "a_glo", "global model, clients' test data",
        "mean over clients i of acc_i(global model), on i's own test data of the tasks so far",
        "GLDP, FedMLP",
        population=SCORERS,
    ),
    Metric(
        "a_loc", "clients' models, own test data",
        "mean over clients i of acc_i(model of i), on i's own test data of the tasks so far. The "
        "method says which view is the model: it is `a_loc_received` or `a_loc_trained`",
        "GLDP, FedMLP",
        population="all that score, or the cohort, as its view",
    ),
    Metric(
        "a_loc_received", "clients' models, as received",
        "`a_loc` of the model that a client holds before it trains: its own, or everyone's where "
        "it holds no private part",
        population=SCORERS,
    ),
    Metric(
        "a_loc_trained", "clients' models, just trained",
        "`a_loc` of the model right after local training, of the clients that trained in the last "
        "interaction of the round",
        population=COHORT,
    ),
    Metric(
        "a_sel", "selected clients' models",
        "`a_loc` over the cohort of one interaction alone; everyone's model where clients have no "
        "model of their own. A summary has it where `schedule.per_round` selects clients",
        "GLDP, FedMLP",
        population=COHORT,
    ),
    Metric(
        "a_sel_received_task", "selected clients' models, as received",
        "`…_K`: as `a_sel`, after task K, of what clients hold before they train again: mean over "
        "the last scored rounds of task K. It is there where `schedule.per_round` selects clients",
        "GLDP, figure 4",
        population=COHORT,
    ),
    Metric(
        "a_sel_trained_task", "selected clients' models, just trained",
        "`…_K`: as `a_sel_received_task_K`, of models right after local training",
        population=COHORT,
    ),
    Metric(
        "a_sel_received_minority_task", "selected clients' models, as received, rare classes",
        "`…_K`: as `a_sel_received_task_K`, on test examples of the rare half of the classes",
        "FedMLP, figure 4",
        population=COHORT,
    ),
    Metric(
        "a_sel_trained_minority_task", "selected clients' models, just trained, rare classes",
        "`…_K`: as `a_sel_trained_task_K`, on test examples of the rare half of the classes",
        population=COHORT,
    ),
    Metric(
        "iaa", "instant average accuracy",
        "Σ n_i acc_i / Σ n_i of what clients hold after the downlink; n_i: training examples that "
        "client i has met",
        "pFedGRP",
        population=SCORERS,
    ),
    Metric(
        "aa", "average accuracy over the run",
        "mean of `iaa` over all rounds; it is there if every round is scored",
        "pFedGRP",
        population=SCORERS,
    ),
    Metric(
        "aa_scored", "average accuracy over scored rounds",
        "mean of `iaa` over the scored rounds, where some are not: it depends on `evaluate.every`",
        population=SCORERS,
    ),
    Metric(
        "afm", "average forgetting measure",
        "mean over scored rounds of (`iaa` of the reference run − `iaa`). Both runs must have "
        "scored the same rounds",
        "pFedGRP, Eq. 11", -1, range="−1 … 1",
    ),
    Metric(
        "forgetting", "forgetting",
        "mean over tasks k < T − 1 of max_t R[t, k] − R[T − 1, k], k ≤ t < T − 1. R[t, k]: mean "
        "accuracy of clients on task k after the last round of task t, in the view of `a_loc`. A "
        "difference is of the clients that are scored at both times; where there are none, the "
        "metric is missing. In an open run: that of each client over its own tasks, mean over "
        "clients (docs/streams.md)",
        "Chaudhry et al. 2018", -1, range="−1 … 1",
        population="as that of `a_loc`",
    ),
    Metric(
        "forgetting_received", "forgetting, models as received",
        "as `forgetting`, in the view of `a_loc_received`: it compares methods at one moment",
        "Chaudhry et al. 2018", -1, range="−1 … 1",
        population=SCORERS,
    ),
    Metric(
        "forgetting_trained", "forgetting, models just trained",
        "as `forgetting`, in the view of `a_loc_trained`",
        "Chaudhry et al. 2018", -1, range="−1 … 1",
        population=COHORT,
    ),
    Metric(
        "forgetting_scored", "forgetting between scored rounds",
        "as `forgetting`, after the last scored round of each task, where the last round of a task "
        "is not scored: it depends on `evaluate.every`",
        "Chaudhry et al. 2018", -1, range="−1 … 1",
        population="as that of `a_loc`",
    ),
    Metric(
        "prequential", "models on the next task, before training",
        "with `[evaluate] prequential`: the accuracy of the model that a client holds on all "
        "examples of its next task, training and test part, before it trains on any. A round has "
        "the mean over the clients that begin a task in it, a summary the mean over clients of the "
        "mean over their tasks, from the second one on",
        "Gama, Sebastião, Rodrigues 2013",
        population="clients with two tasks or more",
    ),
    Metric(
        "prequential_mae", "error on the next task, before training",
        "as `prequential`, of runs that learn numbers: `mae` in place of the accuracy", better=-1,
        unit="", range="≥ 0", population="clients with two tasks or more",
    ),
    Metric(
        "prequential_auroc", "AUROC on the next task, before training",
        "as `prequential`, of runs that learn several labels: `auroc` in place of the accuracy",
        population="clients with two tasks or more",
    ),
    Metric(
        "present", "models as received, present task",
        "in scenarios whose domains or concepts change: accuracy of a client's model, as received, "
        "on the test examples of its present task. Mean over clients of the mean over scored "
        "rounds",
        population=SCORERS,
    ),
    Metric(
        "present_trained", "models just trained, present task",
        "as `present`, of the model right after local training",
        population=COHORT,
    ),
    Metric(
        "recovery_rounds", "rounds until models recovered from a change",
        "in scenarios whose domains or concepts change: from the first round of the new task to "
        "the one after which a client's model, as received, is at most 0.05 below its last "
        "accuracy before the change, each on the task of its time; the rounds that there were, "
        "where it is not. Mean over the changes of clients with a score before and after",
        better=-1, unit="", range="≥ 1", population=SCORERS,
    ),
    Metric(
        "recovered", "changes from which models recovered",
        "part of the changes that `recovery_rounds` averages after which models recovered before "
        "the next change and the end",
        population=SCORERS,
    ),
    Metric(
        "forgetting_domains", "forgetting of domains",
        "as `forgetting_received`, of each domain that a client met and its last task does not "
        "show: the best earlier mean accuracy on the tasks that show it, minus the last one; mean "
        "over clients of the mean over domains",
        "Chaudhry et al. 2018", -1, range="−1 … 1", population=SCORERS,
    ),
    Metric(
        "backward_transfer_domains", "backward transfer to domains",
        "the last accuracy on such a domain minus that at the end of the last task that shows it",
        "Lopez-Paz and Ranzato 2017", range="−1 … 1", population=SCORERS,
    ),
    Metric(
        "personalization", "macro-F1 on own test data",
        "mean over clients of the macro-F1 of the model after local training, on own test data",
        "FedAli",
        population=COHORT,
    ),
    Metric(
        "personalization_std", "deviation of that over clients",
        "population standard deviation over clients of what `personalization` averages",
        "FedAli", 0,
        population=COHORT,
    ),
    Metric(
        "generalization", "macro-F1 on everyone's test data",
        "as `personalization`, on the global test set",
        "FedAli",
        population=COHORT,
    ),
    Metric(
        "generalization_std", "deviation of that over clients",
        "population standard deviation over clients of what `generalization` averages",
        "FedAli", 0,
        population=COHORT,
    ),
    Metric("global_f1", "macro-F1 of the global model", "on the global test set", "FedAli"),
    *(
        Metric(
            f"best_{name}", f"round that is best on test data: {name}",
            f"`{name}` of the scored round {which}. It is chosen on test data, and depends on "
            "which rounds are scored",
            "FedAli", 0 if name.endswith("_std") else 1,
            population=EVERYONE if which == _BY_SERVER else COHORT,
        )
        for which, names in (
            (_BY_CLIENTS, ("personalization", "personalization_std")),
            (_BY_CLIENTS, ("generalization", "generalization_std")),
            (_BY_SERVER, ("global_f1", "a_glo_balanced")),
        )
        for name in names
    ),
    *(
        Metric(
            f"best_{name}", f"highest of all scored rounds on test data: {name}",
            f"the highest `{name}` of all scored rounds: chosen on test data, each score in "
            "a round of its own, as in PFLlib's tables",
            "Zhang et al. 2025",
        )
        for name in BEST
    ),
    *(
        Metric(
            f"validation_{name}", f"{title}, validation part",
            f"mean over clients of the {title} of the model that a client holds before it trains, "
            "on what it keeps of its training data by `data.validation_share`",
            population=SCORERS,
        )
        for name, title in (("accuracy", "accuracy"), ("f1", "macro-F1"))
    ),
    Metric(
        "validation_loss", "loss, validation part", "as `validation_accuracy`, the mean loss",
        better=-1, unit="", range="≥ 0", population=SCORERS,
    ),
    Metric(
        "epsilon", "privacy spent",
        "epsilon of all releases so far at `privacy.delta`, with noise that hides clients or their "
        "examples: docs/differential-privacy.md",
        better=-1, unit="", range="≥ 0",
    ),
    Metric(
        "chosen_round", "round that is best on validation parts",
        "the scored round, from 1, with the best `validation_f1`, or the best "
        "`validation_accuracy` by `select_by`; of equal ones the earliest",
        better=0, unit="", range="≥ 1",
    ),
    *(
        Metric(
            f"chosen_{name}", f"round chosen on validation parts: {name}",
            f"`{name}` of the round `chosen_round`",
        )
        for name in CHOSEN
    ),
)  # fmt: skip
"""What the coordinator computes from the clients' counts."""


def share(name: str, title: str, meaning: str, source: str = "–") -> Metric:
    """Return a share, from 0 to 1, of which neither more nor less is better."""
    return Metric(name, title, meaning, source, better=0)


def number(name: str, title: str, meaning: str, source: str = "–", range: str = "≥ 0") -> Metric:
    """Return a figure of which neither more nor less is better."""
    return Metric(name, title, meaning, source, better=0, unit="", range=range)


UPLOADS = (
    number(
        "difference_norm", "how far an upload lies from what was given",
        "norm of the difference of a client's parameters, or of its prototypes where it sends no "
        "weights: what it sent minus what it got",
    ),
    number("given_norm", "size of what was given", "norm of the parameters that a client got"),
    number(
        "difference_cosine", "direction of an upload",
        "cosine between a client's difference and the mean of those that count, weighted as in the "
        "mean, or alike with `[server] reduce`; beyond 4096 numbers within about 0.02. With "
        "relays: of those that share one, or have none",
        range="−1 … 1",
    ),
    share(
        "aggregation_weight", "share of an upload in the result",
        "the part of a client's upload in the mean of weights, or else of prototypes; with "
        "`[server] reduce` what the rule left of it: of a rule by coordinate, the part of the "
        "coordinates",
    ),
    number(
        "statistics_norm", "how far running statistics moved",
        "norm of the difference of a client's statistics of batch normalisation",
    ),
    number("prototype_norm", "size of prototypes", "norm of the longest one a client sent"),
    number("generator_norm", "size of generators", "norm of the largest one a client sent"),
)  # fmt: skip
"""What the coordinator measures of each client's upload."""

REPORTED = (
    *UPLOADS,
    Metric(
        "loss", "training loss", "mean over the examples that the cohort trained on",
        "–", -1, "", "≥ 0",
    ),
    number(
        "prototype_drift", "how far class prototypes moved",
        "mean over classes of ‖p' − p‖ / ‖p‖: prototypes p before and p' after an interaction",
    ),
    number(
        "staleness", "rounds that uploads lag behind",
        "mean over the uploads of an asynchronous round: the commits since the model they began "
        "with", "FedBuff",
    ),
    share(
        "prototypes_moved", "prototypes that changed rows",
        "share of the clients' prototypes that k-means puts into another row than their own",
        "FedAli",
    ),
    share(
        "prototype_share", "part of prototypes in tokens",
        "`…_K`, block K: mean over tokens of the prototype's length in Eq. 7 over the sum of both "
        "parts' lengths", "FedAli",
    ),
    number(
        "prototype_angle", "turn of tokens by prototypes",
        "`…_K`, block K: mean over tokens of the angle between a token with its prototype and "
        "without, in degrees", "FedAli", "0 … 180",
    ),
    share("known_share", "classes with a prototype", "share of all K classes", "FedMLP"),
    share(
        "weights_self", "weight of a client on itself",
        "mean over clients of the aggregation weight of their own model", "pFedGRP, pFedGraph",
    ),
    number(
        "weights_entropy", "spread of the aggregation weights",
        "mean over clients of −Σ_j w_ij ln w_ij / ln n, n clients in the round: 1 is uniform",
        "pFedGRP, pFedGraph", "0 … 1",
    ),
    share(
        "server_acceptance", "images accepted on the server",
        "share of drawn images that their client's model takes for their class", "pFedGRP",
    ),
    share(
        "server_shortage", "images lacking on the server",
        "accepted images that are lacking, over those asked for", "pFedGRP",
    ),
    share(
        "replay_acceptance", "replayed images accepted",
        "share of drawn images that the old model takes for their class; `…_K`: of class K",
        "pFedGRP",
    ),
    number("replay_examples", "replayed images", "how many are trained on", "pFedGRP"),
    number("replay_shortage", "replayed images lacking", "of those asked for", "pFedGRP"),
    number("generators_trained", "generators trained", "in this interaction", "pFedGRP"),
    number("generator_trainings", "trainings of generators", "since the beginning", "pFedGRP"),
    share(
        "generator_ratio", "quality of a generator",
        "`…_K`: share of its images of class K that the model just trained takes for K", "pFedGRP",
    ),
)  # fmt: skip
"""What methods and clients report beside."""

OF_PLUGINS: tuple[Metric, ...] = tuple(chain.from_iterable(loaded("fedtide.figures")))
"""What the parts and methods of plugins report and compute."""

METRICS: Mapping[str, Metric] = {
    metric.name: metric for metric in (*SCORES, *REPORTED, *OF_PLUGINS)
}

FIGURES: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "mae", "mean absolute error", "mean of |prediction − target|, in the target's unit",
            better=-1, unit="", range="≥ 0",
        ),
        Metric(
            "rmse", "root mean squared error", "√ mean of (prediction − target)²",
            better=-1, unit="", range="≥ 0",
        ),
        Metric(
            "r2", "R²", "1 − Σ (prediction − target)² / Σ (mean of the test set − target)²",
            unit="", range="≤ 1",
        ),
        Metric(
            "mae_of_mean", "mean absolute error of the mean predictor",
            "`mae` of who always answers the mean that targets are counted from: that of the "
            "training rows, or `target_mean`", better=-1, unit="", range="≥ 0",
        ),
        Metric(
            "pinball", "pinball loss",
            "mean over the quantiles q of max(q e, (q − 1) e), e = target − prediction",
            "Koenker and Bassett 1978", better=-1, unit="", range="≥ 0",
        ),
        Metric(
            "auroc", "area under the ROC curve",
            "mean over labels that the test set has and lacks",
        ),
        Metric(
            "average_precision", "average precision",
            "Σ (recall_n − recall_{n−1}) precision_n over thresholds, mean over those labels",
        ),
        Metric("auroc_micro", "area under the ROC curve, micro", "over pairs of example and label"),
        Metric("average_precision_micro", "average precision, micro", "over all such pairs"),
        Metric(
            "base_rate", "base rate",
            "mean share of examples with a label: `average_precision` of who knows nothing",
            better=0,
        ),
    )
}  # fmt: skip
"""Of runs that learn targets: what a model of a client is scored by, in place of accuracy."""
ENDINGS: Mapping[str, tuple[str, str]] = {
    "balanced": ("on the global test set", "on the global test set, in place of own test data"),
    "own_classes": (
        "on own classes",
        "on what the global test set has of the classes that the client has met: `a_loc` of "
        "FedMLP's tables",
    ),
    "many": (
        "frequent classes",
        "over the most frequent 20 % of the classes that clients train on",
    ),
    "medium": ("medium classes", "over the next 30 % of these classes"),
    "minority": (
        "rare classes",
        "over the lower half of these classes by training examples. Classes of equally many "
        "examples on both sides of a border between groups are all `medium`, and there are no "
        "groups where all classes are equally frequent",
    ),
    "pooled": (
        "clients' test examples pooled",
        "over the test examples of all these clients together: a client counts by its examples",
    ),
    "std": ("deviation over clients", "population standard deviation over clients: fairness"),
    "worst_tenth": (
        "worst tenth of clients",
        "mean over the tenth of the clients, rounded up, that have the lowest accuracy: fairness",
    ),
    "class_mean": (
        "balanced accuracy",
        "mean over clients of the mean accuracy on each class that a client's test data have",
    ),
    "auroc": (
        "area under the ROC curve",
        "mean over clients of the mean over classes of the area under the curve of a class against "
        "the rest, where `evaluate.probabilities` asks for it",
    ),
    "ece": (
        "calibration error",
        "mean over clients of the expected calibration error, 15 bins (Guo et al. 2017), where "
        "`evaluate.probabilities` asks for it",
    ),
    "classifier": ("by the classifier", "by the net's classifier"),
    "nearest": ("by the nearest prototype", "by the nearest class prototype"),
    "prototype": ("by prototypes", "by FedMLP's prototypes"),
    "gldp_gp": ("by global prototypes", "by GLDP's global prototypes"),
    "gldp_lp": ("by local prototypes", "by GLDP's local prototypes"),
    "seen_classes": (
        "among classes met",
        "by the method's rule, among the classes a client has met",
    ),
    "all_classes": ("among all classes", "by the method's rule, among all classes"),
}
"""Endings of ``a_glo`` and the ``a_loc…``: title and meaning; the last ones are methods' rules."""
LESS_IS_BETTER = ("std", "ece")
"""Endings of figures of which less is better."""


def metric(name: str) -> Metric:
    """Return what the tables say of a name; a method's own metric is a plain number."""
    if found := METRICS.get(name):
        return found
    if match := ACCURACY.fullmatch(name):
        base = METRICS[match[2]]
        titles, meanings = zip(*(words for _, words in _parts(match[3])), strict=True)
        title, meaning = ", ".join([base.title, *titles]), "; ".join([base.meaning, *meanings])
        better = -1 if match[3].endswith(LESS_IS_BETTER) else base.better
        return replace(base, name=name, title=title, meaning=meaning, better=better)
    if match := OF_FIGURE.fullmatch(name):
        return _figure(name, *match.groups())
    family = METRICS.get(family_of(name))
    if family is not None:
        which = "after task" if family.name.endswith("_task") else "class"
        title = f"{family.title}, {which} {name.rpartition('_')[2]}"
        return replace(family, name=name, title=title)
    return Metric(name, name, "a metric of the method's own", better=0, unit="", range="real")


def _figure(name: str, chosen: str, part: str, figure: str, model: str, balanced: str) -> Metric:
    """Return the figure of targets of this name, which says the model and the test set."""
    base, of_model = FIGURES[figure], METRICS[f"a_{model}"] if model else None
    title = f"{base.title}, {of_model.title}" if of_model else base.title
    words = f"{base.meaning}; of the model that `a_{model}` is of" if of_model else base.meaning
    population = of_model.population if of_model else SCORERS
    if balanced:
        title, population = f"{base.title}, {ENDINGS['balanced'][0]}", EVERYONE
    for said, more in ((part, "validation part"), (chosen, "round chosen on validation parts")):
        title += f", {more}" if said else ""
    return replace(base, name=name, title=title, meaning=words, population=population)


def with_population(name: str, selected: str, told: str = "") -> str:
    """Return what stands above a metric in a table, with its clients where they are not all.

    Args:
        name: of the metric.
        selected: how many clients a cohort has, such as ``10 of 20 clients``; empty where all that
            score train for the score.
        told: the heading that a user gave; by default the metric's label.
    """
    found = metric(name)
    told = told or found.label
    return f"{told} ({selected})" if selected and found.population == COHORT else told


def is_known(name: str) -> bool:
    """Tell whether the tables have a name, with every one of its endings."""
    match = ACCURACY.fullmatch(name)
    if name not in METRICS and match:
        return all(title != f"by {rule}" for rule, (title, _) in _parts(match[3]))
    return metric(name).meaning != "a metric of the method's own"


def _parts(text: str) -> list[tuple[str, tuple[str, str]]]:
    """Return the endings of a name; what no entry knows is the rule of a custom method."""
    found = []
    while text:
        known = [e for e in ENDINGS if text == e or text.startswith(f"{e}_")]
        ending = max(known, key=len, default=text)
        unknown = (f"by {ending}", f"by the method's rule {ending}")
        found.append((ending, ENDINGS.get(ending, unknown)))
        text = text.removeprefix(ending).removeprefix("_")
    return found
