"""A net in two parts, and its weights as named tensors.

Every net is a :class:`SplitNet`: ``base`` maps inputs to embeddings, ``head`` maps embeddings to
logits. Its tensors travel under their role, ``base/stem.conv.weight`` or ``head/bias``: the key of
the state dict with the first dot turned into a slash.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError, PayloadError, suggestion
from fedmodels.tensors.bundle import Weights
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout

WIDE = 1 << 20
"""Weights of one convolution."""


class SplitNet(nn.Module):
    """A feature extractor and a classifier: ``forward(x) = head(features(x))``.

    Attributes:
        base: maps (B, *input_shape) to embeddings (B, d).
        head: maps (B, d) to logits (B, K).
        width: d, the number of coordinates of an embedding.
        mixes_examples: whether an embedding depends on its batch even in evaluation mode.
        takes_one: whether evaluation mode can embed one example. Where a layer normalises over the
            batch and keeps no statistics, it cannot; one example is then embedded beside a copy.
        mixed_precision: whether the base computes in bfloat16, as autocast has it; weights,
            embeddings and the head stay float32.
        alone: whether each example is embedded by itself, so that it meets no other one.
        own_names: what a tensor is called in the state dict of the module that the net was made
            from, by role-prefixed key; empty where the net is its own module.
        frozen: keys of the tensors that were frozen when the net was made: parameters that take no
            gradient, and buffers of modules without another parameter. They are none of
            ``tensors``: they stay with whoever builds the net, and never move.
    """

    rows_are_independent: ClassVar[bool] = True

    def __init__(
        self,
        base: nn.Module,
        head: nn.Module,
        width: int,
        *,
        mixes_examples: bool = False,
        takes_one: bool = True,
    ) -> None:
        super().__init__()
        self.mixes_examples, self.takes_one = mixes_examples, takes_one
        self.mixed_precision, self.alone = False, False
        self.base, self.head, self.width = base, head, width
        self.own_names: Mapping[str, str] = {}
        self._still = _still(self)
        self.frozen = self._frozen_keys()
        self.train(self.training)
        self._slots: list[tuple[str, dict[str, Tensor], str]] = []
        self._parameter_slots: list[tuple[str, dict[str, Tensor], str]] = []
        self._packed: PackedWeights | None = None
        self._places: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters and buffers by role-prefixed key, those of the state dict.

        Where they are kept is looked up once, as walking through all modules takes longer than
        copying a small net: modules must not be replaced once the net is in use, tensors may.
        """
        return {key: store[name] for key, store, name in self._found()}

    def everything(self) -> dict[str, Tensor]:
        """Return the live parameters and buffers, frozen ones included."""
        return {**self.tensors(), **self.frozen_tensors()}

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that are frozen, by role-prefixed key."""
        return {key: store[name] for key, store, name in self._slots_of() if key in self.frozen}

    def _frozen_keys(self) -> frozenset[str]:
        inside = {id(part) for still in self._still for part in still.modules()}
        keys = set[str]()
        for path, module in self.named_modules(remove_duplicate=False):
            for name, p in module._parameters.items():
                if p is not None and not p.requires_grad:
                    keys.add(f"{path}.{name}".replace(".", "/", 1))
            if id(module) in inside:
                keys |= {f"{path}.{name}".replace(".", "/", 1) for name in module._buffers}
        return frozenset(keys)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; modules that are frozen as a whole stay in evaluation mode."""
        super().train(mode)
        for part in self._still if mode else ():
            part.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether parameters take gradients; frozen ones never do."""
        for parameter in self.parameters_by_key().values():
            parameter.requires_grad_(requires_grad)
        return self

    def parameters_by_key(self) -> dict[str, nn.Parameter]:
        """Return the live parameters by role-prefixed key; a tied one by its first key."""
        if not self._parameter_slots:
            seen = set[int]()
            for slot in self._found():
                _, store, name = slot
                if isinstance(store[name], nn.Parameter) and id(store[name]) not in seen:
                    seen.add(id(store[name]))
                    self._parameter_slots.append(slot)
        return {key: store[name] for key, store, name in self._parameter_slots}  # type: ignore[misc]

    def buffers_by_key(self) -> dict[str, Tensor]:
        """Return the live buffers by role-prefixed key, those of the state dict."""
        return {k: t for k, t in self.tensors().items() if not isinstance(t, nn.Parameter)}

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A block in which the net computes with other tensors, by the keys of its own.

        A tied parameter is replaced wherever it is used.
        """
        own = self.tensors()
        instead = {id(own[key]): tensor for key, tensor in tensors.items()}
        replaced = [slot for slot in self._found() if id(own[slot[0]]) in instead]
        try:
            for key, store, name in replaced:
                store[name] = instead[id(own[key])]
            yield
        finally:
            for key, store, name in replaced:
                store[name] = own[key]

    @cached_property
    def parts(self) -> Sequence[nn.Module]:
        """All modules, its own included."""
        return tuple(self.modules())

    @cached_property
    def is_wide(self) -> bool:
        """Whether a convolution has so many weights that a processor prefers the plain layout."""
        convolutions = (part for part in self.parts if isinstance(part, nn.Conv2d))
        return any(part.weight.numel() > WIDE for part in convolutions)

    @cached_property
    def normalises_batches(self) -> bool:
        """Whether a layer normalises over the batch in training, which needs two examples."""
        still = {id(part) for frozen in self._still for part in frozen.modules()}
        moving = (part for part in self.parts if id(part) not in still)
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in moving)

    def check_batches(self, **sizes: int) -> None:
        """Check that the net can train on batches of the sizes that a config gives, by key.

        Raises:
            ConfigError: batches are of one example, and the net normalises over the batch.
        """
        for key, size in sizes.items():
            if size == 1 and self.normalises_batches:
                raise ConfigError(
                    f"{key} = 1: the net normalises over the batch, which needs two examples: make "
                    f"{key} larger, or take a net without batch normalisation"
                )

    def _found(self) -> list[tuple[str, dict[str, Tensor], str]]:
        """Return (key, where it is kept, its name there) of each tensor that is not frozen."""
        if not self._slots:
            self._slots = [slot for slot in self._slots_of() if slot[0] not in self.frozen]
        return self._slots

    def _slots_of(self) -> Iterator[tuple[str, dict[str, Tensor], str]]:
        for path, module in self.named_modules(remove_duplicate=False):
            unsaved = module._non_persistent_buffers_set
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None and name not in unsaved:
                        yield f"{path}.{name}".replace(".", "/", 1), store, name

    def pack(self) -> Self:
        """Move all tensors into one block, so that weights come and go as one vector; return self.

        Call it once the net is on its device. A net whose tensors share memory stays as it is.
        """
        tensors = self.tensors()
        if self.packed() is not None or _overlap(tensors.values()):
            return self
        names, layout = names_and_layout(tensors)
        block = torch.zeros(layout.size, dtype=torch.uint8, device=tensors[names[0]].device)
        self._packed = PackedWeights(names, layout, block, tensors)
        for name, place in self._packed.items():
            tensors[name].data = place.copy_(tensors[name].detach())
        self._places = self._addresses()
        return self

    def packed(self) -> PackedWeights | None:
        """Return the live parameters and buffers as one block, if they lie in one."""
        if self._packed is None or self._addresses() != self._places:
            return None  # other tensors have taken their places
        return self._packed

    def copy(self) -> Self:
        """Return a net of its own with the same tensors, in a block of their own."""
        return copy.deepcopy(self).pack()

    def _addresses(self) -> list[int]:
        return [store[name].data_ptr() for _, store, name in self._found()]

    def features(self, x: Tensor) -> Tensor:
        """Return the embeddings (B, d) of a batch (B, *input_shape)."""
        if x.dim() == 4 and not (x.is_cpu and self.is_wide and not self.mixed_precision):
            x = x.to(memory_format=torch.channels_last)  # convolutions are faster so
        return self.embedded(x)

    def embedded(self, x: Tensor) -> Tensor:
        """Return what ``features`` does, of a batch in the memory format it has: torch.vmap's."""
        if not (self.takes_one or self.base.training) and len(x) == 1:
            return self.embedded(torch.cat([x, x]))[:1]
        z: Tensor = in_bfloat16(self.base, x) if self.mixed_precision else self.base(x)
        return z

    def split(self, x: Tensor, size: int) -> Sequence[Tensor]:
        """Return inputs or labels (n, …) in batches that the net takes in the mode it is in.

        A batch has ``size`` examples, and the last one the rest. Where the net cannot take one
        example, no batch has a single one: the last joins the batch before it.
        """
        if self.alone:
            return torch.split(x, 1)
        takes_one = not self.normalises_batches if self.training else self.takes_one
        batches = torch.split(x, size if takes_one else max(size, 2))
        if not takes_one and len(batches) > 1 and len(batches[-1]) == 1:
            return [*batches[:-2], torch.cat(batches[-2:])]
        return batches

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, K) of a batch (B, *input_shape)."""
        logits: Tensor = self.head(self.features(x))
        return logits


def _still(net: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have parameters, none of which takes a gradient."""
    if all(parameter.requires_grad for parameter in net.parameters()):
        return []
    grads = [parameter.requires_grad for parameter in net.parameters()]
    if grads and not any(grads):
        return [net]
    return [part for child in net.children() for part in _still(child)]


