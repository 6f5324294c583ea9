"""Attackers of the benchmark: what they send and train on, and what the tables count."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import leakage
from benchmarks.attacks import inversion, masked_liar, optimised, page, study, uploads
from benchmarks.attacks.attackers import (
    HIT,
    Attack,
    AttackedFedAvg,
    attacked_upload,
    backdoored,
    flipped,
    patched,
    updates,
    within_announced,
)
from benchmarks.attacks.study import Cell
from fedmodels.config.reduction import Reduction
from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Prototypes
from fedtide import inprocess
from fedtide.testing.trial import context_of, digits_in, tiny_experiment
from tests.conftest import records_of

OWN = "benchmarks/attacks/attackers.py:Attacked"
RECEIVED = Bundle(weights={"base/w": torch.tensor([10.0, 10.0])})
UPLOAD = Bundle(weights={"base/w": torch.tensor([11.0, 12.0]), "base/n": torch.tensor(3)})
HONEST = [{("weights", "base/w"): torch.tensor(u)} for u in ([1.0, 0.0], [3.0, 2.0], [5.0, 4.0])]
ROWS = Prototypes.of({2: (torch.tensor([1.0, -2.0]), 4), 5: (torch.tensor([3.0, 0.5]), 9)}, 2)
SET = Prototypes.by_position(torch.tensor([[1.0], [2.0], [3.0]]))


@pytest.mark.parametrize(
    ("attack", "strength", "sent"),
    [
        ("sign_flip", "usual", [9.0, 8.0]),  # 10 - 1, 10 - 2
        ("scaling", "usual", [0.0, -10.0]),  # 10 - 10, 10 - 20
        ("scaling", 10.0, [20.0, 30.0]),
        ("scaling", 2e6, [1e6, 1e6]),  # more would be refused
        ("negation", "usual", [-11.0, -12.0]),
        ("inner_product", "usual", [4.0, 6.0]),  # 10 - 2 * 3, 10 - 2 * 2
        ("inner_product", 0.5, [8.5, 9.0]),
        ("a_little_is_enough", "usual", [10.550510, 9.550510]),  # 13 - 1.5 * sqrt(8 / 3), ...
        ("a_little_is_enough", 0.0, [13.0, 12.0]),
    ],
)
def test_updates_of_attackers(attack, strength, sent):
    """The own update is (1, 2); the honest ones have the mean (3, 2) and the variance 8/3."""
    how = Attack(attack=attack, attackers=1, strength=strength)
    found = attacked_upload(how, UPLOAD, RECEIVED, HONEST).weights
    torch.testing.assert_close(found["base/w"], torch.tensor(sent))
    assert found["base/n"] == 3, "an integer is no update"
    assert UPLOAD.weights["base/w"].tolist() == [11.0, 12.0]


ROWS_OF_HONEST = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 4.0]]).double()


@pytest.mark.parametrize(
    ("attack", "deviation", "vector"),
    [
        # |(-2, -2) - gamma (3, 2) / sqrt(13)|^2 = 8 + 20 gamma / sqrt(13) + gamma^2 <= 32
        (optimised.min_max, "unit", [0.6236, 0.4157]),
        (optimised.min_max, "sign", [1.0, 0.0]),  # 8 + 8 gamma + 2 gamma^2 <= 32: gamma is 2
        (optimised.min_max, "std", [1.0, 0.0]),  # the same way, as both deviations are sqrt(8 / 3)
        (optimised.min_sum, "unit", [0.6466, 0.4311]),  # 16 + 3 gamma^2 <= 8 + 32
        (optimised.min_sum, "sign", [1.0, 0.0]),  # 16 + 6 gamma^2 <= 40
    ],
)
def test_attackers_go_as_far_as_honest_updates_are_apart(attack, deviation, vector):
    """The mean is (3, 2); the farthest two are sqrt(32) apart, and 8 + 32 is the largest sum."""
    found = attack(ROWS_OF_HONEST, deviation)
    torch.testing.assert_close(found, torch.tensor(vector).double(), rtol=0, atol=1e-4)


def test_a_vector_made_for_a_rule_moves_it_farther_than_min_max():
    """Three attackers of ten: Krum takes theirs, and the median goes to the honest edge."""
    draw = torch.Generator().manual_seed(0)
    honest = 1 + torch.randn(7, 5, generator=draw, dtype=torch.float64)
    mean = honest.mean(0)
    for rule in (Reduction(reduce="krum", attackers=3), Reduction(reduce="median")):
        vectors = (
            optimised.tailored(honest, 3, rule, 10.0),
            optimised.min_max(honest, "std"),
            optimised.min_max(honest, "unit"),
        )
        made, *others = (
            float((optimised._reduced(honest, vector, 3, rule) - mean).norm()) for vector in vectors
        )
        assert made >= 0.99 * max(others)
        assert float(vectors[0].norm()) <= 10 * float(honest.norm(dim=1).median())


def test_attackers_change_weights_and_prototypes_together():
    """All send one vector; a class that one honest client has stays the attacker's own."""
    rows = {("class", "2"): torch.tensor([1.0, 0.0]), ("class", "5"): torch.tensor([9.0, 9.0])}
    own = {("weights", "base/w"): torch.tensor([7.0, 7.0]), **rows}
    honest = [{**each, ("class", "2"): each["weights", "base/w"]} for each in HONEST]
    together = optimised.Conspiracy("min_max", "sign", honest, Reduction(), 3)
    found = together.updates(own)
    for place in (("weights", "base/w"), ("class", "2")):
        torch.testing.assert_close(found[place], torch.tensor([1.0, 0.0]))
    assert torch.equal(found["class", "5"], rows["class", "5"])


