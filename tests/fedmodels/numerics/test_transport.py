"""POT's plans, and our own held to them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.nets.alp import ALP
from fedmodels.numerics.algebra import sinkhorn_plan
from fedmodels.numerics.transport import pot_plan


def cosines(n: int, p: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(n, p, generator=draw) * 2 - 1


@pytest.mark.parametrize(("n", "p"), [(3, 2), (12, 12), (40, 7)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_our_sinkhorn_comes_to_the_plan_of_pot(n: int, p: int, epsilon: float) -> None:
    similarity = cosines(n, p)
    ours = sinkhorn_plan(similarity.double(), epsilon, iterations=3000)
    theirs = pot_plan(similarity, "entropic", epsilon, iterations=10_000)
    assert torch.allclose(ours.float(), theirs, atol=2e-5)


def test_columns_sum_to_one_and_rows_to_their_share() -> None:
    for solver in ("entropic", "emd"):
        plan = pot_plan(cosines(10, 4), solver)
        assert torch.allclose(plan.sum(0), torch.ones(4), atol=1e-4)
        assert torch.allclose(plan.sum(1), torch.full((10,), 0.4), atol=1e-4)


def test_without_entropy_it_is_the_best_assignment() -> None:
    """Square: the plan is a permutation, the best of all 24."""
    similarity = cosines(4, 4, seed=3)
    plan = pot_plan(similarity, "emd")
    best = max(itertools.permutations(range(4)), key=lambda p: sum(similarity[range(4), list(p)]))
    assert torch.equal(plan.argmax(1), torch.tensor(best))
    assert torch.allclose(plan.max(1).values, torch.ones(4))


def test_unbalanced_mass_leaves_what_matches_nothing() -> None:
    similarity = torch.tensor([[1.0, -1.0], [0.9, -1.0], [1.0, -1.0]])
    plan = pot_plan(similarity, "unbalanced", epsilon=0.05, marginal_penalty=0.1)
    assert plan[:, 1].sum() < 0.1 < plan[:, 0].sum()


@pytest.mark.parametrize("solver", ["entropic", "emd", "unbalanced"])
def test_the_alignment_layer_takes_each(solver: str) -> None:
    torch.manual_seed(0)
    layer = ALP(8, 4, solver=solver)
    tokens = torch.randn(2, 6, 8, requires_grad=True)
    out = layer.train()(tokens)
    assert torch.allclose(out.norm(dim=-1), torch.ones(2, 6), atol=1e-5)
    out.sum().backward()
    assert tokens.grad is not None


def test_mistakes_name_the_choices() -> None:
    with pytest.raises(ConfigError, match="must be one of entropic, emd, unbalanced"):
        pot_plan(cosines(2, 2), "simplex")
    with pytest.raises(ConfigError, match="alp solver='simplex' must be one of"):
        ALP(8, 4, solver="simplex")
