"""A device that stands for a GPU where there is none.

Its tensors lie in memory, and the processor's own kernels calculate their values. They behave as
those of a GPU in what tests look at: whoever reads a value waits for the card, tensors of two
devices do not mix, no generator of the processor draws on the card, and a copy between the two
waits unless it goes from pinned memory to the card and is asked not to. Operators that a GPU has in
no deterministic form fail, as they do on a GPU that is asked for equal bits.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CARD = torch.device("meta")
"""The device: torch's own one without memory, for which it starts no threads and no driver."""
COPIES = {aten.copy_, aten._foreach_copy_}
INDEXED = {
    aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index,
    aten._unsafe_index_put,
}  # fmt: skip
READS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.is_nonzero,
    aten.histc, aten.multinomial,
}  # fmt: skip
"""Operators of which the processor has to know the result, or its size."""
MASKS = (torch.bool, torch.uint8)
LOOSE = {
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),
    "torch.nn.MaxUnpool2d": ("max_unpool2d",),
    "torch.nn.MaxUnpool3d": ("max_unpool3d",),
    "torch.nn.functional.interpolate": (
        "upsample_linear1d_backward", "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
        "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    ),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward",),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward",),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward",),
    "torch.nn.NLLLoss": ("nll_loss2d_forward", "nll_loss2d_backward"),  # of images, not of rows
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_dense_backward",),
    "torch.Tensor.put_": ("put", "put_"),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount of weights",),
    "torch.median": ("median.dim", "nanmedian.dim"),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.Tensor.scatter_reduce": ("scatter_reduce", "scatter_reduce_"),
    "torch.Tensor.resize_": (),  # of quantised tensors, and there are none
}  # fmt: skip
"""Operators that have no deterministic form on a GPU, by what torch's documentation calls them."""
REFUSED = frozenset(name for names in LOOSE.values() for name in names)
ROOT = Path(__file__).parents[1]
SOURCES = tuple(str(ROOT / package) for package in ("models", "fedcli", "proto"))


