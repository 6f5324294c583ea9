"""The server half of an interaction, done so that no upload can spoil the run.

The functions here never return a state with infinities. No single upload ends the run while enough
others are left: the search finds the client behind a failure, and the other uploads are reduced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedmodels.errors import ClientFailed, FedtideError, PayloadError, TooFewClients
from fedmodels.tensors.aggregation_rule import MEAN
from fedmodels.tensors.bundle import Bundle, check_finite
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import Metrics, ServerContext, ServerState
from fedmodels.training.fault import fault_in, line_of
from fedmodels.training.hooks import reduce
from fedmodels.training.method import Method

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


def reduced(
    method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads, needed: int
) -> Reduced:
    """Aggregate and finish an interaction, without the clients whose uploads make that fail.

    Args:
        method: the method whose server half runs.
        ctx: the position in the run.
        state: the server state before the interaction; it is not modified.
        uploads: the uploads of all clients that answered.
        needed: how many clients must be left for the run to go on.

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
            f"interaction {ctx.interaction + 1} cannot be reduced, and no single client is behind "
            f"it: {reason}; the state before it is kept, and --resume goes on from there"
        )
    left = uploads.of(uploads.keys() - behind)
    client, why = next(iter(behind.items()))
    others = f" ({len(behind) - 1} more failed)" if len(behind) > 1 else ""
    if len(left) < needed:
        raise TooFewClients(str(ClientFailed(client, ctx.round, "reduction", why)) + others)
    try:
        return replace(_attempt(method, ctx, state, left), left_out=behind)
    except ReductionError as error:
        failed = ClientFailed(client, ctx.round, "reduction", why)
        raise TooFewClients(f"{failed}{others}; without it: {error}") from None


def _attempt(method: Method, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
    """Aggregate and finish.

    Raises:
        ReductionError: the method's code raised an error, or the result holds infinities.
    """
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
    return Reduced(after, metrics, ctx.series, shares=uploads.share_of_each())


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
    alone = {c: _failure(method, ctx, state, uploads.of({c}, MEAN)) for c in uploads}
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
