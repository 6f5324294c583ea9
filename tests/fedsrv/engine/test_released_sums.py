"""What the server releases of two neighbouring cohorts, by what comes out of the code itself.

Each number that is released is affine in noise of its own. So a secret that draws 0 shows the
number without noise, one that draws 1 shows the standard deviation, and the distance of two
cohorts' releases in standard deviations is exact: one client more may move them by 1 / z.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from fedmodels.config.privacy import Privacy
from fedmodels.privacy.contributions import Contributions
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedsrv.parts.private_rounds import RATE, ClientPrivacy

GIVEN = {"base/w": torch.zeros(2)}
SPEC = BundleSpec.of(Bundle(GIVEN))
NEAR, AT_THE_BOUND, BEYOND = [0.1, 0.0], [0.6, 0.8], [3.0, 4.0]


def released(cohort, noise, drawn, expected=4.0, quantile=0.5):
    """Return all numbers that one interaction releases, the noise on each being ``drawn`` stds."""
    privacy = Privacy(
        level="client", clip=1.0, clip_quantile=quantile, noise_multiplier=noise, delta=1e-3
    )
    secret = SimpleNamespace(normal=lambda content, purpose: torch.full_like(content, drawn))
    rounds = ClientPrivacy.__new__(ClientPrivacy)
    rounds.privacy, rounds.noise, rounds._clips = privacy, noise, {-1: 1.0}
    rounds.releases = SimpleNamespace(secret=secret, has=lambda *_: True, note=lambda *_: None)
    rounds.method = SimpleNamespace(reduction="mean")
    of = Contributions(privacy, SPEC, num_classes=2)
    sent = {c: Bundle({"base/w": torch.tensor(w)}) for c, w in enumerate(cohort)}
    found = rounds._at_server(SimpleNamespace(interaction=0), of, expected, GIVEN, sent)
    numbers = [] if found is None else found.mean()["base/w"].tolist()
    if quantile is not None:
        numbers.append(quantile - math.log(rounds.facts["clip_next"]) / RATE)
    return torch.tensor(numbers, dtype=torch.float64)


def distance(one, other, noise, **facts):
    apart = released(other, noise, 0.0, **facts) - released(one, noise, 0.0, **facts)
    stds = released(one, noise, 0.1, **facts) - released(one, noise, 0.0, **facts)
    return float((apart / (stds / 0.1)).norm())


@pytest.mark.parametrize("more", [NEAR, AT_THE_BOUND, BEYOND])
@pytest.mark.parametrize("cohort", [[], [NEAR], [BEYOND, NEAR]])
@pytest.mark.parametrize("noise", [0.6, 1.0])
def test_one_client_moves_a_release_by_no_more_than_is_charged(cohort, more, noise):
    """With a bound that adapts, the number of clients within it is one of the numbers."""
    found = distance(cohort, [*cohort, more], noise)
    assert found <= 1 / noise * (1 + 1e-5)
    if more == AT_THE_BOUND:
        assert found == pytest.approx(1 / noise, rel=1e-4), "nothing is charged in vain"


@pytest.mark.parametrize("cohort", [[], [NEAR, NEAR], [NEAR, BEYOND], [BEYOND] * 3])
def test_a_share_within_the_bound_by_hand(cohort):
    """Of 4 that are expected, who is missing counts as half within."""
    expected = 0.5 + sum(0.5 if one == NEAR else -0.5 for one in cohort) / 4
    assert float(released(cohort, 1.0, 0.0)[-1]) == pytest.approx(expected)


def test_who_was_set_aside_is_not_expected_any_more():
    """Each of 8 clients comes with the chance 2/8; from interaction 2 on three are gone."""
    experiment = SimpleNamespace(
        schedule=SimpleNamespace(sampling="poisson", clients=8), cohort_size=2
    )
    rounds = ClientPrivacy.__new__(ClientPrivacy)
    rounds.store = SimpleNamespace(experiment=experiment)
    plan = SimpleNamespace(tasks=dict.fromkeys(range(8), 1), aside={0: 2, 1: 2, 5: 2})
    steps = [SimpleNamespace(interaction=n, cohort=(7,)) for n in range(4)]
    assert [rounds.expected(step, plan) for step in steps] == [2, 2, 5 / 4, 5 / 4]


def test_a_bound_goes_on_after_a_restart_from_what_the_last_record_left():
    rounds = ClientPrivacy.__new__(ClientPrivacy)
    told = {3: {"privacy": {"clip": 0.5, "clip_next": 0.4}}}
    rounds.privacy, rounds._clips = SimpleNamespace(clip=1.0), {}
    rounds.store = SimpleNamespace(ledger=SimpleNamespace(record=told.get))
    assert [rounds._clip_at(n) for n in (0, 4, 5)] == [1.0, 0.4, 1.0]
    rounds._clips = {4: 0.3}
    assert rounds._clip_at(5) == 0.3, "that of this process"


def test_the_sum_of_nobody_is_noise_alone():
    """Noise of 2 clips on a sum that 4 were expected for: 0.5 on the mean."""
    assert released([], 2.0, 1.0, quantile=None).tolist() == [0.5, 0.5]
    assert released([], 2.0, 0.0, quantile=None).tolist() == [0.0, 0.0]