class CardTensor(Tensor):
    """A tensor of the card; ``elem`` holds its values."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> CardTensor:
        made = Tensor._make_wrapper_subclass(
            cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(),
            dtype=elem.dtype, device=CARD, requires_grad=elem.requires_grad,
        )  # fmt: skip
        made.elem = elem.detach()
        return made

    def __repr__(self, **_: Any) -> str:
        return f"CardTensor({self.elem!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elem.untyped_storage()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0] if args else None
        if func == Tensor.data.__set__ and isinstance(args[1], CardTensor):
            own.elem = args[1].elem
        if func == Tensor.is_meta.__get__:  # it has values
            return False
        if func is Tensor.data_ptr:
            return own.elem.data_ptr()
        if func is Tensor.tolist:
            return own.cpu().tolist()
        if func is Tensor.__deepcopy__:
            copied = own.detach().clone().requires_grad_(own.requires_grad)
            copied._is_param = getattr(own, "_is_param", False)
            args[1][id(own)] = copied
            return copied
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the card outside of the block that has one")


class Card(TorchDispatchMode):
    """The card while a test runs."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()
        """How often the processor waited, by the line of the project that made it wait."""
        self._pinned = set[int]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: what tells the compiler to look away would load the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        if packet in (aten._pin_memory, aten.is_pinned):
            return self._pin(packet, args[0])
        tensors = _tensors_in([*args, *kwargs.values()])
        to_card = _is_card(kwargs.get("device"))
        if not to_card and not any(map(_is_on_card, tensors)):
            return func(*args, **kwargs)
        _refuse_loose(func, args)
        self._look(packet, args, kwargs, tensors)
        plain_args, plain = _mapped(_values, (args, kwargs))
        stays = kwargs.get("device") is None or to_card
        if "device" in plain:
            plain["device"] = torch.device("cpu")
        found = func(*plain_args, **plain)
        if packet is aten._to_copy and found is plain_args[0]:
            found = found.clone()
        return _wrapped(func, args, kwargs, found) if stays else found

    def _pin(self, packet: Any, tensor: Tensor) -> Any:
        if packet is aten.is_pinned:
            return id(tensor) in self._pinned
        pinned = tensor.clone()
        self._pinned.add(id(pinned))
        weakref.finalize(pinned, self._pinned.discard, id(pinned))
        return pinned

    def _look(self, packet: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Note a wait; fail where a GPU would."""
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{_name(packet)}: a generator of the processor draws on the card")
        if packet is aten._to_copy:
            if kwargs.get("device") is not None:
                self._copied(args[0], _is_card(kwargs["device"]), kwargs.get("non_blocking"))
        elif packet in COPIES:
            for to, source in zip(*map(_tensors_in, args[:2]), strict=True):
                self._copied(source, _is_on_card(to), args[2:3] == (True,))
        elif packet in INDEXED:
            self._indexed(packet, args)
            _refuse_mixed(packet, [args[0], *args[2:3]])
        else:
            sizes = packet is aten.repeat_interleave and kwargs.get("output_size") is None
            if packet in READS or sizes:
                self._wait(_name(packet))
            _refuse_mixed(packet, tensors)

    def _copied(self, source: Tensor, to_card: bool, quiet: bool | None) -> None:
        if _is_on_card(source) != to_card and not (quiet and id(source) in self._pinned):
            self._wait("a copy to the card" if to_card else "a copy to the processor")

    def _indexed(self, packet: Any, args: Any) -> None:
        filled = packet is not aten.index and args[2].numel() == 1  # as masked_fill does it
        for index in args[1]:
            if index is not None and index.dtype in MASKS and not filled:
                self._wait(f"{_name(packet)} by a mask")
            elif index is not None and _is_on_card(args[0]) and not _is_on_card(index):
                self._wait(f"{_name(packet)} by an index of the processor")

    def _wait(self, what: str) -> None:
        codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
        own = (code for code in codes if code.co_filename.startswith(SOURCES))
        found = next(own, None)  # none in backward, which runs without frames of ours
        where = found and f"{Path(found.co_filename).name}, {found.co_qualname}"
        self.waits[f"{where or 'no line of the project'}: {what}"] += 1


class _FromNumbers(TorchFunctionMode):
    """Makes tensors of Python's numbers on the processor first, as torch does for a GPU."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            place = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_on_card(i) and i.dtype not in MASKS for i in place):
                self._card._wait("a number by an index")  # which masked_fill cannot do
        if func in (torch.tensor, torch.as_tensor) and _is_card(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(CARD)
        return func(*args, **kwargs)


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Return the processor's autocast for the card, which has none."""
    return _AUTOCAST("cpu" if device_type == CARD.type else device_type, *args, **kwargs)


_AUTOCAST = torch.autocast


@contextmanager
def card() -> Iterator[Card]:
    """A block in which :data:`CARD` is a device with memory."""
    with (
        patch.object(torch, "autocast", _autocast),
        patch.object(optimizer, "_get_fused_kernels_supported_devices", lambda: [CARD.type, "cpu"]),
        Card() as found,
        _FromNumbers(found),
    ):
        yield found


def _is_card(device: Any) -> bool:
    return device is not None and torch.device(device).type == CARD.type


def _is_on_card(value: Any) -> bool:
    return isinstance(value, CardTensor)


def _values(value: Any) -> Any:
    return value.elem if isinstance(value, CardTensor) else value


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among arguments, as torch's own walk does in ten times as long."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list | dict):
            found += _tensors_in(each)
    return found


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return arguments or results with what a function makes of each tensor among them."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([_mapped(function, each) for each in value])
    if type(value) is dict:
        return {key: _mapped(function, each) for key, each in value.items()}
    return value


@cache
def _name(packet: Any) -> str:
    return str(packet).removeprefix("aten.")


@cache
def _loose(func: Any, weighed: bool) -> frozenset[str]:
    """Return the names under which an operator has no deterministic form."""
    name = _name(func.overloadpacket)
    names = {name, f"{name}.{func._overloadname}", f"{name} of weights" if weighed else name}
    return REFUSED & names


def _refuse_loose(func: Any, args: Any) -> None:
    weighed = func.overloadpacket is aten.bincount and len(args) > 1 and args[1] is not None
    for name in _loose(func, weighed):
        raise RuntimeError(f"{name} does not have a deterministic implementation")


def _refuse_mixed(packet: Any, tensors: list[Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not _is_on_card(tensor) and tensor.dim():
            shape = tuple(tensor.shape)
            raise RuntimeError(f"{_name(packet)}: a tensor of the processor {shape} on the card")


@cache
def _places(func: Any) -> tuple[Mapping[str, tuple[int, str]], tuple[str | None, ...]]:
    """Return which argument each alias of an operator writes into, and each result's alias."""
    schema = func._schema
    written: dict[str, tuple[int, str]] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= dict.fromkeys(argument.alias_info.before_set, (place, argument.name))
    aliases = [each.alias_info for each in schema.returns]
    return written, tuple(
        next(iter(a.before_set)) if a is not None and a.is_write else None for a in aliases
    )


def _wrapped(func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Return results as tensors of the card; what was written into is the tensor that was given."""
    written, aliases = _places(func)
    if not aliases or not _tensors_in([found]):
        return found
    given_back = []
    for alias, out in zip(aliases, [found] if len(aliases) == 1 else found, strict=True):
        if alias is None:
            given_back.append(_mapped(CardTensor, out))
        else:
            place, name = written[alias]
            given_back.append(args[place] if place < len(args) else kwargs.get(name))
    return given_back[0] if len(aliases) == 1 else tuple(given_back)
