import pytest
import torch
import torch.nn.functional as F

from fedmodels.errors import ConfigError
from fedmodels.nets.alp import ALP
from fedmodels.numerics.optimal_transport import sinkhorn_plan
from fedmodels.numerics.randomness import seeded

# fedali.md, anchor 2
X = torch.tensor([[[2.0, 0], [1, 1], [-0.5, 3], [-1, 1]]])  # (1, 4, 2)
LOCAL = torch.tensor([[1.0, 0], [0, 1]])
GLOBAL = torch.tensor([[1.0, 1], [-1, 1]])
TRAINED = [[0.993884, 0.110432], [0.707107, 0.707107], [-0.224860, 0.974391], [-0.707107, 0.707107]]


def layer(**switches: object) -> ALP:
    with seeded(0):
        alp = ALP(2, 2, **{"gamma": 0.9, "glu": False, **switches})
    alp.local_prototypes.copy_(LOCAL)
    alp.global_prototypes.copy_(GLOBAL)
    return alp


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=0, atol=1.5e-6)


def test_plan_of_the_anchor():
    similarity = F.normalize(X[0], dim=-1) @ F.normalize(torch.cat([LOCAL, GLOBAL]), dim=-1).T
    plan = [
        [0.997174, 0, 0.002871, 0],
        [0.002826, 0.003036, 0.996846, 0],
        [0, 0.993737, 0.000282, 0.027091],
        [0, 0.003227, 0, 0.972909],
    ]
    close(sinkhorn_plan(similarity), plan)


def test_training_forward():
    alp = layer()  # top-k is ceil(4 / 2) = 2
    close(alp(X)[0], TRAINED)
    close(alp.local_prototypes, [[1.099717, 0.000283], [-0.050162, 1.199353]])
    assert torch.equal(alp.global_prototypes, GLOBAL)


def test_influence_by_hand():
    """Mixes .25 (0, 1) + .75 (1, 0) and .25 (0, 1) + .75 (0, 3): shares 1/4 and 1/10.

    The first turns its token by atan(1/3) = 18.4349 degrees, the second does not.
    """
    alp = layer(beta=0.25, sets="local_only", match="cosine").eval()
    alp.local_prototypes.copy_(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    share, angle = alp.influence(torch.tensor([[[1.0, 0.0], [0.0, 3.0]]]))
    assert share == pytest.approx((1 / 4 + 1 / 10) / 2)
    assert angle == pytest.approx(18.4349 / 2, abs=0.02)  # acos is coarse near 0
    assert layer(beta=0.0).eval().influence(X)[0] == 0


@pytest.mark.parametrize("topk", [1, "official"])
def test_training_forward_with_one_token_each(topk):
    alp = layer(topk=topk)
    close(alp(X)[0], TRAINED)
    close(alp.local_prototypes, [[1.1, 0.0], [-0.05, 1.2]])


def test_the_variant_of_the_listing():
    alp = layer(topk=1, ema_features="normalised", ema_weights="raw")
    alp(X)
    close(alp.local_prototypes, [[0.999717, 0.0], [-0.016337, 0.998022]])


def test_evaluation_forward():
    alp = layer().eval()
    want = [[1.0, 0.0], [0.780869, 0.624695], [-0.152057, 0.988372], [-0.624695, 0.780869]]
    close(alp(X)[0], want)
    assert torch.equal(alp.local_prototypes, LOCAL)
    assert torch.equal(alp.global_prototypes, GLOBAL)


def test_glu():
    # fedali.md, anchor 3: u is the first half of the outputs, v the second
    alp = ALP(2, 1, beta=1.0).eval()
    assert alp.glu is not None
    with torch.no_grad():
        alp.glu.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]]).T)
        alp.glu.bias.zero_()
        close(F.glu(alp.glu(torch.tensor([1.0, -1.0]))), [0.5, -0.5])
        alp.local_prototypes.copy_(torch.tensor([[1.0, -1.0]]))
        close(alp(X)[0], [[2**-0.5, -(2**-0.5)]] * 4)


def test_the_default_layer():
    with seeded(0):
        alp = ALP(192, 64)
    assert sum(p.numel() for p in alp.parameters()) == 74_112
    assert set(dict(alp.named_buffers())) == {"local_prototypes", "global_prototypes"}
    assert torch.equal(alp.local_prototypes, alp.global_prototypes)
    assert alp.local_prototypes.data_ptr() != alp.global_prototypes.data_ptr()
    assert float(alp.local_prototypes.norm(dim=1).mean()) == pytest.approx(13.9, abs=0.3)


