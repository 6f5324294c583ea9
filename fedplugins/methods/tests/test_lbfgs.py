"""Rows that are optimised together: each goes where torch's optimiser takes it alone."""

import torch

from fedplugins.methods.lbfgs import RowsLBFGS

STEPS = 4
"""Fewer iterations than the history holds: rows share its length, which a row alone would not."""


def valley(x, a):
    """Return the value (n,) of Rosenbrock's function with its least value at (a, a^2)."""
    return (a - x[:, 0]) ** 2 + 10 * (x[:, 1] - x[:, 0] ** 2) ** 2


def evaluated(a):
    def evaluate(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = valley(x, a)
            (gradient,) = torch.autograd.grad(value.sum(), [x])
        return gradient, value.detach()

    return evaluate


def test_rows_take_the_steps_of_torch_alone():
    """One row begins where it ends, and one is far from where it ends, as the others are not."""
    a = torch.tensor([1.0, 2.0, -1.0, 1.5], dtype=torch.float64)
    begin = torch.tensor([[1.0, 1.0], [0.0, 3.0], [-3.0, 2.0], [9.0, 0.5]], dtype=torch.float64)
    rows = RowsLBFGS(begin.clone(), 0.1)
    for _ in range(STEPS):
        rows.step(evaluated(a))
    for row, own, found in zip(begin, a, rows.x, strict=True):
        x = row[None].clone().requires_grad_()
        alone = torch.optim.LBFGS([x], lr=0.1)

        def closure(x=x, own=own):
            x.grad = None
            value = valley(x, own[None]).sum()
            value.backward()
            return value

        for _ in range(STEPS):
            alone.step(closure)
        assert torch.allclose(found, x.detach()[0], rtol=1e-6, atol=1e-9), (found, x)


def test_it_says_when_no_row_moves_any_more():
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    rows = RowsLBFGS(torch.tensor([[1.0, 1.0], [1.9, 3.0]], dtype=torch.float64), 1.0)
    moved = [rows.step(evaluated(a))[1] for _ in range(30)]
    assert moved[0]
    assert not moved[-1]
    assert moved == sorted(moved, reverse=True)
    assert torch.allclose(rows.x[1], torch.tensor([2.0, 4.0], dtype=torch.float64), atol=1e-3)