@pytest.mark.parametrize(
    ("attack", "rows", "whole"),
    [
        ("prototype_flip", [[-1.0, 2.0], [-3.0, -0.5]], [-1.0, -2.0, -3.0]),
        ("prototype_scaling", [[50.0, -100.0], [150.0, 25.0]], [50.0, 100.0, 150.0]),
        ("prototype_constant", [[1e5, 1e5], [1e5, 1e5]], [1e5, 1e5, 1e5]),
        ("prototype_swap", [[3.0, 0.5], [1.0, -2.0]], [2.0, 3.0, 1.0]),
    ],
)
def test_prototypes_of_attackers(attack, rows, whole):
    upload = Bundle(weights=UPLOAD.weights, prototypes={"class": ROWS, "alp/0": SET})
    found = attacked_upload(Attack(attack=attack, attackers=1), upload, RECEIVED)
    assert found.prototypes["class"].vectors.tolist() == rows
    assert found.prototypes["class"].labels.tolist() == [2, 5]
    assert found.prototypes["alp/0"].vectors.flatten().tolist() == whole
    assert found.weights == UPLOAD.weights


def test_a_method_without_weights_has_updates_of_prototypes():
    """Class 2 was given as (0, 1), class 5 was not given."""
    given = Bundle(prototypes={"class": Prototypes.of({2: (torch.tensor([0.0, 1.0]), 1)}, 2)})
    upload = Bundle(prototypes={"class": ROWS})
    found = updates(upload, given)
    assert {key: u.tolist() for key, u in found.items()} == {
        ("class", "2"): [1.0, -3.0],
        ("class", "5"): [3.0, 0.5],
    }
    sent = attacked_upload(Attack(attack="sign_flip", attackers=1), upload, given)
    assert sent.prototypes["class"].vectors.tolist() == [[-1.0, 4.0], [-3.0, -0.5]]


