"""A whole run of GLDP once more, and every figure of its records, from the data on the disk.

Of fedtide it takes the initial net, the cohorts that the records name, and the order of batches.
"""

import copy
import json

import numpy as np
import pytest
import torch

from fedtide.inprocess import run_in_process
from tests.conftest import context_of, records_of, tiny_experiment
from tests.independent import gldp

CLIENTS, TASKS = range(3), range(2)


def examples(place, part, facts):
    """Return inputs, normalised, and labels of a directory."""
    x, y = (np.load(place / f"{part}{name}.npy") for name in ("x", "y"))
    x = (x / facts["scale"] - facts["mean"][0]) / facts["std"][0]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def accuracy(predicted, y, classes=None):
    """Return the accuracy on the examples of some classes, None where there is none."""
    counts = torch.tensor([classes is None or k in classes for k in y.tolist()])
    return float((predicted == y)[counts].float().mean()) if counts.any() else None


def mean(values):
    known = [v for v in values if v is not None]
    return sum(known) / len(known)


def macro_f1(predicted, y):
    """Return the mean F1 of the classes that occur or are predicted."""
    scores = []
    for k in set(predicted.tolist()) | set(y.tolist()):
        hits = int(((predicted == k) & (y == k)).sum())
        scores.append(2 * hits / int((predicted == k).sum() + (y == k).sum()))
    return sum(scores) / len(scores)


class Course:
    """The run, interaction by interaction."""

    def __init__(self, experiment, root):
        self.experiment, self.root = experiment, root
        facts = json.loads((root / "0" / "client.json").read_text())
        places = {(i, t): root / str(i) / f"task-{t}" for i in CLIENTS for t in TASKS}
        self.train = {at: examples(place, "train_", facts) for at, place in places.items()}
        self.test = {at: examples(place, "test_", facts) for at, place in places.items()}
        self.union = examples(root / "global-test", "", facts)
        net = context_of(experiment, root).run.make_net()
        self.theta, self.heads = net.base, dict.fromkeys(CLIENTS, net.head)
        self.own, self.everyone = {i: {} for i in CLIENTS}, {}
        self.trained, self.before = {}, {}
        self.known = {}
        """The prototypes of each client that just trained, its own ones."""

    def trains(self, i, record):
        """Return what client i comes to in an interaction: base, head, own and new prototypes."""
        settings, task = self.experiment.training, record["task"]
        ctx = context_of(self.experiment, self.root, i, task, record["interaction"])
        order = ctx.generator("order")
        x, y = self.train[i, task]

        def batches():
            shuffled = torch.randperm(len(y), generator=order)
            return shuffled.split(settings.batch_size)

        return gldp.trained(
            self.theta, self.heads[i], self.own[i], self.everyone, x, y, t=1, s=1,
            lr=settings.lr, momentum=settings.momentum, decay=settings.weight_decay,
            batches=batches,
        )  # fmt: skip

    def interact(self, record):
        cohort, reported = record["cohort"], []
        self.before, self.trained, self.known = self.everyone, {}, {}
        for i in set(CLIENTS).difference(cohort):  # for the score alone: nothing of it stays
            self.trained[i], _, self.known[i], _ = self.trains(i, record)
        for i in cohort:
            base, self.heads[i], self.own[i], found = self.trains(i, record)
            self.trained[i], self.known[i] = base, self.own[i]
            reported.append(found)
        bases = [self.trained[i] for i in cohort]
        self.theta, self.everyone = gldp.aggregated(bases, reported, self.everyone)

    def tests(self, client, tasks=TASKS):
        parts = [self.test[client, t] for t in tasks]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def received(self, client, x):
        """Return what a client predicts by the prototypes and the representation it received."""
        return gldp.nearest(self.theta, x, self.everyone, self.own[client].keys())

    def fresh(self, client, x):
        """Return what a client predicts right after training, by the prototypes it trained with."""
        return gldp.nearest(self.trained[client], x, self.before, self.known[client].keys())

    def a_sel(self, record):
        tests = {i: self.tests(i, range(record["task"] + 1)) for i in record["cohort"]}
        return mean(accuracy(self.received(i, x), y) for i, (x, y) in tests.items())

    def by_task(self, clients, task, predict=None):
        tests = {i: self.test[i, task] for i in clients}
        predict = predict or self.received
        return {i: accuracy(predict(i, x), y) for i, (x, y) in tests.items()}

    def met(self, client):
        """Return the classes that a client trains on in any task."""
        return {k for t in TASKS for k in self.train[client, t][1].tolist()}

    def on_own_classes(self, predict, clients):
        """Return A_loc on what the global test set has of each client's classes (FedMLP)."""
        x, y = self.union
        return mean(accuracy(predict(i, x), y, self.met(i)) for i in clients)

    def of_received(self):
        """Return what a round's end says of the models that all clients received."""
        totals = torch.cat([y for _, y in self.train.values()]).bincount(minlength=10).tolist()
        rare = [k for k, n in enumerate(totals) if n < sorted(totals)[5]]  # below the upper half
        rules = {"": self.received, "_gldp_lp": self.by_own, "_classifier": self.by_head}
        tests = {i: self.tests(i) for i in CLIENTS}
        found = {
            f"a_loc{rule}": mean(accuracy(predict(i, x), y) for i, (x, y) in tests.items())
            for rule, predict in rules.items()
        }
        union = dict.fromkeys(CLIENTS, self.union)
        for name, sets in (("a_loc", tests), ("a_loc_balanced", union)):
            guesses = {i: (self.received(i, x), y) for i, (x, y) in sets.items()}
            found[name] = mean(accuracy(*guess) for guess in guesses.values())
            if rare:
                of_rare = [accuracy(*guess, rare) for guess in guesses.values()]
                found[f"{name}_minority"] = mean(of_rare)
        met = {i: sum(len(self.train[i, t][1]) for t in TASKS) for i in CLIENTS}
        weighed = [met[i] * accuracy(self.received(i, x), y) for i, (x, y) in tests.items()]
        own = self.on_own_classes(self.received, CLIENTS)
        found |= dict.fromkeys(("a_loc_own_classes", "a_loc_received_own_classes"), own)
        found |= {"a_loc_received": found["a_loc"], "a_glo": found["a_loc"]}
        return {**found, "iaa": sum(weighed) / sum(met.values())}

    def by_own(self, client, x):
        own = self.own[client]
        return gldp.nearest(self.theta, x, own or self.everyone, own.keys())

    def by_head(self, client, x):
        with torch.no_grad():
            return self.heads[client](copy.deepcopy(self.theta).eval()(x)).argmax(1)

    def of_trained(self, clients):
        """Return what a round's end says of the models of these clients right after training."""
        own = {i: (self.fresh(i, self.tests(i)[0]), self.tests(i)[1]) for i in clients}
        f1 = [macro_f1(*guess) for guess in own.values()]
        x, y = self.union
        return {
            "a_loc_trained": mean(accuracy(*guess) for guess in own.values()),
            "a_loc_trained_own_classes": self.on_own_classes(self.fresh, clients),
            "a_loc_trained_balanced": mean(accuracy(self.fresh(i, x), y) for i in clients),
            "personalization": mean(f1),
            "personalization_std": float(np.std(f1)),
            "generalization": mean(macro_f1(self.fresh(i, x), y) for i in clients),
        }


