"""What of an upload is summed, which methods can do with sums, and what others say."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.methods import make, names
from fedmodels.secure_sum.fixed_point import added
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.tensors.declared_counts import DeclaredCounts
from fedmodels.tensors.uploads import Summed, Uploads
from fedmodels.training.run import RunFacts
from fedmodels.training.secure_upload import SecureUpload, check_secure_sum, clipped
from tests.conftest import tiny_experiment

PAGE = Path(__file__).parents[3] / "docs" / "secure-aggregation.md"
PROBLEM = Problem((1, 8, 8), 4)
WHY = {
    "creff": "needs every upload by itself", "fedali": "needs every upload by itself",
    "fedccfa": "needs every upload by itself",
    "fedcil": "needs every upload by itself", "fedic": "needs every upload by itself",
    "fedmlp": "needs every upload by itself", "fedpac": "needs every upload by itself",
    "pfedgraph": "needs every upload by itself", "pfedgraph-replay": "needs every upload by itself",
    "pfedgrp": "needs every upload by itself: each client's model is mixed",
    "fedtgp": "needs every upload by itself: each client's prototypes train the global ones",
    "ifca": "needs every upload by itself", "feddrift": "needs every upload by itself",
    "feddrift-eager": "needs every upload by itself", "glfc": "needs every upload by itself",
    "pilora": "needs every upload by itself: each class's prototype is mixed",
    "local": "uploads neither weights nor prototypes",
}  # fmt: skip
NETS = {"fedali", "fedbn"}
"""Methods that this net is too plain for."""


def facts(method="fedavg", secure=True, net=None, **tables):
    """Return a method and the facts of its run with secure sums."""
    net = net or {"name": "mlp", "hidden": [6]}
    experiment = tiny_experiment(
        method={"name": method} if isinstance(method, str) else method, net=net,
        privacy={"secure_sum": secure}, **tables,
    )  # fmt: skip
    return make(experiment.method.name, **experiment.method.hyper_parameters()), RunFacts(
        experiment, PROBLEM
    )


def summed(form, numbers, uploads, given=None, lie=lambda vector: vector):
    """Return what uploads come to; the last one is changed by a lie on its way."""
    *honest, last = [form.encoded(upload, given or {}, numbers) for upload in uploads]
    sent = [form.travelling(u, v) for u, v in zip(uploads, [*honest, lie(last)], strict=True)]
    total = added([form.integers(one) for one in sent])
    return form.summed_up(total, numbers, given or {}, [form.declared(one) for one in sent])


@pytest.mark.parametrize("name", [n for n in names() if n not in {"centralized", *NETS}])
def test_a_method_can_do_with_sums_or_says_why_not(name):
    if name in WHY:
        with pytest.raises(ConfigError, match=WHY[name]) as refused:
            check_secure_sum(*facts(name))
        assert "\n" not in str(refused.value)
        return
    method, run = facts(name)
    check_secure_sum(method, run)
    form = SecureUpload.of(method, run)
    assert form is not None
    counts = ["weights/counts"] if form.levels else []
    assert [*form.spec.required] == ["weights/masked", *counts, *form.scalars.required]


@pytest.mark.needs("methods")
def test_the_page_names_the_methods_that_can():
    section = PAGE.read_text("utf-8").partition("## Which methods")[2]
    listed = {*re.findall(r"`([a-z_-]+)`", section.split("\n\n")[2])}
    assert listed == {*names()} - WHY.keys() - {"centralized"}


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_prototypes_of_three_clients_by_hand(weighting):
    """Class 0: (2, 4) of 1 example and (8, 0) of 3, so (5, 2) or (6.5, 1). Class 2: (1, 1) of 2."""
    method, run = facts({"name": "fedproto", "weighting": weighting})
    form = SecureUpload.of(method, run)
    assert form is not None
    assert form.levels == {"class": (4, 6)}
    pad = torch.zeros(4)
    rows = {
        0: {0: (torch.tensor([2.0, 4.0]), 1)},
        1: {0: (torch.tensor([8.0, 0.0]), 3), 2: (torch.tensor([1.0, 1.0]), 2)},
        4: {},
    }
    sent = {
        c: Bundle(prototypes={"class": Prototypes.of(
            {k: (torch.cat([v, pad]), n) for k, (v, n) in own.items()}, 6)})
        for c, own in rows.items()
    }  # fmt: skip
    numbers = form.numbers(3, 5)
    assert numbers.most == (5 if weighting == "examples" else 1)
    found = summed(form, numbers, sent.values())
    assert found is not None
    uniform = weighting == "uniform"
    uploads = Uploads(sent, method.count, "mean", sums=[found])
    means = uploads.mean_prototypes("class", 4, 6, uniform=uniform)
    plain = Uploads(sent, method.count).mean_prototypes("class", 4, 6, uniform=uniform)
    assert means.labels.tolist() == plain.labels.tolist() == [0, 2]
    assert torch.allclose(means.vectors, plain.vectors, atol=1e-5)
    assert torch.allclose(means.vectors[0, :2], torch.tensor([5.0, 2] if uniform else [6.5, 1]))
    assert means.counts.tolist() == ([2, 1] if uniform else [4, 2])
    with pytest.raises(ConfigError, match="set weighs_prototypes"):
        uploads.mean_prototypes("class", 4, 6, uniform=not uniform)
    for hidden in (uploads[1].prototypes, uploads[1].weights):
        with pytest.raises(ConfigError, match="masks hide single uploads"):
            len(hidden)


def test_weights_of_two_clients_by_hand_and_counters_stay():
    """(1 * 2.0 + 3 * 6.0) / 4 = 5 of every weight; a variance below zero is nobody's."""
    method, run = facts("fedavg", net={"name": "digits-cnn", "norm": "batch"})
    form = SecureUpload.of(method, run)
    assert form is not None
    assert all(name.endswith("num_batches_tracked") for name in form.given)
    given = {name: torch.tensor(7) for name in form.given}
    sent = [
        Bundle({n: torch.full(t.shape, value).to(t.dtype) for n, t in run.forms.items()},
               scalars={"num_examples": count}) for value, count in ((2.0, 1.0), (6.0, 3.0))
    ]  # fmt: skip
    numbers = form.numbers(3, 3)
    found = summed(form, numbers, sent, given)
    assert found is not None
    assert found.count == 4.0
    for name, weights in found.mean.weights.items():
        assert bool((weights == (7 if name in given else 5)).all())
    with pytest.raises(PayloadError, match=r"running_var' holds .* cannot be below zero"):
        summed(form, numbers, sent, given, lambda vector: -vector)
    nobody = Bundle(sent[0].weights, scalars={"num_examples": 0.0})
    assert summed(form, numbers, [nobody], given) is None


