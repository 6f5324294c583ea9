"""What a client of an open run forgot: its tasks are its own, and so is their number.

Apart from the other scores, since a report needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def lost_in_stream(scored: Iterable[tuple[int, Mapping[int, float]]]) -> dict[int, float]:
    """Return by task how much of a client's best earlier accuracy is gone at the end of its stream.

    As :func:`fedmodels.numerics.metrics.forgetting`, of one client of an open run: over the last
    score of each of its present tasks.

    Args:
        scored: the client's scores in order: its present task, and its accuracy on each of its
            tasks that it was scored on.

    Returns:
        ``{earlier task: best earlier accuracy minus the last}``.
    """
    best: dict[int, float] = {}
    last: tuple[int, Mapping[int, float]] | None = None
    for present, accuracies in scored:
        if last is not None and present > last[0]:  # the client has gone on
            best |= {task: max(a, best.get(task, a)) for task, a in last[1].items()}
        last = present, accuracies
    end = last[1] if last is not None else {}
    return {task: best[task] - now for task, now in sorted(end.items()) if task in best}
