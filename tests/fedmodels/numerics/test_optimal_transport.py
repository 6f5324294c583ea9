"""Our own plan by hand and where numbers underflow, and POT's plans."""

from __future__ import annotations

import itertools

import numpy as np
import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import logsumexp
from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.nets.alp import ALP
from fedmodels.numerics.optimal_transport import COSINES, pot_plan, sinkhorn_plan

SIMILARITY = [[1, 0.8], [0.9, 0.6], [0.8, 0.9]]


def test_sinkhorn_anchor():
    # fedali.md, anchor 1
    plan = sinkhorn_plan(torch.tensor(SIMILARITY, dtype=torch.float64))
    want = [[0.475257, 0.074781], [0.510339, 0.010868], [0.014404, 0.914351]]
    np.testing.assert_allclose(plan, want, atol=1e-6)
    np.testing.assert_allclose(plan.sum(1), [0.550037, 0.521207, 0.928755], atol=1.1e-6)
    np.testing.assert_allclose(plan.sum(0), 1, atol=1e-12)
    many = sinkhorn_plan(torch.tensor(SIMILARITY, dtype=torch.float64), iterations=100)
    np.testing.assert_allclose(many.sum(1), 2 / 3, atol=1e-6)


def test_sinkhorn_samples_last():
    plan = sinkhorn_plan(np.array(SIMILARITY), last="samples")
    assert isinstance(plan, np.ndarray)
    want = [[0.745243, 0.254757], [0.955782, 0.044218], [0.007199, 0.992801]]
    np.testing.assert_allclose(plan, want, atol=1e-6)
    with pytest.raises(ConfigError, match="'rows' must be"):
        sinkhorn_plan(np.array(SIMILARITY), last="rows")


@given(hnp.arrays(np.float64, (6, 4), elements=st.floats(-1, 1)), st.permutations(range(4)))
def test_sinkhorn_invariants(similarity, order):
    plan = sinkhorn_plan(similarity)
    assert (plan >= 0).all()
    np.testing.assert_allclose(plan.sum(0), 1, atol=1e-9)
    np.testing.assert_allclose(sinkhorn_plan(similarity[:, order]), plan[:, order], atol=1e-9)


