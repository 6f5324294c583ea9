"""What the clients of one interaction sent, as the server half of a method sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, NoReturn

from torch import Tensor

from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.weighted_mean import weighted_mean

Reduction = Literal["mean", "each"]
"""What a server half reads of its uploads' weights: their mean alone, or each upload's."""


class Uploads(Mapping[int, Bundle]):
    """The uploads by client, in client-id order, and the mean of their weights.

    Where the reduction is the mean, an upload's own weights cannot be read, whether they are still
    in memory or were added up as they came: a method that runs with small uploads runs with large
    ones too.
    """

    def __init__(
        self,
        sent: Mapping[int, Bundle],
        count: Callable[[Bundle], float],
        reduction: Reduction = "each",
        folded: Weights | None = None,
    ) -> None:
        """Take the uploads as they came.

        Args:
            sent: the uploads by client.
            count: gives what an upload's weights count in the mean.
            reduction: what may be read of their weights.
            folded: the mean, if it was taken as the uploads came; they hold no weights then.
        """
        self._sent, self._count, self._reduction, self._folded = sent, count, reduction, folded
        hides = reduction == "mean"
        self._seen = {c: _without_weights(u) for c, u in sent.items()} if hides else sent

    def __getitem__(self, client: int) -> Bundle:
        return self._seen[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def is_folded(self) -> bool:
        """Tell whether the mean was taken as the uploads came: nobody can be taken out of it."""
        return self._folded is not None

    def mean(self) -> Weights | None:
        """Return the weighted mean of the uploads' weights; None if nothing counts."""
        counts = [self._count(upload) for upload in self._sent.values()]
        if self._folded is not None or not sum(counts):
            return self._folded
        return weighted_mean([u.weights for u in self._sent.values()], counts, sum(counts))

    def of(self, clients: Mapping[int, object] | set[int]) -> Uploads:
        """Return the uploads of some of the clients; only where they were not folded."""
        assert self._folded is None, "nobody can be taken out of a folded mean"
        sent = {c: upload for c, upload in self._sent.items() if c in clients}
        return Uploads(sent, self._count, self._reduction)


class _Unread(Mapping[str, Tensor]):
    """Weights that the method said it does not read."""

    def __getitem__(self, name: str) -> Tensor:
        _refuse()

    def __iter__(self) -> Iterator[str]:
        _refuse()

    def __len__(self) -> int:
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(
        "the method's reduction is 'mean', but its server half reads the weights of single "
        "uploads: let it take uploads.mean(), or declare reduction = 'each'"
    )


def _without_weights(upload: Bundle) -> Bundle:
    return replace(upload, weights=_Unread())