def begins(name: str, prefixes: Collection[str]) -> bool:
    """Tell whether a name begins with one of some prefixes, in which ``*`` stands for anything."""
    return any(fnmatchcase(name, f"{p}*") if "*" in p else name.startswith(p) for p in prefixes)


def check_prefixes(names: Collection[str], prefixes: Collection[str], key: str) -> None:
    """Check that each prefix of a key of ``[method]`` names some weight; ConfigError otherwise."""
    for prefix in prefixes:
        if not any(begins(name, (prefix,)) for name in names):
            raise ConfigError(f"[method] {key}: no weight of the net begins with {prefix!r}")


def weights_of(net: SplitNet, wanted: Callable[[str], bool] | None = None) -> Weights:
    """Return copies of a net's parameters and all its buffers on the CPU, by role-prefixed key.

    They lie in one block the way they travel, in the order of their shape, whatever the net's
    memory format. ``wanted`` tells by key which ones; by default all.
    """
    packed = net.packed() if wanted is None else None
    if packed is not None:
        return packed.copy()
    kept = {k: t for k, t in net.tensors().items() if wanted is None or wanted(k)}
    if not kept:
        return {}
    names, layout = names_and_layout(kept)
    with torch.no_grad():
        block = layout.empty(kept[names[0]].device)
        torch._foreach_copy_(layout.views(block), [kept[name] for name in names])
        if not block.is_cpu:
            block = layout.empty().copy_(block)  # at once: each transfer waits for the device
    return PackedWeights(names, layout, block, kept)