def moved(number, places=1):
    """Return a lie: the integers of an upload, of which the first ones are moved by a number."""

    def lie(vector):
        vector[:places] += np.asarray(number).astype(vector.dtype)
        return vector

    return lie


def liars(secure=True, **tables):
    """Return the form of an MLP's uploads, and three uploads of 0.5 with 1, 2 and 3 examples."""
    method, run = facts("fedavg", secure, **tables)
    form = SecureUpload.of(method, run)
    assert form is not None
    sent = [
        Bundle({n: torch.full(t.shape, 0.5) for n, t in run.forms.items()},
               scalars={"num_examples": count}) for count in (1.0, 2.0, 3.0)
    ]  # fmt: skip
    return form, form.numbers(3, 3), sent


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_beyond_what_honest_clients_send_is_refused(bits):
    """A mean of 64 is the largest that there is: a lie of its client moves it no farther."""
    form, numbers, sent = liars({"bits": bits})
    wild = 2.0 ** (bits - 2)
    with pytest.raises(PayloadError, match=r"tensor '.*' is .* beyond .* largest = 64") as refused:
        summed(form, numbers, sent, lie=moved(wild))
    assert "\n" not in str(refused.value)
    inside = (63.4 * 6 / 3) * 2.0**numbers.scale  # 0.5 + 63.4 are below 64
    found = summed(form, numbers, sent, lie=moved(inside))
    assert found is not None
    first = next(iter(form.summed))
    assert found.mean.weights[first].flatten()[0].item() == pytest.approx(63.9, abs=1e-4)
    assert found.count == 6.0, "what counts is declared, and no lie changes it"


