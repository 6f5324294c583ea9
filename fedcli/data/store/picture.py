"""A picture of who holds what: classes by clients and tasks."""

from __future__ import annotations

import json
from pathlib import Path

from fedcli.data.store.partition_writer import TABLE
from fedmodels.charts import Chart, Spread, document
from fedmodels.errors import DataError, reason_of
from fedmodels.files import write_atomically


def draw_partition(root: Path) -> Path:
    """Draw ``root/partition.svg`` from ``root/partition.json``; return its path.

    Columns are clients, or pairs of a client and a task, rows classes; the shade is the number of
    training examples.

    Raises:
        DataError: the picture cannot be written.
    """
    content = json.loads((root / TABLE).read_bytes())
    people = content.get("client_names") or [str(i) for i in range(len(content["clients"]))]
    pairs = [
        (f"{name}/{task}" if len(tasks) > 1 else name, counts["train"])
        for name, tasks in zip(people, content["clients"], strict=True)
        for task, counts in enumerate(tasks)
    ]
    cells = {
        (label, column): Spread(count)
        for column, (_, counts) in enumerate(pairs)
        for label, count in enumerate(counts)
        if count
    }
    rows, columns = dict(enumerate(content["class_names"])), dict(enumerate(n for n, _ in pairs))
    x = "client/task" if len(pairs) > len(people) else "client"
    caption = "training examples of each class"
    chart = Chart(caption, "cells", {"": cells}, x, "class", "", columns, rows, is_log=True)
    path = root / "partition.svg"
    try:
        write_atomically(path, document([chart]))
    except OSError as error:
        raise DataError(
            f"the data are dealt out, but their picture {path} cannot be written: "
            f"{reason_of(error)}"
        ) from None
    return path