def whole(net: SplitNet) -> Weights:
    """Return copies of all of a net's tensors, frozen ones too: what a file of a model holds."""
    frozen = net.frozen_tensors()
    kept = {key: t.detach().to("cpu", copy=True) for key, t in frozen.items()}
    return {**weights_of(net), **kept} if kept else weights_of(net)


def load_weights(net: SplitNet, weights: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Copy weights into a net in place; the net keeps its device and its dtypes.

    Unless ``strict``, a part of the net's keys will do; what is absent keeps its value.

    Raises:
        PayloadError: a key is unknown, or missing while ``strict``, or a shape differs.
    """
    if isinstance(weights, PackedWeights):
        packed = net.packed()
        if packed is not None and packed.is_like(weights):
            packed.block.copy_(weights.block)
            return
    targets = net.tensors()
    for key, tensor in weights.items():
        target = targets.get(key)
        if target is None:
            raise PayloadError(f"the net has no tensor {key!r}.{suggestion(key, targets)}")
        if target.shape != tensor.shape:
            raise PayloadError(
                f"tensor {key!r} is {list(tensor.shape)}; the net has {list(target.shape)}"
            )
    missing = sorted(set(targets) - set(weights))
    if strict and missing:
        raise PayloadError(f"tensor {missing[0]!r} of the net is missing ({len(missing)} in all)")
    if weights:
        with torch.no_grad():
            torch._foreach_copy_([targets[key] for key in weights], list(weights.values()))


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Tell whether any two tensors lie in the same memory, as tied ones do."""
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    return any(end > begin for (_, end), (begin, _) in pairwise(places))


def in_bfloat16(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the result of a function of tensors as float32, computed in bfloat16 by autocast.

    That is where torch holds it safe: matrix products and convolutions, not sums and norms.
    Weights are cast for this call alone, so that they are float32 to whoever else sees them.
    """
    with torch.autocast(inputs[0].device.type, torch.bfloat16, cache_enabled=False):
        found = function(*inputs)
    return found.float()


BATCH = 256
"""Examples embedded at a time."""


@torch.no_grad()
def embeddings(net: SplitNet, x: Tensor) -> Tensor:
    """Return the embeddings (n, d) of a data set, in evaluation mode, in which the net stays."""
    net.eval()
    return embed(net, x)


@torch.no_grad()
def embed(net: SplitNet, x: Tensor) -> Tensor:
    """Return the embeddings (n, d) of a data set in the mode the net is in; n may be 0."""
    parts = [net.features(part) for part in net.split(x, BATCH)] if len(x) else []
    return torch.cat(parts) if parts else torch.zeros(0, net.width, device=x.device)