def test_sinkhorn_stays_float32_under_autocast():
    similarity = torch.tensor(SIMILARITY, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        plan = sinkhorn_plan(similarity)
        half = sinkhorn_plan(similarity.half())
    assert plan.dtype == half.dtype == torch.float32
    assert not plan.requires_grad
    assert bool(torch.isfinite(half).all())
    torch.testing.assert_close(plan, sinkhorn_plan(similarity), rtol=0, atol=0)


def unlike(rows: int = 20) -> Tensor:
    """Return cosines of which those of column 2 are all -1: it is like no embedding."""
    similarity = 0.8 + 0.2 * torch.rand(rows, 5, generator=torch.Generator().manual_seed(0))
    similarity[:, 2] = -1.0
    return similarity


def in_logs(similarity: Tensor, epsilon: float, axes: tuple[int, int]) -> np.ndarray:
    logs = similarity.double().numpy() / epsilon
    for _ in range(3):
        for axis in axes:
            logs = logs - logsumexp(logs, axis, keepdims=True)
    return np.exp(logs)


@pytest.mark.parametrize("epsilon", [0.05, 0.048, 0.047, 0.02, 0.015, 0.01, 1e-3, 1e-6])
@pytest.mark.parametrize(("last", "axes"), [("prototypes", (1, 0)), ("samples", (0, 1))])
def test_sinkhorn_is_a_number_for_a_prototype_unlike_every_embedding(epsilon, last, axes):
    plan = sinkhorn_plan(unlike(), epsilon, last=last)
    assert plan.dtype == torch.float32
    np.testing.assert_allclose(plan, in_logs(unlike(), epsilon, axes), atol=1e-5)
    told = sinkhorn_plan(unlike(), epsilon, last=last, spread=COSINES)
    torch.testing.assert_close(told, plan, rtol=0, atol=1e-5)
    np.testing.assert_allclose(plan.sum(axes[1]), 1, atol=1e-5)
    assert bool(sinkhorn_plan(unlike(), 1e-300, last=last).isfinite().all())


@pytest.mark.parametrize("epsilon", [0.05, 0.1])
def test_sinkhorn_is_the_listing_where_nothing_underflows(epsilon):
    similarity = torch.cat([unlike(), -unlike()])
    listing = ((similarity - similarity.amax(1, keepdim=True)) / epsilon).exp()
    for _ in range(3):
        listing = listing / listing.sum(1, keepdim=True)
        listing = listing / listing.sum(0, keepdim=True)
    plan = sinkhorn_plan(similarity, epsilon)
    torch.testing.assert_close(plan, listing, rtol=1e-5, atol=1e-30)


def test_no_embeddings_have_an_empty_plan():
    assert sinkhorn_plan(torch.zeros(0, 3)).shape == (0, 3)


def test_an_alignment_layer_learns_with_a_small_epsilon():
    """All tokens alike and one prototype opposite to them: its column underflows."""
    layer = ALP(4, 2, epsilon=0.01).train()
    layer.global_prototypes.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    layer.local_prototypes.copy_(layer.global_prototypes)
    tokens = torch.tensor([[[1.0, 0, 0, 0], [1.0, 0.1, 0, 0]]], requires_grad=True)
    layer(tokens).sum().backward()
    assert bool(tokens.grad.isfinite().all())
    assert bool(layer.local_prototypes.isfinite().all())


# --- POT -----------------------------------------------------------------------------------------


def cosines(n: int, p: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(n, p, generator=draw) * 2 - 1


@pytest.mark.parametrize(("n", "p"), [(3, 2), (12, 12), (40, 7)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_our_sinkhorn_comes_to_the_plan_of_pot(n, p, epsilon):
    similarity = cosines(n, p)
    ours = sinkhorn_plan(similarity.double(), epsilon, iterations=3000)
    theirs = pot_plan(similarity, "entropic", epsilon, iterations=10_000)
    assert torch.allclose(ours.float(), theirs, atol=2e-5)


@pytest.mark.parametrize(("n", "p"), [(3, 2), (40, 7), (256, 64)])
@pytest.mark.parametrize("epsilon", [0.05, 0.01])
def test_three_iterations_are_those_of_pot_in_logarithms(n, p, epsilon):
    batch = pytest.importorskip("ot.batch", reason="POT 0.9.6 has it")
    similarity = cosines(n, p).double()
    sums = torch.full((1, n), 1 / n).double(), torch.full((1, p), 1 / p).double()
    theirs = batch.bregman_log_projection_batch(similarity[None] / epsilon, *sums, max_iter=3)
    assert torch.allclose(sinkhorn_plan(similarity, epsilon), p * theirs["T"][0], atol=1e-6)


def test_columns_sum_to_one_and_rows_to_their_share():
    for solver in ("entropic", "emd"):
        plan = pot_plan(cosines(10, 4), solver)
        assert torch.allclose(plan.sum(0), torch.ones(4), atol=1e-4)
        assert torch.allclose(plan.sum(1), torch.full((10,), 0.4), atol=1e-4)


def test_without_entropy_it_is_the_best_assignment():
    """Square: the plan is a permutation, the best of all 24."""
    similarity = cosines(4, 4, seed=3)
    plan = pot_plan(similarity, "emd")
    best = max(itertools.permutations(range(4)), key=lambda p: sum(similarity[range(4), list(p)]))
    assert torch.equal(plan.argmax(1), torch.tensor(best))
    assert torch.allclose(plan.max(1).values, torch.ones(4))


@pytest.mark.parametrize("epsilon", [0.05, 0.004, 0.001])
def test_entropic_plans_are_those_of_logarithms(epsilon):
    """From 0.0067 on without them; below it, numbers would underflow."""
    similarity = torch.tensor([[1.0, 0.5], [0.9, -0.8], [-1.0, -0.9]])
    cost = 1 - similarity.numpy().astype(np.float64)
    sums = np.full(3, 1 / 3), np.full(2, 1 / 2)
    theirs = ot.sinkhorn(*sums, cost, epsilon, method="sinkhorn_log", numItermax=50, warn=False)
    ours = pot_plan(similarity, "entropic", epsilon, iterations=50)
    assert torch.allclose(ours, torch.from_numpy(2 * theirs).float(), atol=1e-7)
    assert ours.sum() > 1.9


def test_unbalanced_mass_leaves_what_matches_nothing():
    similarity = torch.tensor([[1.0, -1.0], [0.9, -1.0], [1.0, -1.0]])
    plan = pot_plan(similarity, "unbalanced", epsilon=0.05, marginal_penalty=0.1)
    assert plan[:, 1].sum() < 0.1 < plan[:, 0].sum()


@pytest.mark.parametrize("solver", ["entropic", "emd", "unbalanced"])
def test_the_alignment_layer_takes_each(solver):
    torch.manual_seed(0)
    layer = ALP(8, 4, solver=solver)
    tokens = torch.randn(2, 6, 8, requires_grad=True)
    out = layer.train()(tokens)
    assert torch.allclose(out.norm(dim=-1), torch.ones(2, 6), atol=1e-5)
    out.sum().backward()
    assert tokens.grad is not None


def test_unbalanced_plans_are_refused_where_pot_underflows():
    assert bool(pot_plan(unlike(), "unbalanced", 0.003).sum() > 4)
    with pytest.raises(ConfigError, match=r"epsilon=0\.001 must be 0\.003 or more with solver"):
        ALP(8, 4, solver="unbalanced", epsilon=0.001)
    assert ALP(8, 4, epsilon=0.001).epsilon == 0.001


def test_mistakes_name_the_choices():
    with pytest.raises(ConfigError, match="must be one of entropic, emd, unbalanced"):
        pot_plan(cosines(2, 2), "simplex")
    with pytest.raises(ConfigError, match="alp solver='simplex' must be one of"):
        ALP(8, 4, solver="simplex")
