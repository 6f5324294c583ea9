"""The alignment layer of FedAli: tokens are drawn towards prototypes.

Ek, Wang, Portet, Lalanda, Cao, FedAli: Personalized Federated Learning with Aligned Prototypes
through Optimal Transport, section 3.1. https://arxiv.org/abs/2411.10595

    paper          here                       paper      here
    P_L, P_G       local_, global_prototypes  beta       beta: weight of the prototype in the mix
    gamma          gamma: decay of the EMA    epsilon    epsilon: temperature of the matching

Shapes: B batch, Z tokens, d width, N = B Z, G prototypes.

Matching, moving average and output are float32 whatever autocast says: e^(1/epsilon) overflows half
precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.optimal_transport import (
    COSINES,
    MIN_UNBALANCED_EPSILON,
    SOLVERS,
    pot_plan,
    sinkhorn_plan,
)
from fedmodels.tensors.bundle import Prototypes, Weights

_CHOICES = {
    "sets": ("both", "local_only", "global_only"),
    "match": ("ot", "cosine", "euclidean"),
    "solver": ("sinkhorn", *SOLVERS),
    "last": ("prototypes", "samples"),
    "ema_features": ("raw", "normalised"),
    "ema_weights": ("normalised", "raw"),
    "update": ("soft", "single"),
}


class ALP(nn.Module):
    """Alignment with prototypes: (B, Z, d) -> (B, Z, d), unit vectors.

    In training mode tokens are matched to both sets of prototypes, drawn towards the nearest global
    one, and the local ones follow the tokens by a moving average, one step per forward. In
    evaluation mode tokens are drawn towards local prototypes and no buffer changes; the result then
    depends on the whole batch, as the plan does.

    Args:
        dim: d.
        num_prototypes: G.
        beta: weight of the prototype in the output; 0 leaves the normalised input.
        gamma: decay of the moving average; 1 freezes the local prototypes.
        epsilon: temperature of the optimal transport.
        iterations: of Sinkhorn.
        glu: pass the prototype through a gated linear unit first.
        sets: ``"local_only"`` matches and aligns to local prototypes in training too;
            ``"global_only"`` to global ones in evaluation too, and the local ones only collect.
        match: optimal transport, or each token's nearest prototype by ``"cosine"`` or
            ``"euclidean"`` distance.
        solver: of the optimal transport: ``"sinkhorn"``, the paper's fixed number of iterations, or
            POT's ``"entropic"`` until it converges, ``"emd"``, ``"unbalanced"``; ours, not the
            paper's.
        last: which sums of the plan are exact, see
            :func:`fedmodels.numerics.optimal_transport.sinkhorn_plan`.
        topk: tokens that move one prototype: ``"paper"`` ceil(N / G), ``"official"``
            max(1, B // G), or a number.
        ema_features: what the prototypes follow, the tokens or the normalised tokens.
        ema_weights: whether the plan's entries are divided by their sum over the top k.
        update: ``"soft"``, equation 5, or ``"single"``: the mean of the tokens assigned to it.
        skip_cls: leave the first token alone (it is normalised as the others are).

    Attributes:
        local_prototypes: (G, d) buffer, P_L.
        global_prototypes: (G, d) buffer, P_G; never changed here.

    Raises:
        ConfigError: a switch has an unknown value, or a number is out of its range.
    """

    local_prototypes: Tensor
    global_prototypes: Tensor

    def __init__(
        self,
        dim: int,
        num_prototypes: int,
        *,
        beta: float = 0.2,
        gamma: float = 0.999,
        epsilon: float = 0.05,
        iterations: int = 3,
        glu: bool = True,
        sets: str = "both",
        match: str = "ot",
        solver: str = "sinkhorn",
        last: str = "prototypes",
        topk: str | int = "paper",
        ema_features: str = "raw",
        ema_weights: str = "normalised",
        update: str = "soft",
        skip_cls: bool = False,
    ) -> None:
        super().__init__()
        self.beta, self.gamma, self.epsilon, self.iterations = beta, gamma, epsilon, iterations
        self.configured_beta = beta  # what ``beta`` returns to after a round with another one
        self.sets, self.match, self.solver = sets, match, solver
        self.last, self.topk = last, topk
        self.ema_features, self.ema_weights, self.update = ema_features, ema_weights, update
        self.skip_cls = skip_cls
        self._check_switches()
        self.glu = nn.Linear(dim, 2 * dim) if glu else None
        noise = torch.randn(num_prototypes, dim)  # N(0, 1) on the server, the same for all clients
        self.register_buffer("global_prototypes", noise)
        self.register_buffer("local_prototypes", noise.clone())

    def _check_switches(self) -> None:
        for switch, choices in _CHOICES.items():
            if getattr(self, switch) not in choices:
                raise ConfigError(
                    f"alp {switch}={getattr(self, switch)!r} must be one of {', '.join(choices)}"
                )
        topk = self.topk
        if topk not in ("paper", "official") and not (isinstance(topk, int) and topk > 0):
            raise ConfigError(f"alp topk={topk!r} must be 'paper', 'official' or a number above 0")
        least = MIN_UNBALANCED_EPSILON if self.solver == "unbalanced" else 0
        for number, fits, known in (
            ("beta", 0 <= self.beta <= 1, "from 0 to 1"),
            ("gamma", 0 <= self.gamma <= 1, "from 0 to 1"),
            ("epsilon", 0 < self.epsilon < math.inf, "above 0"),
            ("epsilon", self.epsilon >= least, f"{least} or more with solver='unbalanced'"),
            ("iterations", self.iterations >= 1, "1 or more"),
        ):
            if not fits:
                raise ConfigError(f"alp {number}={getattr(self, number)!r} must be {known}")

    def forward(self, tokens: Tensor) -> Tensor:
        """Draw tokens (B, Z, d) towards their prototypes; return unit vectors (B, Z, d)."""
        with torch.autocast(tokens.device.type, enabled=False):
            x = tokens.float()
            seen = x[:, 1:] if self.skip_cls else x
            drawn = self._align(seen.flatten(0, 1), x.shape[0]).view_as(seen)
            if self.skip_cls:
                drawn = torch.cat([x[:, :1], drawn], 1)
            return F.normalize(drawn, dim=-1)  # the sentence after eq. 7

    @torch.no_grad()
    def influence(self, tokens: Tensor) -> tuple[float, float]:
        """Measure how much prototypes change tokens (B, Z, d), as means over all tokens.

        Returns:
            The length of the prototype's part of the mix over the sum of both parts' lengths, in
            [0, 1], and the angle between a token with and without it, in degrees.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            seen = tokens.float()[:, 1:] if self.skip_cls else tokens.float()
            x = seen.flatten(0, 1)
            mix, own = self._align(x, len(tokens)), (1 - self.beta) * x
            drawn, kept = (mix - own).norm(dim=1), own.norm(dim=1)
            angle = torch.rad2deg(F.cosine_similarity(mix, x).clamp(-1, 1).acos())
            return float((drawn / (drawn + kept).clamp_min(1e-30)).mean()), float(angle.mean())

    def _align(self, x: Tensor, batch: int) -> Tensor:
        """Return the mix of tokens and prototypes (N, d); in training, move the local prototypes.

        The steps and names are those of the paper's listing, appendix A.
        """
        with torch.no_grad():
            p, g = self._active_prototypes(), len(self.local_prototypes)  # step 2
            c = self._plan(x, p)  # steps 3 and 4, (N, P)
            if self.training:  # step 5
                self._update_local(x, c[:, :g], batch)
                c, p = c[:, -g:], p[-g:]  # the same ones if one set is active
            o = c.argmax(1)  # (N,)
        p_glu = self._gated(p, o)  # step 6, eq. 6
        return self.beta * p_glu + (1 - self.beta) * x  # step 7, eq. 7

    def _gated(self, p: Tensor, o: Tensor) -> Tensor:
        """Return the gated prototype of each token (N, d): of prototypes (P, d), number ``o`` (N,).

        In training the gate takes whichever are fewer: all prototypes, or those of the tokens.
        """
        if self.glu is None:
            return p.index_select(0, o)
        if self.training and len(p) < len(o):
            return F.glu(self.glu(p)).index_select(0, o)
        return F.glu(self.glu(p.index_select(0, o)))

    def _active_prototypes(self) -> Tensor:
        """Return the prototypes that tokens are matched to (P, d): one set, or both."""
        if self.sets == "global_only":
            return self.global_prototypes
        if self.sets == "both" and self.training:  # both compete for mass
            return torch.cat([self.local_prototypes, self.global_prototypes])
        return self.local_prototypes.clone()  # they move before the gate's gradient is taken

    def _plan(self, x: Tensor, p: Tensor) -> Tensor:
        """Return how well tokens and prototypes match (N, P): the plan C, or a similarity."""
        if self.match == "euclidean":
            return -torch.cdist(x, p)
        similarity = F.normalize(x, dim=-1) @ F.normalize(p, dim=-1).T
        if self.match == "cosine":
            return similarity
        if self.solver != "sinkhorn":
            return pot_plan(similarity, self.solver, self.epsilon)
        return sinkhorn_plan(  # eq. 4
            similarity, self.epsilon, self.iterations, last=self.last, spread=COSINES
        )

    def _update_local(self, x: Tensor, c_local: Tensor, batch: int) -> None:
        """Move the local prototypes towards their tokens, eq. 5; ``c_local`` is (N, G)."""
        features = F.normalize(x, dim=-1) if self.ema_features == "normalised" else x
        if self.update == "single":
            onehot = F.one_hot(c_local.argmax(1), c_local.shape[1]).to(x.dtype)  # (N, G)
            counts = onehot.sum(0)
            aggregated = (onehot.T @ features) / counts.clamp_min(1)[:, None]
            aggregated = torch.where(counts[:, None] > 0, aggregated, self.local_prototypes)
        else:
            o_local, index = c_local.topk(self._top_k(len(x), batch, c_local.shape[1]), dim=0)
            weighted = self._ema_weights(o_local)[..., None] * features[index]  # (k, G, d)
            aggregated = weighted.sum(0)  # (G, d)
        self.local_prototypes.mul_(self.gamma).add_(aggregated, alpha=1 - self.gamma)

    def _ema_weights(self, top: Tensor) -> Tensor:
        """Return the weights (k, G) of the k tokens each prototype follows."""
        k = len(top)
        if self.match == "euclidean":  # distances would favour the farthest of the k
            return torch.full_like(top, 1 / k)
        top = top.clamp_min(0)
        if self.ema_weights == "raw":
            return top
        mass = top.sum(0, keepdim=True)
        return torch.where(mass > 0, top / mass.clamp_min(1e-30), 1 / k)

    def _top_k(self, tokens: int, batch: int, prototypes: int) -> int:
        """Return how many tokens move one prototype, at most all of them."""
        if isinstance(self.topk, int):
            return min(self.topk, tokens)
        return (
            max(1, batch // prototypes)
            if self.topk == "official"
            else math.ceil(tokens / prototypes)
        )


LOCAL, GLOBAL = ".local_prototypes", ".global_prototypes"
"""Endings of the names under which a net holds P_L and P_G."""
INFLUENCE = ("prototype_share", "prototype_angle")
"""What :meth:`ALP.influence` measures."""


def is_prototypes(name: str) -> bool:
    """Tell whether a weight of a net is a set of prototypes."""
    return name.endswith((LOCAL, GLOBAL))


def sets_of(weights: Weights, which: str = LOCAL) -> dict[str, Prototypes]:
    """Return one set of prototypes of a net's weights by block, ``alp/0`` nearest to the input."""
    found = [tensor for name, tensor in weights.items() if name.endswith(which)]
    return {f"alp/{block}": Prototypes.by_position(rows) for block, rows in enumerate(found)}


def put_prototypes(net: nn.Module, sets: Mapping[str, Prototypes]) -> None:
    """Copy a set of each block into a net, as its local and as its global prototypes."""
    for block, layer in enumerate(alp_layers(net)):
        layer.global_prototypes.copy_(sets[f"alp/{block}"].vectors)
        layer.local_prototypes.copy_(sets[f"alp/{block}"].vectors)


@torch.no_grad()
def influence_of(net: SplitNet, x: Tensor) -> dict[str, float]:
    """Return how much prototypes change the tokens of inputs (n, …), by block; n may be 0."""
    found = dict[str, float]()
    if not len(x):
        return found
    net.eval()  # the prototypes stay as they are

    def measure(block: int, layer: ALP, tokens: Tensor) -> None:
        values = zip(INFLUENCE, layer.influence(tokens), strict=True)
        found.update({f"{name}_{block}": value for name, value in values})

    hooks = [
        layer.register_forward_pre_hook(lambda layer, given, b=block: measure(b, layer, given[0]))
        for block, layer in enumerate(alp_layers(net))
    ]
    net(x)
    for hook in hooks:
        hook.remove()
    return found


def alp_layers(net: nn.Module) -> list[ALP]:
    """Return the alignment layers of a net, from the input to the output."""
    return [module for module in net.modules() if isinstance(module, ALP)]