@pytest.mark.parametrize("trained", ["cohort", "all"])
def test_run(digits, tmp_path, trained):
    """A_sel after each task; after each round A_glo, A_loc by view and test set, IAA, macro-F1.

    Of the whole run AA, AFM and forgetting by view.
    """
    how = {
        "schedule": {"rounds": 3, "clients": 3, "per_round": 2},
        "evaluate": {"generalization": True, "last_rounds": 2, "trained": trained},
    }
    run_in_process(tiny_experiment(**how), digits, tmp_path / "reference")
    how["evaluate"]["reference"] = str(tmp_path / "reference")
    experiment = tiny_experiment(method={"name": "gldp", "t": 1, "s": 1}, **how)
    summary = run_in_process(experiment, digits, tmp_path / "run")["metrics"]
    course, after, series, fresh = Course(experiment, digits), {}, [], {}
    for record in records_of(tmp_path / "run"):
        course.interact(record)
        expected = {"a_sel": course.a_sel(record)}
        ends_round = record["task"] == TASKS[-1]
        after[record["task"]] = course.by_task(CLIENTS if ends_round else record["cohort"], 0)
        whose = CLIENTS if ends_round and trained == "all" else record["cohort"]
        if course.before:  # the first interaction has no prototypes to predict by
            fresh[record["task"]] = course.by_task(whose, 0, course.fresh)
        if ends_round:
            expected |= course.of_received() | course.of_trained(whose)
            series.append(expected)
        for name, value in expected.items():
            assert abs(record["metrics"][name] - value) < 1e-6, (record["interaction"], name)
    best = max(series, key=lambda row: row["personalization"])
    scored = [r["metrics"]["iaa"] for r in records_of(tmp_path / "reference") if r["task"] == 1]
    lost = {"received": after, "trained": fresh}
    forgot = {
        view: mean(found[0][i] - found[1][i] for i in found[0].keys() & found[1].keys())
        for view, found in lost.items()
    }
    figures = {
        "forgetting": forgot["received"],
        "forgetting_received": forgot["received"],
        "forgetting_trained": forgot["trained"],
        "a_loc": mean(row["a_loc"] for row in series[-2:]),
        "a_loc_trained": mean(row["a_loc_trained"] for row in series[-2:]),
        "aa": mean(row["iaa"] for row in series),
        "afm": mean(ref - row["iaa"] for ref, row in zip(scored, series, strict=True)),
        "best_generalization": best["generalization"],
    }
    for name, value in figures.items():
        assert abs(summary[name] - value) < 1e-6, name
