"""What parts of methods and of a run cost, of plain work beside them: processor time, in turns.

    python -m benchmarks.costs [--nets mlp digits-cnn cnn5] [--heads 10x64 10x512]
                               [--steps digits-cnn cnn5 resnet20] [--turns 9]

**Bounded gradients.** The sum of a batch's gradients, each scaled to a bound, of a plain forward
and backward pass: mapped one by one, at once from what layers tell, and by Opacus' ghost clipping.
``resnet18-groups`` is torchvision's ResNet-18 with group normalisation.

**A head trained anew** (CReFF's server half): its epochs on features, of the same steps by autograd
and a fused optimiser; ``--heads`` are classes and coordinates.

**A step on one block.** A step with momentum, with a proximal term, and with a control variate: by
the tensors of the net, as here, and on gradients, weights and momentum in a block each.
"""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.measure import parser_of, tell
from benchmarks.training import NETS
from fedmodels.host.machine import keep_large_blocks
from fedmodels.nets import make_net
from fedmodels.nets.own_net import as_split_net
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.weight_terms import squared_distance, tilt
from fedmodels.training.ghost_clipping import apart_in, bounded, per_example
from fedmodels.training.optimizer import SGD, descend
from fedmodels.training.private_steps import AT_ONCE
from fedmodels.training.stepped import Batch, Output
from fedplugins.baselines.creff import CReFF

