"""The mean of a trip's uploads: computed while other uploads are still on their way, or of sums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.weighted_mean import RunningMean, mean_of_sums
from fedsrv.engine.cohort import Answer

Sums = Mapping[tuple[int, ...], Weights]
"""The weighted sums that relays took, by the clients in each; empty where nothing counts."""


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


def mean_with_sums(
    results: Mapping[ClientId, Answer],
    sums: Sums,
    count: Callable[[Bundle], float],
    dtypes: Mapping[str, torch.dtype],
) -> Weights | None:
    """Return the mean of relays' sums and of the uploads that came whole; drop their weights.

    The whole uploads make one more group. Groups are added in the order of their lowest clients.

    Args:
        results: all answers; answers of clients in a sum hold no weights.
        sums: the sums of the groups, in float64.
        count: gives the coefficient of an upload in the mean.
        dtypes: the dtype of each tensor of the mean.

    Returns:
        The mean, by name; None if nothing counts.
    """
    summed = {client for group in sums for client in group}
    parts = {group[0]: found for group, found in sums.items() if found}
    whole = sorted(c for c in results if isinstance(c, int) and c not in summed)
    if whole:
        uploads, running = [results[c].upload for c in whole], RunningMean()
        running.add([u.weights for u in uploads], [count(u) for u in uploads])
        found = running.sums()
        parts |= {} if found is None else {whole[0]: found}
    total = sum(count(results[c].upload) for c in sorted((*summed, *whole)))
    for client in whole:
        results[client].upload = without_weights(results[client].upload)
    return mean_of_sums([parts[c] for c in sorted(parts)], total, dtypes) if parts else None


def without_weights(upload: Bundle) -> Bundle:
    """Return a copy of an upload without its weights."""
    tensors = upload.by_key()
    return Bundle.from_keys(
        {key: tensors[key].clone() for key in tensors if not key.startswith("weights/")}
    )