def test_equal_to_a_published_implementation():
    """byzfl adds the deviation with n - 1 in its denominator, times tau."""
    attacks = importlib.import_module("byzfl.attacks.attacks")
    stacked = torch.stack([each["weights", "base/w"] for each in HONEST])
    for kind, theirs in (
        ("inner_product", attacks.InnerProductManipulation(tau=2.0)),
        ("a_little_is_enough", attacks.ALittleIsEnough(tau=-1.5 * (2 / 3) ** 0.5)),
    ):
        sent = attacked_upload(Attack(attack=kind, attackers=1), UPLOAD, RECEIVED, HONEST)
        torch.testing.assert_close(sent.weights["base/w"] - 10, theirs(stacked))


def test_data_of_attackers():
    assert flipped(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    x, white = torch.zeros(4, 1, 8, 8), torch.tensor([16.0])
    marked = patched(x, white)
    assert marked[:, :, 6:, 6:].eq(16).all()
    assert marked.sum() == 4 * 4 * 16
    y, how = torch.tensor([1, 2, 3, 4]), Attack(attack="backdoor", attackers=1, target=7)
    inputs, labels = backdoored(x, y, how, white, seed=0)
    changed = labels != y
    assert labels[changed].tolist() == [7, 7], "half of four"
    assert torch.equal(inputs.flatten(1).any(1), changed)
    again = backdoored(x, y, how, white, seed=0)
    assert torch.equal(again[0], inputs)
    others = [backdoored(x, y, how, white, seed)[1].tolist() for seed in range(8)]
    assert len({tuple(each) for each in others}) > 1
    assert not x.any(), "the data themselves stay"


def test_attackers_say_nothing_beyond_what_they_announced():
    """Three examples of class 2 were announced, none of class 5."""
    counts = torch.tensor([0, 0, 3, 0, 0, 0])
    told = Histogram(torch.tensor([0, 1, 9, 0, 0, 0]), torch.tensor([0, 0, 5, 0, 0, 7]))
    made = {"2": GeneratorState(1, {}), "5": GeneratorState(1, {}), "all": GeneratorState(1, {})}
    upload = Bundle(prototypes={"class": ROWS, "alp": SET}, histogram=told, generators=made)
    found = within_announced(upload, counts, visits=2)
    assert {k: c for k, (_, c) in found.prototypes["class"].rows().items()} == {2: 3}
    assert found.prototypes["alp"] is SET
    assert found.histogram is not None
    assert found.histogram.round.tolist() == [0, 0, 3, 0, 0, 0]
    assert found.histogram.total.tolist() == [0, 0, 5, 0, 0, 0]
    assert [*found.generators] == ["2", "all"]
    empty = Histogram(torch.zeros(0, dtype=torch.int32), told.total)
    kept = within_announced(Bundle(histogram=empty), counts, visits=1).histogram
    assert kept is not None
    assert not len(kept.round), "a part may be left out"


@dataclass
class OfAClient:
    """Test data of a client: two images of class 0, one of 1 and one of 2."""

    x: Tensor
    num_seen: int = 1

    def test(self, task: int) -> tuple[Tensor, Tensor]:
        return self.x, torch.tensor([0, 0, 1, 2])

    def global_test(self) -> None:
        return None


def test_hits_are_images_of_other_classes_taken_for_the_target():
    """Both images of class 0 are taken for it, and that of class 1: one hit of two possible."""
    x = torch.arange(4.0).view(4, 1, 1, 1)
    ctx: Any = type("Context", (), {"stream": OfAClient(x)})
    method = AttackedFedAvg(by=Attack(attack="backdoor", attackers=1))
    scores = method._hits(ctx, x, torch.tensor([0, 0, 0, 2]), torch.zeros(4, 3))
    assert (scores.argmax(1) == torch.tensor([0, 0, 1, 2])).tolist() == [False, False, True, False]
    assert study._share(0.25, [2, 1, 1]) == 0.5
    assert study._share(0.0, [2, 0, 0]) is None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_in(tmp_path_factory.mktemp("digits") / "data")


def sent_in(
    data: Path, out: Path, monkeypatch: pytest.MonkeyPatch, method: str, **table: Any
) -> tuple[list[dict[Any, Bundle]], list[Bundle], dict[str, Any]]:
    """Return the uploads and the common payload of each round of a run, and its summary."""
    trips: list[dict[Any, Bundle]] = []
    given: list[Bundle] = []

    class Recording(inprocess.InProcessCohort):
        def send_and_receive(self, trip: Any) -> Any:
            found = super().send_and_receive(trip)
            if trip.form.spec.required:
                trips.append({c: a.upload for c, a in found.by_client.items()})
                given.append(trip.common)
            return found

    monkeypatch.setattr(inprocess, "InProcessCohort", Recording)
    of_method = {"name": OWN + method, "attackers": 1, **table}
    run = tiny_experiment(method=of_method, schedule={"order": "rounds_outer"})
    summary = inprocess.run_in_process(run, data, out)
    return trips, given, summary


def test_attackers_change_their_own_uploads_alone(data, tmp_path, monkeypatch):
    honest, given, _ = sent_in(data, tmp_path / "a", monkeypatch, "FedAvg")
    attacked, got, _ = sent_in(
        data, tmp_path / "b", monkeypatch, "FedAvg", attack="inner_product", strength=3.0
    )
    first, then = honest[0], attacked[0]
    assert [*first] == [0, 1, 2]
    for client in (0, 1):
        assert all(
            torch.equal(w, then[client].weights[k]) for k, w in first[client].weights.items()
        )
    for start, sent in zip(got, attacked, strict=True):  # every round: received - 3 * mean
        for key, w in start.weights.items():
            mean = torch.stack([sent[c].weights[key] - w for c in (0, 1)]).mean(0)
            torch.testing.assert_close(sent[2].weights[key], w - 3 * mean)
    assert len(attacked) == len(got) == 4
    assert not torch.equal(attacked[1][0].weights["head/bias"], honest[1][0].weights["head/bias"])
    assert given[0].weights.keys() == got[0].weights.keys()


def test_backdoors_are_drawn_by_the_seed_and_counted_at_clients(data, tmp_path, monkeypatch):
    runs = [
        sent_in(data, tmp_path / name, monkeypatch, "Gldp", attack="backdoor", t=1, s=1)[2]
        for name in "ab"
    ]
    assert runs[0]["state_sha256"] == runs[1]["state_sha256"]
    rows = records_of(tmp_path / "a")
    assert f"after_downlink:{HIT}" in rows[-1]["clients"]["0"]["views"]


def test_label_flips_pass_the_checks_of_what_was_announced(data, tmp_path, monkeypatch):
    """Classes of each client are few here: most flipped labels are of classes it has not."""
    trips, _, summary = sent_in(data, tmp_path / "a", monkeypatch, "FedProto", attack="label_flip")
    assert all([*each] == [0, 1, 2] for each in trips)
    assert summary["state_sha256"]


def test_attacks_that_cannot_be_are_refused(data, tmp_path, monkeypatch):
    def line(method: str, **table: Any) -> str:
        with pytest.raises(ConfigError) as error:
            sent_in(data, tmp_path / str(table), monkeypatch, method, **table)
        return str(error.value)

    assert "uploads hold no prototypes" in line("FedAvg", attack="prototype_flip")
    assert "uploads hold no weights" in line("FedProto", attack="negation")
    assert "nobody is left who is honest" in line("FedAvg", attack="sign_flip", attackers=3)


def test_cells_of_a_study():
    assert Cell.of("FedAvg, median", "2, sign flip") == Cell("FedAvg", "median", "sign flip", 2)
    assert Cell.of("GLDP", "none") == Cell("GLDP", "", "none", 0)
    assert not Cell("FedAvg", "", "prototypes flipped", 2).means_something()
    assert Cell("GLDP", "", "prototypes flipped", 2).means_something()


def test_tables_compare_the_same_honest_clients(tmp_path, monkeypatch):
    """Clients 0 and 1 fall from 0.8 to 0.6, 0.6 and 0.5: differences -20, -20, -30.

    Their mean is -23.3, their deviation 5.77, the quantile of t with two degrees 4.303.
    """
    plain, attacked = Cell("FedAvg", "", "none", 0), Cell("FedAvg", "", "sign flip", 1)
    runs = [
        *({"cell": vars(plain), "seed": s, "trained": [0.8, 0.8, 0.0]} for s in range(3)),
        *(
            {"cell": vars(attacked), "seed": s, "trained": [a, a, 1.0], "aside": 0.0}
            for s, a in enumerate([0.6, 0.6, 0.5])
        ),
    ]
    (tmp_path / "x.json").write_text(json.dumps({"environment": {"torch": "2"}, "runs": runs}))
    monkeypatch.setattr(page, "RECORDS", tmp_path)
    text = page.page("x")
    assert "| none | 80.0 |" in text
    assert "| sign flip | 56.7 [-37.7, -9.0] |" in text
    assert "Of 6 runs with seeds 0, 1, 2; torch 2." in text


def test_what_tells_members_from_others():
    """Of six pairs of one class four are won and one is a tie, and both of the other class's two.

    The class of the second pair has few members and large scores, which tell nothing of members.
    """
    members, others = torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0, 2.5])
    assert leakage.area([(members, others)]) == pytest.approx(4.5 / 6)
    second = torch.tensor([100.0]), torch.tensor([99.0, 98.0])
    assert leakage.area([(members, others), second]) == pytest.approx(6.5 / 8)
    assert leakage.at_false_alarms(members, others) == 0.5, "above the highest of the others"
    assert leakage.at_false_alarms(members, others, share=0.67) == 1.0
    scaled = leakage.alike(torch.tensor([4.0]), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(scaled[0], torch.tensor([2**0.5]))
    assert scaled[1].mean() == 0


def test_rebuilt_images_are_judged_by_the_truth():
    """The second guess is an own image but for its brightness, the first one nearly so."""
    every = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]]), torch.tensor([4, 4, 4])
    own = every[0][:2], every[1][:2]
    guess = torch.stack([torch.tensor([0.9, 0.1, 0.0]), 3 * every[0][1] + 1])
    found = inversion.judged(guess, torch.tensor([4, 4]), own, every)
    assert [one.recognised for one in found] == [True, True]
    assert [one.likeness for one in found] == pytest.approx([0.9948, 1.0], abs=1e-3)
    assert [one.chance for one in found] == pytest.approx([2 / 3] * 2)
    assert inversion.variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])) == 0.5


def test_one_image_of_one_step_is_read_off_exactly(tmp_path):
    """The first layer's gradient is the image times that of the bias, unit by unit."""
    run = uploads.experiment("fedavg", "mlp", batch_size=1, local_epochs=1, momentum=0.0)
    ctx = context_of(run, uploads.dealt(run, tmp_path), 0)
    x, y = ctx.stream.train(0)
    own, every = (x[:1], y[:1]), (x, y)
    found = inversion.read_off(inversion.update_of(uploads.trained_on(run, ctx, *own)), own, every)
    assert [one.recognised for one in found] == [True]
    assert found[0].likeness == pytest.approx(1.0, abs=1e-4)


def test_a_liar_under_masks_is_bounded_by_clip():
    """A round of each: without a bound, one of six takes the model away."""
    forms = ("nobody lies", "clip = 0", "default, groups = 2, and the liar does not clip")
    honest, unbounded, grouped = (masked_liar.tried(name, 1, 1) for name in forms)
    assert honest["counted"] == unbounded["counted"] == grouped["counted"] == 1
    assert unbounded["honest_accuracy"] < honest["honest_accuracy"]
