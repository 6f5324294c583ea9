"""What a run will move and store, as shapes tell it when its first orders are made.

How long it takes, ``fedcli forecast`` tries: a coordinator has no data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fedmodels.console.printable import bytes_text
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.contexts import ServerState
from fedmodels.training.hooks import init_client
from fedmodels.training.run import RunFacts
from fedsrv.engine.cohort import Trip
from fedsrv.engine.plan import Plan

ROW_BYTES = 2500
"""What records, ``run.db`` and the audit log take of a disk for one client of an interaction."""
log = logging.getLogger(__name__)


def forecast(plan: Plan, trip: Trip, state: ServerState, wanted: int) -> dict[str, Any]:
    """Return what the first orders of a run tell: bytes of a client, of all, and of disks.

    ``wanted`` is how many uploads end an interaction. Bytes are those that records count: of the
    tensors that clients train from and send, without those of scores.
    """
    experiment, own = plan.run.experiment, trip.personal
    downs = [trip.sent.num_bytes() + own.get(c, Bundle()).num_bytes() for c in trip.orders]
    common, personal = plan.method.payload_spec(plan.run)
    later = _sizes(plan.wire.payload_spec(common))[1] + _sizes(personal)[1]
    down, up = (min(downs), max(*downs, later)), _sizes(trip.form.spec)
    drawn = experiment.cohort_size if experiment.schedule.sampling == "poisson" else None
    counts = [drawn or min(len(step.cohort), wanted) for step in plan.steps]
    kept = 1 + experiment.server.max_rollback
    here = kept * _stored(state) + ROW_BYTES * (len(counts) + sum(counts))
    try:
        there = [_held(plan, run, kept) for run in plan.run.of_each_net]
    except Exception as error:  # init_client of one's own may need what only a site has
        log.warning("the clients' data are unknown: %s: %s", type(error).__name__, error)
        there = []
    grown = kept * (up[1] - up[0])  # what a client may come to hold, and the coordinator of each
    ends = plan.steps[-1].ends_run
    found: dict[str, Any] = {
        "clients": counts[0],
        "interactions": len(counts) if ends else 0,
        "down": [*down],
        "up": [*up],
        "all": [sum(counts) * (d + u) for d, u in zip(down, up, strict=True)] if ends else [],
        "server_disk": [here, here + grown * len(plan.profiles)],
        "client_disk": [min(there), max(there) + grown] if there else [],
    }
    return found | {"line": _line(found)}


def _sizes(spec: BundleSpec) -> tuple[int, int]:
    """Return the fewest and the most bytes of a bundle, without those for scores alone."""
    specs = {**spec.required, **spec.optional}
    counted = {key: one for key, one in specs.items() if not key.startswith("weights/eval/")}
    least = (one for key, one in counted.items() if key in spec.required and None not in one.shape)
    return sum(o.max_bytes() for o in least), sum(o.max_bytes() for o in counted.values())


def _held(plan: Plan, run: RunFacts, kept: int) -> int:
    """Return what a client holds: so many private states, and its last models."""
    private = init_client(plan.method, run, 0).num_bytes() if plan.is_stateful else 0
    run.forget_initial_weights()
    return kept * private + 3 * sum(t.numel() * t.dtype.itemsize for t in run.forms.values())


def _stored(state: ServerState) -> int:
    return state.common.num_bytes() + state.own.num_bytes() + state.optimizer.num_bytes()


def _line(found: Mapping[str, Any]) -> str:
    """Return the line that says it."""
    clients = found["clients"]
    whom = f"{clients} client{'' if clients == 1 else 's'}"
    line = f"an interaction sends {_range(*found['down'])} to each of {whom}"
    line += f" and takes {_range(*found['up'])} from each"
    if found["interactions"]:
        line += f", all {found['interactions']} move {_range(*found['all'])}"
    line += f"; on disk about {_rounded(found['server_disk'])} at the coordinator"
    there = found["client_disk"]
    return f"{line} and {_rounded(there)} at a client" if there else line


def _rounded(disk: Sequence[float]) -> str:
    least, most = (float(f"{size:.1g}") for size in disk)
    return _range(least, most)


def _range(least: float, most: float) -> str:
    if least == most:
        return bytes_text(least)
    return f"{bytes_text(least)} to {bytes_text(most)}"
