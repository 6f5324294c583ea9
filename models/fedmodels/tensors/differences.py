"""How far an upload lies from what its client was given, and in which direction.

Nobody keeps uploads for that: of each upload stay a few norms and a projection of the difference to
4096 numbers, a count sketch (Charikar et al., ICALP 2002): each element is added, with a sign of
its own, to one of the numbers. Inner products of projections are those of the differences, with a
standard deviation of about 1/64 of the product of their norms; exactly those where the difference
has no more than 4096 elements. Projections add up as differences do, so the projection of a mean is
known although no upload is there any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.packed_weights import BlockLayout, PackedWeights, flatten, laid_like, packed

Norms = Mapping[str, float]
"""Of an upload, by part: ``weights``, ``prototypes/class`` and so on."""
WEIGHTS, STATISTICS, GENERATORS = "weights", "statistics", "generators"
"""Parts of an upload; ``evaluation`` and each level of prototypes are others."""
SKETCH = 4096
VOTERS = 500
"""Clients whose directions each difference is compared with."""
_ROWS = 64
_PIECE = _ROWS * SKETCH
"""Elements that are measured at a time: a buffer of 1 MiB."""
_STEP, _WRAP = 4157, 1 << 20
"""Row r takes its signs from place ``r * _STEP % _WRAP`` on, so that rows share no sign."""


@dataclass(frozen=True)
class Measured:
    """What is kept of an upload to compare it with others."""

    norms: Norms
    """By part of the upload, such as ``weights`` or ``prototypes/class``: how far it lies from what
    the client was given, or how large it is where nothing was given."""
    given: Mapping[str, float] = field(default_factory=dict)
    """The norm of what the client was given, of parts where there is such a thing."""
    norm: float | None = None
    """The norm of the difference: that of weights, or else of prototypes; None without either."""
    sketch: Tensor | None = None  # (4096,) float32
    """The projection of that difference."""
    cosine: float | None = None
    """The cosine between the difference and the mean over its group, whose uploads somebody has
    added up on their way, and has measured it; None elsewhere."""


class TrainingBase:
    """What a client was given to train from."""

    def __init__(self, common: Bundle, personal: Bundle | None = None) -> None:
        """Take the parts of a payload; where both hold something, the personal part counts."""
        self._parts = [common] if personal is None else [personal, common]
        self._bases: dict[_Plan, tuple[Tensor, Mapping[str, float]]] = {}
        """By plan of an upload: the given weights in its layout, and their norms by part."""

    def measured(self, upload: Bundle) -> Measured:
        """Return what is kept of an upload that was trained from this."""
        norms: dict[str, float] = {}
        given: dict[str, float] = {}
        norm = sketch = None
        if packed := _packed(upload.weights):
            plan = _plan_of(packed.names, packed.layout)
            base, sizes = self._base(packed, plan)
            found, sketch = plan.change(packed.block.cpu().view(torch.float32), base)
            norms, given, norm = dict(found), dict(sizes), found[WEIGHTS]
        for level, rows in upload.prototypes.items():
            norms[f"prototypes/{level}"] = _longest(rows.vectors)
        if sketch is None and upload.prototypes:
            norm, sketch = self._of_prototypes(upload.prototypes)
        for generator in upload.generators.values():
            floats = [t.float() for t in generator.tensors.values() if t.is_floating_point()]
            size = _norm(flatten(floats)) if floats else 0.0
            norms[GENERATORS] = max(size, norms.get(GENERATORS, 0.0))
        return Measured(norms, given, norm, sketch)

    # --- weights ----------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Mapping[str, float]:
        """The norms of the given weights, by part."""
        packed = _packed(next((p.weights for p in self._parts if len(p.weights)), {}))
        return (
            {} if packed is None else self._base(packed, _plan_of(packed.names, packed.layout))[1]
        )

    def _base(self, like: PackedWeights, plan: _Plan) -> tuple[Tensor, Mapping[str, float]]:
        """Return the given weights in the layout of an upload, and their norms by part."""
        if plan not in self._bases:
            block = laid_like(like, [p.weights for p in self._parts]).block.cpu()
            base = block.view(torch.float32)
            sizes, _ = plan.change(base, torch.zeros(1).expand(len(base)))
            self._bases[plan] = base, sizes
        return self._bases[plan]

    # --- prototypes -------------------------------------------------------------------------------

    def _of_prototypes(self, levels: Mapping[str, Prototypes]) -> tuple[float, Tensor]:
        """Return norm and projection of what changed in prototypes; rows of a label are compared.

        Rows that the client was not given count as they are.
        """
        sketch, begin, squares = torch.zeros(SKETCH), 0, 0.0
        for level, rows in sorted(levels.items()):
            known = (p.prototypes[level] for p in self._parts[::-1] if level in p.prototypes)
            before = {label: row for found in known for label, row in _rows(found)}
            for label, row in _rows(rows):
                old = before.get(label)
                change = row - old if old is not None and old.shape == row.shape else row
                squares += _norm(change) ** 2
                _add_row(sketch, change.float(), begin + label * len(row))
            begin += SKETCH + 1  # rows of another level have other signs
        return math.sqrt(squares), sketch


class _Plan:
    """Where parameters and statistics lie in the block of weights with these names."""

    def __init__(self, names: tuple[str, ...], layout: BlockLayout) -> None:
        skipped, apart = [torch.zeros(0, dtype=torch.int64)], dict[str, list[Tensor]]()
        facts = zip(names, layout.facts, layout.offsets, layout.ends, strict=True)
        size = torch.float32.itemsize
        for name, (dtype, _), begin, end in facts:
            part = _part_of(name)
            if dtype == torch.float32 and part == WEIGHTS:
                continue  # most of them, and large
            places = torch.arange(begin // size, -(-end // size))
            skipped.append(places)
            if dtype == torch.float32:
                apart.setdefault(part, []).append(places)
        self._apart = {part: torch.cat(found) for part, found in apart.items()}
        every = torch.cat(skipped)
        pieces = every // _PIECE
        self._skipped = {n: every[pieces == n] - n * _PIECE for n in {*pieces.tolist()}}
        """The elements that are no parameters, by the piece of the block that they lie in."""

    def change(self, block: Tensor, base: Tensor) -> tuple[dict[str, float], Tensor]:
        """Return the norms of a difference by part, and the projection of that of parameters.

        Each block is read once, and piece by piece.
        """
        sketch, squares, length = torch.zeros(SKETCH), 0.0, len(block)
        buffer = torch.empty(-(-min(length, _PIECE) // SKETCH) * SKETCH)
        for number, begin in enumerate(range(0, length, _PIECE)):
            count = min(_PIECE, length - begin)
            piece = slice(begin, begin + count)
            moved = torch.sub(block[piece], base[piece], out=buffer[:count])
            if (places := self._skipped.get(number)) is not None:
                moved[places] = 0.0
            squares += float(torch.linalg.vector_norm(moved)) ** 2
            rows = -(-count // SKETCH)
            buffer[count : rows * SKETCH] = 0.0
            table = buffer[: rows * SKETCH].view(rows, SKETCH)
            first = begin // SKETCH * _STEP % _WRAP
            signs = _signs().as_strided((rows, SKETCH), (_STEP, 1), first)
            sketch += table.mul_(signs).sum(0)
        apart = {part: _norm(block[p] - base[p]) for part, p in self._apart.items()}
        return {WEIGHTS: math.sqrt(squares), **apart}, sketch


@lru_cache(maxsize=64)
def _plan_of(names: tuple[str, ...], layout: BlockLayout) -> _Plan:
    return _Plan(names, layout)


def _part_of(name: str) -> str:
    """Return which part of an upload a weight of this name belongs to."""
    if name.endswith(("running_mean", "running_var")):
        return STATISTICS
    return "evaluation" if name.startswith("eval/") else WEIGHTS


def _packed(weights: Weights) -> PackedWeights | None:
    """Return weights in one block of float32 by ascending names; None if there are none."""
    if isinstance(weights, PackedWeights):
        floats = {dtype for dtype in weights.layout.dtypes if dtype.is_floating_point}
        if floats == {torch.float32} and weights.names == tuple(sorted(weights.names)):
            return weights
    floating = {name: t.float() for name, t in weights.items() if t.is_floating_point()}
    if not floating:
        return None
    return packed(floating)


def _add_row(sketch: Tensor, row: Tensor, begin: int) -> None:
    """Add a row to a projection as if it stood at this place of a long vector."""
    places = torch.arange(begin, begin + len(row))
    columns = places % SKETCH
    signs = _signs()[places // SKETCH * _STEP % _WRAP + columns]
    sketch.index_add_(0, columns, row * signs)


@cache
def _signs() -> Tensor:
    """Return +1 and -1 at random, the same in every process: 5 MiB, made when first needed."""
    drawn = np.random.default_rng(0).integers(0, 2, _WRAP + _ROWS * _STEP + SKETCH, dtype=np.int8)
    return torch.from_numpy((2 * drawn - 1).astype(np.float32))


def _rows(prototypes: Prototypes) -> Iterator[tuple[int, Tensor]]:
    """Yield each row by its label, or by its place where places say what rows stand for."""
    labels: Sequence[int] = prototypes.labels.tolist() or range(len(prototypes.vectors))
    return zip(labels, prototypes.vectors, strict=True)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector.double()))


def _longest(vectors: Tensor) -> float:
    """Return the norm of the longest of some rows; 0 without rows."""
    if not vectors.numel():
        return 0.0
    return float(torch.linalg.vector_norm(vectors.double(), dim=1).max())


def cosines(
    sketches: Mapping[int, Tensor], counts: Mapping[int, float], also: Mapping[int, Tensor]
) -> dict[int, float]:
    """Return the cosine between each difference and the mean of the differences that count.

    Returns:
        By client; nothing of a client whose difference is zero, and nothing where the mean is.
    """
    mean = torch.zeros(SKETCH, dtype=torch.float64)
    for client, sketch in sketches.items():
        mean += counts[client] * sketch.double()
    size, found = float(mean.norm()), dict[int, float]()
    for client, sketch in sorted({**also, **sketches}.items()):
        wide = sketch.double()
        if (product := size * float(wide.norm())) > 0 and math.isfinite(product):
            found[client] = max(-1.0, min(1.0, float(mean @ wide) / product))
    return found


def against(
    sketches: Mapping[int, Tensor], bound: float, all_but: int
) -> dict[int, tuple[int, float]]:
    """Return how many of the others each difference points against, and what most of them agree on.

    Each other client has one voice, however long its difference is: it is against a difference if
    their cosine is below the bound. The second number is a cosine that no more than n - ``all_but``
    of the others exceed: with n clients, so many others agree on it. So f clients that lie move at
    most f voices. Beyond ``VOTERS`` clients as many are drawn, the same ones for all.

    Returns:
        By client; nothing of a client whose difference is zero, and nothing of two or one.
    """
    directions = dict[int, Tensor]()
    for client, sketch in sketches.items():
        wide = sketch.double()
        if 0 < (size := float(wide.norm())) < math.inf:
            directions[client] = wide / size
    clients = [*directions]
    if len(clients) < 3:
        return {}
    voters = sorted(np.random.default_rng(len(clients)).permutation(len(clients))[:VOTERS].tolist())
    voices = torch.stack([directions[clients[place]] for place in voters])
    needed = len(voters) - min(math.ceil(all_but * len(voters) / len(clients)), len(voters) // 2)
    found = dict[int, tuple[int, float]]()
    for place, client in enumerate(clients):
        others = [row for row, voter in enumerate(voters) if voter != place]
        cosines = (voices @ directions[client])[others].sort().values
        found[client] = int((cosines < bound).sum()), float(cosines[needed - 1])
    return found
