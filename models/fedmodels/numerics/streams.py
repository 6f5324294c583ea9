"""What a client of an open run forgot: its tasks are its own, and so is their number.

Apart from the other scores, since a report needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def lost_in_stream(scored: Iterable[tuple[int, Sequence[float | None]]]) -> dict[int, float]:
    """Return by task how much of a client's best earlier accuracy is gone at the end of its stream.

    As :func:`fedmodels.numerics.metrics.forgetting`, of one client of an open run: over the last
    score of each of its present tasks.

    Args:
        scored: the client's scores in order: its present task, and its accuracy on each of its
            tasks so far, None where it was not scored on one.

    Returns:
        ``{earlier task: best earlier accuracy minus the last}``.
    """
    best: dict[int, float] = {}
    last: tuple[int, Sequence[float | None]] | None = None
    for present, accuracies in scored:
        if last is not None and present > last[0]:  # the client has gone on
            known = {task: a for task, a in enumerate(last[1]) if a is not None}
            best |= {task: max(a, best.get(task, a)) for task, a in known.items()}
        last = present, accuracies
    end = dict(enumerate(last[1])) if last is not None else {}
    return {k: was - now for k, was in best.items() if (now := end.get(k)) is not None}