def test_a_mean_that_moved_farther_than_every_client_may_is_refused():
    """Everybody moves by 1 in each of the first four numbers: the norm of the change is 2."""
    form, numbers, sent = liars({"clip": 2.0})
    given = {n: w.clone() for n, w in sent[0].weights.items()}
    first = next(iter(form.summed))
    for upload in sent:
        upload.weights[first].view(-1)[:4] += 1.0
    found = summed(form, numbers, sent, given)
    assert found is not None
    lie = moved(2.0**numbers.scale / 100, 4)  # 1 / 200 more in each
    with pytest.raises(PayloadError, match=r"a norm of 2\.0\d+, beyond .* clip = 2"):
        summed(form, numbers, sent, given, lie)


def test_declared_counts_are_those_that_were_announced():
    method, run = facts({"name": "fedproto", "weighting": "examples"})
    form = SecureUpload.of(method, run)
    assert form is not None
    counts = torch.tensor([1, 0, 5, 0])
    now = DeclaredCounts(0, counts, counts, counts)

    def sent(*counted):
        return Bundle({"counts": torch.tensor(counted, dtype=torch.int32)})

    form.check(sent(1, 0, 5, 0), now, 6)
    for counted, line in (((1, 0, 6, 0), "says 6 examples of class 2; 5 were"),
                          ((0, 1, 0, 0), "says 1 examples of class 1; 0 were"),
                          ((-1, 0, 0, 0), "counts below zero")):  # fmt: skip
        with pytest.raises(PayloadError, match=line):
            form.check(sent(*counted), now, 6)


def test_a_change_is_clipped_to_a_norm():
    """(3, 4) has the norm 5: of it (0.6, 0.8) are left. What was not received is not touched."""
    received = {"a": torch.zeros(1), "b": torch.ones(1)}
    weights = {"a": torch.tensor([3.0]), "b": torch.tensor([5.0]), "new": torch.tensor([9.0])}
    found = clipped(weights, received, 1.0)
    assert [round(float(w), 6) for w in found.values()] == [0.6, 1.8, 9.0]
    assert clipped(weights, received, 5.0) is weights


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"schedule": {"order": "asynchronous", "buffer": 2}}, "asynchronous.* does not go with"),
        ({"schedule": {"clients": 5, "per_round": 3, "over_select": 1}}, "over_select does not go"),
        ({"schedule": {"clients": 2}}, "cohorts of at least 3 clients"),
        ({"method": {"name": "centralized"}}, "cohorts of at least 3 clients"),
        ({"compression": {"down": "float16"}}, r"\[compression\] up and down do not go with"),
        ({"server": {"reduce": "median"}}, "give .* groups, 3 at least"),
        ({"secure": {"bits": 48}}, "32 or 64"),
        ({"secure": {"threshold": 0.5}}, "greater than 0.5"),
    ],
)
def test_what_does_not_go_with_a_secure_sum_is_refused(tables, line):
    with pytest.raises(ConfigError, match=line) as refused:
        facts(**tables)
    assert "\n" not in str(refused.value)


def test_groups_must_be_large_enough():
    method, run = facts(secure={"groups": 2}, schedule={"clients": 5})
    with pytest.raises(ConfigError, match="a group would have 2 clients"):
        check_secure_sum(method, run)


def test_a_rule_takes_groups_as_uploads():
    """Three groups: the mean weighs them, and their sums are one upload each to a rule."""
    sums = [
        Summed(Bundle({"w": torch.tensor([value])}), count, False)
        for value, count in ((1.0, 3.0), (2.0, 1.0), (50.0, 1.0))
    ]
    uploads = Uploads({}, lambda upload: 1.0, "mean", sums=sums)
    found = uploads.mean()
    assert found is not None
    assert found["w"].item() == 11.0
    assert Uploads({}, lambda upload: 1.0, "mean", sums=[]).mean() is None
