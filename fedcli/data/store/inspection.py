"""``fedcli check``: what clients hold, what is wrong with it, and what may not be meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedcli.data.store.findings import Inspected, inspected, some
from fedcli.data.store.partition_store import STORE


def inspect(root: Path, console: Console) -> bool:
    """Print what clients hold and what is wrong with it; tell whether all is well.

    Raises:
        DataError: there is no client's directory below ``root``, and it is none.
    """
    read, found = inspected(root)
    console.print(_table(read))
    notes = [str(finding) for finding in found if not finding.is_wrong]
    if any(one.is_pooled for one in read):
        notes.append("all training examples are at client 0: this partition is a pooled one")
    notes += [_gone(one) for one in read if one.gone]
    wrong = [str(finding) for finding in found if finding.is_wrong]
    for line in [*notes, *_gaps(root)]:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(f"wrong: {line}", markup=False, highlight=False, soft_wrap=True)
    if not wrong:
        console.print(f"nothing wrong with {len(read)} client directories")
    return not wrong


def _gaps(root: Path) -> Iterable[str]:
    """Yield a line if numbers are left out, as on a machine that holds some of a run's clients."""
    numbers = {int(p.name) for p in root.glob("*") if p.name.isdecimal() and p.is_dir()}
    has_store = (root / STORE).is_dir()
    if not has_store and (left_out := sorted({*range(max(numbers, default=0))} - numbers)):
        yield (
            f"no directory of client {some(left_out)}; that is well where other machines hold "
            "them, but fedsrv launch needs every number from 0 on"
        )


def _gone(one: Inspected) -> str:
    """Say which training data of a client were deleted."""
    tasks = f"task {one.gone[0]}" if len(one.gone) == 1 else f"tasks {some(one.gone)}"
    return (
        f"client {one.name}: the training data of {tasks} were deleted; that is well where its run "
        "has gone on to a later task"
    )


def _table(read: Sequence[Inspected]) -> Table:
    """Return the table of what each client holds."""
    table = Table(
        "client", "tasks", "train", "test", "classes", "tested", "inputs", "as the net sees them"
    )
    for one in read:
        train, test, file = one.counts["train"], one.counts["test"], one.data.file
        shape = "×".join(map(str, file.input_shape))
        table.add_row(
            one.name, str(one.data.num_tasks), str(train.sum()), str(test.sum()),
            f"{np.count_nonzero(train)} of {file.num_classes}",
            f"{np.count_nonzero((train > 0) & (test > 0))} of {np.count_nonzero(train)}", shape,
            "" if one.low > one.high else f"{one.low:.3g} to {one.high:.3g}",
        )  # fmt: skip
    return table