def test_output_is_made_of_unit_vectors():
    norms = ALP(6, 5)(torch.randn(3, 7, 6)).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones(3, 7))


def test_gradients_reach_tokens_and_gate_only():
    alp = ALP(4, 3)
    x = torch.randn(2, 5, 4, requires_grad=True)
    alp(x)[..., 0].sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())
    assert alp.glu is not None
    assert bool(alp.glu.weight.grad.any())
    assert not alp.local_prototypes.requires_grad
    assert alp.local_prototypes.grad_fn is None


def test_beta_zero_only_normalises():
    alp = ALP(4, 3, beta=0.0)
    x = torch.randn(2, 5, 4)
    y = alp(x)
    torch.testing.assert_close(y, F.normalize(x, dim=-1))
    y.sum().backward()
    assert alp.glu is not None
    assert not bool(alp.glu.weight.grad.any())


def test_gamma():
    frozen = layer(gamma=1.0)
    frozen(X)
    assert torch.equal(frozen.local_prototypes, LOCAL)
    # anchor 6: what is left of the start after 45 and 200 steps, exactly one step a forward
    for steps, left in [(45, 0.956), (200, 0.819)]:
        alp = ALP(2, 1, gamma=0.999, glu=False, topk=1)
        alp.local_prototypes.fill_(1)
        for _ in range(steps):
            alp(torch.full((1, 1, 2), 1e-9))
        assert float(alp.local_prototypes[0, 0]) == pytest.approx(left, abs=5e-4)


def test_local_only_ignores_global_prototypes():
    alp = layer(sets="local_only", topk=1)
    other = layer(sets="local_only", topk=1)
    other.global_prototypes.normal_()
    assert torch.equal(alp(X), other(X))
    assert torch.equal(alp.local_prototypes, other.local_prototypes)
    # in training it aligns to what evaluation aligns to: the prototypes before this step
    close(layer(sets="local_only")(X), layer().eval()(X))


def test_global_only_collects_in_the_shadow():
    alp = layer(sets="global_only", topk=1)
    trained = alp(X)
    assert not torch.equal(alp.local_prototypes, LOCAL)
    close(trained, alp.eval()(X))
    alp.local_prototypes.zero_()
    close(trained, alp(X))


def test_cosine_and_euclidean():
    cosine, euclid = layer(match="cosine", topk=2), layer(match="euclidean", topk=2)
    cosine(X)
    # local 0: cosines 1 and .707107 of tokens 0 and 1 -> weights .585786 and .414214
    close(cosine.local_prototypes[0], [0.9 + 0.1 * 1.585786, 0.1 * 0.414214])
    euclid(X)
    # local 0, (1, 0): tokens 0 and 1 are both at distance 1, in equal shares
    close(euclid.local_prototypes[0], [0.9 + 0.1 * 1.5, 0.1 * 0.5])


def test_single_update_takes_the_mean_of_the_assigned():
    alp = layer(update="single", match="euclidean")
    alp(X)  # tokens 0 and 1 fall to the first of equals or to (1, 0); 2 and 3 to (0, 1)
    close(alp.local_prototypes, [[0.9 + 0.1 * 1.5, 0.05], [-0.075, 0.9 + 0.2]])


def test_single_update_leaves_an_unassigned_prototype():
    alp = layer(update="single", match="euclidean")
    alp(torch.tensor([[[1.0, 0.0]]]))
    assert torch.equal(alp.local_prototypes[1], LOCAL[1])


def test_skip_cls():
    alp = layer(skip_cls=True)
    y = alp(X)
    close(y[0, 0], [1.0, 0.0])
    plain = layer()
    torch.testing.assert_close(y[:, 1:], plain(X[:, 1:]))


def test_topk_of_the_paper():
    # 512 tokens over 2048 … 64 prototypes
    assert [ALP(2, g)._top_k(512, 64, g) for g in (2048, 1024, 512, 256, 128, 64)] == [
        1,
        1,
        1,
        2,
        4,
        8,
    ]
    assert ALP(2, 4, topk=9)._top_k(3, 1, 4) == 3


def test_autocast_does_not_reach_the_layer():
    with seeded(0):
        x = torch.randn(4, 9, 2).bfloat16()
    plain, cast = layer(glu=True), layer(glu=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = cast(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, plain(x.float()))
    assert torch.equal(cast.local_prototypes, plain.local_prototypes)


def test_unknown_switches():
    with pytest.raises(ConfigError, match=r"alp sets='none' must be one of both, local_only"):
        ALP(2, 2, sets="none")
    with pytest.raises(ConfigError, match="topk=0"):
        ALP(2, 2, topk=0)
