"""Terms of weights: closed forms beside autograd, in every way that a loss is calculated."""

import pytest
import torch

from fedmodels.numerics.weight_terms import inner_product, squared_distance, squared_norm, tilt

SHAPES = [(3, 2), (4,), (2, 1, 3)]


def drawn(seed, *rows):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*rows, *shape, generator=draw) for shape in SHAPES]


BY_AUTOGRAD = {
    squared_distance: lambda ws, cs: sum(
        (w - c).square().sum() for w, c in zip(ws, cs, strict=True)
    ),
    inner_product: lambda ws, cs: sum((w * c).sum() for w, c in zip(ws, cs, strict=True)),
}


def test_a_distance_and_its_gradient_by_hand():
    """w = (1, 2), (3); w0 = (0, 4), (3): squares 1, 4, 0; the gradient of half of it is w - w0."""
    weights = [
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.tensor([3.0], requires_grad=True),
    ]
    found = squared_distance(weights, [torch.tensor([0.0, 4.0]), torch.tensor([3.0])]) / 2
    found.backward()
    assert found.item() == 2.5
    assert [w.grad.tolist() for w in weights] == [[1.0, -2.0], [0.0]]


@pytest.mark.parametrize("term", BY_AUTOGRAD, ids=lambda term: term.__name__)
def test_closed_forms_are_what_autograd_finds(term):
    weights, others = [w.requires_grad_() for w in drawn(0)], drawn(1)
    found, expected = 0.7 * term(weights, others), 0.7 * BY_AUTOGRAD[term](weights, others)
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, weights)
    for one, other in zip(gradients, torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_a_norm_is_the_distance_from_nothing():
    weights = [w.requires_grad_() for w in drawn(0)]
    found = squared_norm(weights)
    torch.testing.assert_close(found, squared_distance(weights, [0 * w for w in weights]))
    for w, gradient in zip(weights, torch.autograd.grad(found, weights), strict=True):
        assert torch.equal(gradient, 2 * w)


def test_a_tilt_is_no_number_and_a_gradient():
    weights, direction = [w.requires_grad_() for w in drawn(0)], drawn(1)
    loss = torch.stack([w.sum() for w in weights]).sum()
    tilted = loss + tilt(weights, direction)
    assert tilted.item() == loss.item()
    for gradient, c in zip(torch.autograd.grad(tilted, weights), direction, strict=True):
        assert torch.equal(gradient, 1 + c)


@pytest.mark.parametrize("term", [*BY_AUTOGRAD, tilt], ids=lambda term: term.__name__)
def test_clients_mapped_get_what_each_gets_alone(term):
    stacked, others = [w.requires_grad_() for w in drawn(0, 3)], drawn(1, 3)
    losses = torch.vmap(term)(stacked, others)
    found = torch.autograd.grad(losses.sum(), stacked)
    for client in range(3):
        alone = [w[client].detach().requires_grad_() for w in stacked]
        loss = term(alone, [other[client] for other in others])
        torch.testing.assert_close(losses[client], loss)
        for rows, gradient in zip(found, torch.autograd.grad(loss, alone), strict=True):
            torch.testing.assert_close(rows[client], gradient)


@pytest.mark.parametrize("term", [*BY_AUTOGRAD, tilt], ids=lambda term: term.__name__)
def test_each_example_has_the_whole_term(term):
    """As steps that hide examples take gradients: by torch.func, mapped over examples."""
    weights, others, x = drawn(0), drawn(1), torch.arange(5.0)

    def loss(weights, x):
        return weights[1].sum() * x + term(weights, others)

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    live = [w.clone().requires_grad_() for w in weights]
    expected = torch.autograd.grad(term(live, others), live)
    for n in range(5):
        torch.testing.assert_close(found[0][n], expected[0])
        torch.testing.assert_close(found[1][n], expected[1] + x[n])


def test_frozen_weights_count_and_take_no_gradient():
    weights, others = drawn(0), drawn(1)
    weights[0].requires_grad_()
    found = squared_distance(weights, others)
    torch.testing.assert_close(
        found.detach(), BY_AUTOGRAD[squared_distance](weights, others).detach()
    )
    found.backward()
    assert torch.equal(weights[0].grad, 2 * (weights[0].detach() - others[0]))
    assert weights[1].grad is None


def test_others_of_another_number_are_refused():
    with pytest.raises(ValueError, match="3 weights, and 2 tensors"):
        squared_distance(drawn(0), drawn(1)[:2])
