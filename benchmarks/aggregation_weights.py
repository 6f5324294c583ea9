r"""Seconds to learn pFedGRP's aggregation weights, against autograd through the stacked models.

    python -m benchmarks.aggregation_weights --clients 10 --examples 128 --epochs 2

Both take the same steps on the same batches: Adam on the softmax parameters of n ResNet-20s. Ours
mixes without gradient and gets dL/dw from one backward pass and one product
(``fedmodels.techniques.aggregation_weights``); the plain one builds sum_j w_j theta_j in the graph
of every step. The weights must agree to 1e-5. ``--growth`` adds further numbers of clients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from benchmarks.measure import in_turn, parser_of, tell
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques.aggregation_weights import Mixer
from fedmodels.tensors.bundle import Weights

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""dL/dw (n,) of weights (n,) on a batch."""
MAX_APART = 1e-5
"""Of the weights that both ways find."""


def main() -> int:
    """Measure, print, and say whether both agree."""
    parser = parser_of("aggregation_weights", __doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--growth", type=int, nargs="*", default=[], help="more numbers of clients")
    parser.add_argument("--examples", type=int, default=128, help="generated examples of a client")
    parser.add_argument("--epochs", type=int, default=2, help="the paper: 20")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--net", default="resnet20")
    parser.add_argument("--side", type=int, default=28, help="pixels")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(n, options) for n in (options.clients, *options.growth)]
    tell("aggregation_weights", rows)
    return int(any(row["difference"] > MAX_APART for row in rows))


def measure(n: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds one client's search takes both ways, and how far their weights differ."""
    models = [weights_of(build(options, seed)) for seed in range(n)]
    x = torch.randn(options.examples, 1, options.side, options.side, generator=generator(0))
    y = torch.randint(10, (options.examples,), generator=generator(1))
    x, y = x.to(options.device), y.to(options.device)
    ways: dict[str, Callable[[], Step]] = {
        "ours": lambda: ours(build(options, 0).to(options.device), models),
        "plain": lambda: plain(build(options, 0).to(options.device).eval(), models),
    }
    found: dict[str, Tensor] = {}

    def search(name: str) -> None:
        found[name] = searched(ways[name](), n, x, y, options)

    seconds = in_turn({name: partial(search, name) for name in ways}, options.repeats)
    difference = float((found["ours"] - found["plain"]).abs().max())
    facts = {key: getattr(options, key) for key in ("net", "device", "examples", "epochs")}
    told = {f"{name}_s": each for name, each in seconds.items()}
    ratio = seconds["plain"] / seconds["ours"]
    return {**facts, "clients": n, **told, "ratio": ratio, "difference": difference}


def build(options: argparse.Namespace, seed: int) -> SplitNet:
    """Return a net with the initial weights of a seed."""
    with seeded(seed):
        return make_net(options.net, num_classes=10, input_shape=(1, options.side, options.side))


def searched(step: Step, n: int, x: Tensor, y: Tensor, options: argparse.Namespace) -> Tensor:
    """Return the weights after all epochs of Adam on softmax parameters."""
    a = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([a], lr=0.01, betas=(0.5, 0.999))
    order = generator(2)
    for _ in range(options.epochs):
        for index in torch.split(torch.randperm(len(y), generator=order), options.batch_size):
            index = index.to(x.device)
            w = a.softmax(0)
            slope = step(w.detach().float().to(x.device), x[index], y[index])
            adam.zero_grad(set_to_none=True)
            w.backward(slope.double().cpu())  # type: ignore[no-untyped-call]
            adam.step()
    return a.detach().softmax(0)


def ours(net: SplitNet, models: Sequence[Weights]) -> Step:
    """One backward pass through the mixture, then a product with all models."""
    mixer = Mixer(net, models)
    return lambda w, x, y: mixer.gradient(w, x, y)[1]


def plain(net: SplitNet, models: Sequence[Weights]) -> Step:
    """Autograd through the sum of all models."""
    device = next(net.parameters()).device
    parameters = {key for key, _ in net.named_parameters()}
    stacks = {
        key: torch.stack([m[key.replace(".", "/", 1)] for m in models]).to(device)
        for key in net.state_dict()
    }

    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        w = w.clone().requires_grad_()
        tensors = {}
        for key, stack in stacks.items():
            if not stack.is_floating_point():
                tensors[key] = stack[0]
            else:
                tensors[key] = torch.tensordot(w if key in parameters else w.detach(), stack, 1)
        loss = cross_entropy(functional_call(net, tensors, x), y)
        (slope,) = torch.autograd.grad(loss, w)
        return slope

    return step


if __name__ == "__main__":
    raise SystemExit(main())
