"""What of an upload is summed, which methods can do with sums, and what others say."""

import re
from pathlib import Path

import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.methods import make, names
from fedmodels.secure_sum.fixed_point import added
from fedmodels.tensors.bundle import Bundle, Problem, Prototypes
from fedmodels.tensors.uploads import Summed, Uploads
from fedmodels.training.run import RunFacts
from fedmodels.training.secure_upload import SecureUpload, check_secure_sum, clipped
from tests.conftest import tiny_experiment

PAGE = Path(__file__).parents[3] / "docs" / "secure-aggregation.md"
PROBLEM = Problem((1, 8, 8), 4)
WHY = {
    "creff": "needs every upload by itself", "fedali": "needs every upload by itself",
    "fedcil": "needs every upload by itself", "fedic": "needs every upload by itself",
    "fedmlp": "needs every upload by itself", "fedpac": "needs every upload by itself",
    "pfedgraph": "needs every upload by itself", "pfedgraph-replay": "needs every upload by itself",
    "pfedgrp": "needs every upload by itself: each client's model is mixed",
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
    assert [*form.spec.required] == ["weights/masked", *form.scalars.required]


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
    total = added([form.encoded(upload, {}, numbers) for upload in sent.values()])
    found = form.summed_up(total, numbers, {})
    assert found is not None
    uniform = weighting == "uniform"
    uploads = Uploads(sent, method.count, "mean", sums=[found])
    means = uploads.mean_prototypes("class", 4, 6, uniform=uniform)
    plain = Uploads(sent, method.count).mean_prototypes("class", 4, 6, uniform=uniform)
    assert means.labels.tolist() == plain.labels.tolist() == [0, 2]
    assert torch.allclose(means.vectors, plain.vectors, atol=1e-5)
    assert torch.allclose(means.vectors[0, :2], torch.tensor([5.0, 2] if uniform else [6.5, 1]))
    assert means.counts.tolist() == ([2, 1] if uniform else [4, 2])
    with pytest.raises(ConfigError, match="let weighs_prototypes say which"):
        uploads.mean_prototypes("class", 4, 6, uniform=not uniform)
    for hidden in (uploads[1].prototypes, uploads[1].weights):
        with pytest.raises(ConfigError, match="secure_sum hides single uploads"):
            len(hidden)


def test_weights_of_two_clients_by_hand_and_counters_stay():
    """(1 * 2.0 + 3 * -2.0) / 4 = -1 of every weight."""
    method, run = facts("fedavg", net={"name": "digits-cnn", "norm": "batch"})
    form = SecureUpload.of(method, run)
    assert form is not None
    assert all(name.endswith("num_batches_tracked") for name in form.given)
    given = {name: torch.tensor(7) for name in form.given}
    sent = [
        Bundle({n: torch.full(t.shape, value).to(t.dtype) for n, t in run.forms.items()},
               scalars={"num_examples": count}) for value, count in ((2.0, 1.0), (-2.0, 3.0))
    ]  # fmt: skip
    numbers = form.numbers(3, 3)
    found = form.summed_up(added([form.encoded(u, {}, numbers) for u in sent]), numbers, given)
    assert found is not None
    assert found.count == pytest.approx(4.0)
    for name, weights in found.mean.weights.items():
        assert bool((weights == (7 if name in given else -1)).all())
    nobody = form.encoded(Bundle(sent[0].weights, scalars={"num_examples": 0.0}), {}, numbers)
    assert form.summed_up(nobody, numbers, given) is None


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
        ({"schedule": {"open": True, "order": "tasks_outer"}}, "open = true does not go with"),
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
