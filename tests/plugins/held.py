"""A third party's method for crash tests: it stops at points the test names.

The directory ``HELD_DIR`` steers it. A file ``POINT`` there, such as ``train-1-2`` (client 1,
interaction 2) or ``aggregate-2``, makes the process that gets there write ``POINT.reached`` and
sleep until the file is gone; the second time it goes on. ``sync-limit`` holds the last interaction
that any fsync reaches, as if the disk lagged behind.

Two methods are held: ``held-whole`` shares the net as a whole, ``held`` its base alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedcli.runtime.state import StateDirectory
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.stepped import Batch
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort

STEER = Path(os.environ.get("HELD_DIR", "/nonexistent"))


def hold(point: str) -> None:
    """Sleep at a point while the test names it, the first time it is reached."""
    named, reached = STEER / point, STEER / f"{point}.reached"
    if named.exists() and not reached.exists():
        reached.touch()
        while named.exists():
            time.sleep(0.02)


def sync_limit() -> int:
    """Return the last interaction the disk is allowed to keep up with."""
    try:
        return int((STEER / "sync-limit").read_text())
    except FileNotFoundError:
        return 10**9


@register("held-whole")
@dataclass(frozen=True, kw_only=True)
class HeldWhole(FedAvg):
    """FedAvg: clients have no state to lose."""

    citation: ClassVar[str] = "tests"

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        hold(f"aggregate-{ctx.interaction}")
        return super().aggregate(ctx, state, uploads)

    def after_step(self, ctx: ClientContext, batch: Batch, refs: Any) -> None:
        hold(f"train-{ctx.client}-{ctx.interaction}")


@register("held")
@dataclass(frozen=True, kw_only=True)
class Held(HeldWhole):
    """FedAvg on the base with private heads, so that clients have a state to lose."""

    private: ClassVar[tuple[str, ...]] = ("head/",)


_save, _sync, _store_sync = StateDirectory.save, StateDirectory._sync, Store.sync
_save_personal, _end, _leave = StateDirectory.save_personal, Store.end, RemoteCohort.leave


def save(self: StateDirectory, interaction: int, state: Bundle) -> None:
    _save(self, interaction, state)
    hold(f"saved-{self.path.name}-{interaction}")


def sync(self: StateDirectory, path: Path) -> bool:
    return int(path.stem.partition("-")[2]) <= sync_limit() and _sync(self, path)


def store_sync(self: Store, interaction: int) -> None:
    while interaction > sync_limit():
        time.sleep(0.02)
    _store_sync(self, interaction)


def save_personal(
    self: StateDirectory,
    weights: Bundle,
    description: Mapping[str, str],
    same_as: Path | None = None,
) -> None:
    _save_personal(self, weights, description, same_as)
    hold(f"finish-{self.path.name}")


def end(self: Store, summary: dict[str, Any]) -> None:
    hold("before-end")
    _end(self, summary)
    hold("after-end")


def leave(self: RemoteCohort, client: ClientId, reason: str) -> None:
    hold(f"leave-{client}")
    _leave(self, client, reason)


StateDirectory.save, StateDirectory._sync, Store.sync = save, sync, store_sync  # type: ignore[method-assign]
StateDirectory.save_personal, Store.end = save_personal, end  # type: ignore[method-assign]
RemoteCohort.leave = leave  # type: ignore[method-assign]
