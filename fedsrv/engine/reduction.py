"""The server half of an interaction: the mean of its uploads, ``aggregate`` and ``finish``.

The mean is computed while other uploads are still on their way. No upload can spoil the run: the
functions here never return a state with infinities. No single upload ends the run while enough
others are left: the search finds the client behind a failure, and the other uploads are reduced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from fedmodels.errors import FedtideError, PayloadError, TooFewClients
from fedmodels.tensors.bundle import Bundle, ClientId, Weights, check_finite
from fedmodels.tensors.uploads import Uploads
from fedmodels.tensors.weighted_mean import RunningMean
from fedmodels.training.contexts import Metrics, ServerContext, ServerState
from fedmodels.training.fault import fault_in, line_of
from fedmodels.training.hooks import reduce
from fedmodels.training.method import Method
from fedsrv.engine.cohort import Answer, first_failure, too_few

MAX_WHOLE = 3
"""Up to so many uploads stay whole: sums in float64 and the mean would take as much memory."""


class StreamingMean:
    """Adds up uploads in the order of their clients' ids, and drops their weights.

    Otherwise all uploads would wait for the last one: 50 of 45 MB are 2.3 GB. The order of ids
    makes the bits those of a mean of all at once. Uploads that fit into memory stay whole. So do
    uploads that the method reads one by one.
    """

    def __init__(
        self,
        clients: Iterable[ClientId],
        count: Callable[[Bundle], float] | None,
        kept_bytes: int,
    ) -> None:
        """Begin with nothing.

        Args:
            clients: all that got orders.
            count: gives the coefficient of an upload in the mean; None keeps all uploads whole.
            kept_bytes: memory for uploads. Uploads that fit into it stay whole. Others are added in
                groups of three quarters of it: the sums are read and written once for a group.
        """
        self._clients = sorted(c for c in clients if isinstance(c, int))
        self._count, self._kept_bytes = count, kept_bytes
        self._mean = RunningMean()
        self._next, self._at_once = 0, 1
        self._pool: ThreadPoolExecutor | None = None
        self._steps: list[Future[None]] = []

    def add_answer(
        self, result: Answer, results: Mapping[ClientId, Answer], failed: Collection[ClientId]
    ) -> None:
        """Add one more answer; a thread adds its upload to the mean in the order of ids."""
        if self._pool is None:
            if not self._folds(result):
                return
            self._at_once = max(1, self._kept_bytes * 3 // 4 // result.upload.num_bytes())
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="fold")
        self._steps.append(self._pool.submit(self._add, results, failed))

    def finish(self, results: Mapping[ClientId, Answer]) -> Weights | None:
        """Add the remaining uploads and return the mean; None if uploads stayed whole."""
        if self._pool is None:
            return None
        self._add_the_rest(results)
        return self._mean.mean()

    def sums(self, results: Mapping[ClientId, Answer]) -> Weights | None:
        """Add all uploads, also those that stayed whole; return the sums, None if nothing counts.

        Sums are in float64; for an integer tensor it is the maximum, as in ``RunningMean.sums``.
        """
        self._add_the_rest(results)
        return self._mean.sums()

    def _add_the_rest(self, results: Mapping[ClientId, Answer]) -> None:
        """Add the uploads that are not added yet; no more answers are expected."""
        with self._pool or ThreadPoolExecutor(1) as pool:
            self._steps.append(pool.submit(self._add, results, set(self._clients)))
        for step in self._steps:
            step.result()

    def _folds(self, result: Answer) -> bool:
        upload = result.upload
        return (
            len(self._clients) > MAX_WHOLE
            and result.upload.num_bytes() * len(self._clients) > self._kept_bytes
            and self._count is not None
            and bool(upload.weights)
            and not upload.num_evaluation_bytes()  # the record counts them one by one
        )

    def _add(self, results: Mapping[ClientId, Answer], failed: Collection[ClientId]) -> None:
        """Add the uploads up to the next missing client, if they fill a group."""
        ready, end = list[Answer](), self._next
        for client in self._clients[self._next :]:
            if client in results:
                ready.append(results[client])
            elif client not in failed:
                break
            end += 1
        if len(ready) < self._at_once and end < len(self._clients):
            return
        self._next = end
        assert self._count is not None, "nothing is folded that has no count"
        uploads = [result.upload for result in ready]
        self._mean.add([u.weights for u in uploads], [self._count(u) for u in uploads])
        for result in ready:
            result.upload = without_weights(result.upload)


def without_weights(upload: Bundle) -> Bundle:
    """Return a copy of an upload without its weights."""
    tensors = upload.by_key()
    return Bundle.from_keys(
        {key: tensors[key].clone() for key in tensors if not key.startswith("weights/")}
    )


log = logging.getLogger(__name__)


class ReductionError(Exception):
    """These uploads cannot be reduced; the line says why."""


@dataclass(frozen=True)
class Reduced:
    """The result of the uploads of an interaction."""

    state: ServerState
    metrics: Metrics
    series: Mapping[str, Any]
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients whose uploads were left out, and why."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """The share of each client's upload in the mean, or in what stands in its place."""
    models: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Which of a method's several models each client's upload trained."""
    rare_classes: Mapping[str, list[int]] = field(default_factory=dict)
    """By level the classes whose prototypes too few clients have for the rule."""


def reduced(
    method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads, needed: int
) -> Reduced:
    """Aggregate and finish an interaction, without the clients whose uploads make that fail.

    The state before is not modified. At least ``needed`` clients must be left.

    Raises:
        TooFewClients: too few clients are left, or no single client is behind the failure.
    """
    try:
        return _attempt(method, ctx, state, uploads)
    except ReductionError as error:
        log.exception("interaction %d cannot be reduced as it is", ctx.interaction + 1)
        reason = str(error)
    behind = {} if uploads.is_folded else _behind(method, ctx, state, uploads)
    if not behind:
        raise TooFewClients(
            f"interaction {ctx.interaction + 1} cannot be aggregated, by no single client's "
            f"fault: {reason}; the state before it is kept, and --resume continues from there"
        )
    left = uploads.of(uploads.keys() - behind)
    failed = first_failure(behind, ctx.round, "reduction")
    if len(left) < needed:
        raise too_few(behind, ctx.round, "reduction", needed)
    try:
        return replace(_attempt(method, ctx, state, left), left_out=behind)
    except ReductionError as error:
        raise TooFewClients(f"{failed}; without it: {error}") from None


def _attempt(method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
    """Aggregate and finish; ReductionError if the method fails, or its result is not finite."""
    try:
        return _unguarded(method, ctx, state, uploads)
    except PayloadError as error:
        raise ReductionError(str(error).partition("\n")[0]) from error
    except (FedtideError, MemoryError):  # no upload is behind it
        raise
    except Exception as error:
        raise ReductionError(fault_in(method, error) or line_of(error)) from error


def _unguarded(method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
    ctx = replace(ctx, series={})
    after, metrics = reduce(method, ctx, state, uploads)
    before = {id(bundle) for _, bundle in state.named()}
    for name, bundle in after.named():
        if id(bundle) not in before:
            _check(name, bundle)
    if not _is_finite(ctx.series):
        raise PayloadError("a series of the record would hold NaN or infinite values")
    shares, rare = uploads.share_of_each(), uploads.rare_classes
    models = {c: found for c, u in uploads.items() if (found := method.models_of(ctx, u))}
    return Reduced(after, metrics, ctx.series, shares=shares, models=models, rare_classes=rare)


def _check(name: str, bundle: Bundle) -> None:
    try:
        check_finite(bundle)
    except PayloadError as error:
        raise PayloadError(f"in the state that would follow, {name}: {error}") from None


def _behind(
    method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads
) -> dict[int, str]:
    """Return the clients whose uploads fail alone, or else one whose absence cures the failure.

    Where several uploads all fail for one reason, the fault is the method's, and none is returned.
    """
    alone = {c: _failure(method, ctx, state, uploads.alone(c)) for c in uploads}
    behind = {c: why for c, why in alone.items() if why}
    if behind:
        same = len(behind) == len(uploads) > 1 and len({*behind.values()}) == 1
        return {} if same else behind
    for client in uploads:
        others = uploads.of(uploads.keys() - {client})
        if others and not _failure(method, ctx, state, others):
            return {client: "the uploads of all clients cannot be reduced together with this one"}
    return {}


def _failure(
    method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads
) -> str | None:
    """Return why these uploads cannot be reduced, on one line; None if they can."""
    try:
        _attempt(method, ctx, state, uploads)
    except (ReductionError, TooFewClients) as error:
        return str(error)
    return None


def _is_finite(values: Any) -> bool:
    """Tell whether all numbers in nested lists and mappings are finite."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return all(map(_is_finite, values))
    return not isinstance(values, float) or math.isfinite(values)