BOUND, EPOCHS = 0.5, 5
STEPS, RATE, MOMENTUM, MU, VARIATE = 5, 0.01, 0.9, 0.1, 1e-4
GROUPS = "resnet18-groups"
SHAPES = {**NETS, "mlp": ((1, 28, 28), 32), GROUPS: ((3, 32, 32), 8)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the rows."""
    parser = parser_of("costs", __doc__)
    known = [name for name in SHAPES if name not in ("resnet18", "resnet20", "hart")]
    parser.add_argument("--nets", nargs="*", default=["mlp", "digits-cnn", "cnn5"], choices=known)
    parser.add_argument("--heads", nargs="*", default=["10x64", "10x512"])
    parser.add_argument("--steps", nargs="*", default=["digits-cnn"], choices=[*NETS, "mlp"])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_large_blocks()  # as the commands do
    if options.nets:
        tell("bounded gradients", [_bounded_row(name, options.turns) for name in options.nets])
    sizes = [[int(word) for word in size.split("x")] for size in options.heads]
    if sizes:
        tell("a head trained anew", [_head_row(k, d, options.turns) for k, d in sizes])
    if options.steps:
        tell("a step on one block", [_step_row(name, options.turns) for name in options.steps])


def least(work: Mapping[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Return the least processor seconds of each way, in turns; the first turn is left out."""
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(times + 1):
        for name, function in work.items():
            begun = time.process_time()
            function()
            took[name].append(time.process_time() - begun)
    return {name: min(seconds[1:]) for name, seconds in took.items()}


# --- bounded gradients ----------------------------------------------------------------------------


def _bounded_row(name: str, turns: int) -> dict[str, Any]:
    """Compare ways to the sum of a batch's bounded gradients."""
    shape, size = SHAPES[name]
    net = _grouped_resnet() if name == GROUPS else make_net(name, num_classes=10, input_shape=shape)
    net.pack().train()
    batch = Batch(torch.randn(size, *shape), torch.randint(10, (size,)), torch.arange(size))
    trained = net.parameters_by_key()
    parameters = sum(p.numel() for p in trained.values())
    apart = apart_in(net, trained, batch)
    assert apart is not None, "these nets are not mapped"

    def plain() -> None:
        net.zero_grad()
        cross_entropy(net(batch.x), batch.y).backward()  # type: ignore[no-untyped-call]

    def mapped() -> Tensor:
        total = torch.zeros(parameters)
        for part in torch.split(torch.arange(size), max(1, AT_ONCE // parameters)):
            some = Batch(batch.x[part], batch.y[part], part)
            gradients, _ = per_example(net, trained, some, _loss)
            total += _factors(gradients.norm(dim=1)) @ gradients
        return total

    def at_once() -> Tensor:
        net.zero_grad()
        found = bounded(net, trained, batch, _loss, apart)
        assert found is not None, "the loss is a sum over examples"
        return found.total(_factors(found.squares.sqrt()))

    assert torch.allclose(mapped(), at_once(), rtol=1e-2, atol=1e-3), "both are one sum"
    ways = {"plain": plain, "mapped": mapped, "at_once": at_once, **_of_opacus(net, batch)}
    took = least(ways, turns)
    row = {"net": name, "batch": size, "plain_ms": 1e3 * took["plain"]}
    return row | {way: took[way] / took["plain"] for way in ways if way != "plain"}


def _loss(batch: Batch, out: Output) -> Tensor:
    return cross_entropy(out.logits, batch.y)


def _factors(norms: Tensor) -> Tensor:
    return (BOUND / norms).clamp(max=1.0)


def _grouped_resnet() -> SplitNet:
    from torchvision.models import resnet18

    net = resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(8, channels))
    return as_split_net(net, GROUPS, 10, SHAPES[GROUPS][0])


def _of_opacus(net: SplitNet, batch: Batch) -> dict[str, Callable[[], object]]:
    """Return Opacus' two passes, where it is installed and takes the net."""
    try:
        place = "opacus.grad_sample.grad_sample_module_fast_gradient_clipping"
        ghost: Any = importlib.import_module(place).GradSampleModuleFastGradientClipping
    except ImportError:
        return {}
    warnings.filterwarnings("ignore", message="Full backward hook")
    theirs: Any = ghost(copy.deepcopy(net), max_grad_norm=BOUND, use_ghost_clipping=True)

    def opacus() -> None:
        theirs.zero_grad()
        theirs.enable_hooks()
        losses: Any = cross_entropy(theirs(batch.x), batch.y, reduction="none")
        losses.mean().backward(retain_graph=True)
        factors = _factors(theirs.get_norm_sample())
        theirs.zero_grad()
        theirs.disable_hooks()
        (losses * factors).sum().backward()

    try:
        opacus()
    except RuntimeError:  # layers that work in place
        return {}
    return {"opacus": opacus}


# --- heads ----------------------------------------------------------------------------------------


def _head_row(classes: int, width: int, turns: int) -> dict[str, Any]:
    """Compare CReFF's re-training of a head with the same steps by autograd."""
    method = CReFF(crt_epochs=EPOCHS)
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(classes, method.num_features, width, generator=draw)
    z, y = features.flatten(0, 1), torch.arange(classes).repeat_interleave(method.num_features)
    head, ctx = nn.Linear(width, classes), _Context()
    sgd = SGD(head.parameters(), lr=method.lr_net, fused=True)

    def by_autograd() -> None:
        order = ctx.generator("method")
        for _ in range(EPOCHS):
            permuted = torch.randperm(len(z), generator=order)
            for index in torch.split(permuted, method.crt_batch_size):
                descend(cross_entropy(head(z[index]), y[index]), sgd)

    def here() -> None:
        method._retrained(cast(Any, ctx), features, torch.ones(classes, dtype=torch.bool))

    took = least({"autograd": by_autograd, "here": here}, turns)
    steps = EPOCHS * len(torch.split(z, method.crt_batch_size))
    row = {"classes": classes, "width": width, "step_us": 1e6 * took["autograd"] / steps}
    return row | {"here": took["here"] / took["autograd"]}


class _Context:
    """What re-training a head asks of a context."""

    def seed(self, purpose: str) -> int:
        return 0

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(1)


# --- steps ----------------------------------------------------------------------------------------


def _step_row(name: str, turns: int) -> dict[str, Any]:
    """Compare steps by the tensors of a net with steps on one block of them."""
    shape, size = SHAPES[name]
    x, y = torch.randn(size, *shape), torch.randint(10, (size,))
    ways, nets = dict[str, Callable[[], object]](), dict[str, SplitNet]()
    for term in ("plain", "proximal", "variate"):
        for way, make in ("", _tensor_step), ("_block", _block_step):
            torch.manual_seed(0)
            net = make_net(name, num_classes=10, input_shape=shape).pack().train()
            nets[term + way], ways[term + way] = net, make(net, x, y, term)
            ways[term + way]()
        pairs = zip(nets[term].parameters(), nets[f"{term}_block"].parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in pairs), "steps are equal"
    took = least(ways, turns)
    row = {"net": name, "batch": size, "plain_ms": 1e3 * took["plain"] / STEPS}
    return row | {way: took[way] / took["plain"] for way in ways if way != "plain"}


def _tensor_step(net: SplitNet, x: Tensor, y: Tensor, term: str) -> Callable[[], object]:
    """Return steps as a client takes them: terms are a part of the loss."""
    weights = [*net.parameters()]
    first = [w.detach().clone() for w in weights]
    variate = [torch.full_like(w, VARIATE) for w in weights]
    sgd = SGD(weights, lr=RATE, momentum=MOMENTUM, fused=True)

    def steps() -> None:
        for _ in range(STEPS):
            loss = cross_entropy(net(x), y)
            if term == "proximal":
                loss = loss + MU / 2 * squared_distance(weights, first)
            elif term == "variate":
                loss = loss + tilt(weights, variate)
            descend(loss, sgd)

    return steps


def _block_step(net: SplitNet, x: Tensor, y: Tensor, term: str) -> Callable[[], object]:
    """Return steps on one block of all weights, gradients and momentum each."""
    weights = [*net.parameters()]
    sizes, forms = [w.numel() for w in weights], [w.shape for w in weights]
    block, grad = (torch.zeros(sum(sizes)) for _ in range(2))
    pieces = torch.split(block, sizes), torch.split(grad, sizes)
    parts = zip(weights, *pieces, forms, strict=True)
    for weight, place, slope, form in parts:
        weight.data = place.view(form).copy_(weight.detach())
        weight.grad = slope.view(form)
    first, variate = block.clone(), torch.full_like(block, VARIATE)
    momentum = torch.zeros_like(block)

    def steps() -> None:
        for _ in range(STEPS):
            grad.zero_()
            cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            if term == "proximal":
                grad.add_(block, alpha=MU).sub_(first, alpha=MU)
            elif term == "variate":
                grad.add_(variate)
            momentum.mul_(MOMENTUM).add_(grad)
            block.sub_(momentum, alpha=RATE)

    return steps


if __name__ == "__main__":
    main()
