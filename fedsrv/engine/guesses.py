"""What an accuracy is without a model: one guesses, or always answers the most frequent class."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedsrv.engine.client_profile import Profile


def accuracy_of_guesses(profiles: Iterable[Profile]) -> dict[str, float]:
    """Return the accuracy of answers that look at no example; none where nobody has test data.

    Returns:
        ``chance``: every class equally often. ``own``: each client answers what is most frequent
        among its training examples; mean over clients on their own test data, as ``a_loc``.
        ``all``: all answer what is most frequent among everyone's, as ``a_glo``. Of classes that
        are equally frequent, the first one.
    """
    tested = [p for p in profiles if p.test.any()]
    if not tested:
        return {}
    trained = np.array([p.train.sum(0) for p in tested])  # (clients, K)
    test = np.array([p.test.sum(0) for p in tested])
    shares = test / test.sum(1, keepdims=True)
    own = shares[np.arange(len(tested)), trained.argmax(1)]
    of_all = shares[:, trained.sum(0).argmax()]
    return {"chance": 1 / test.shape[1], "own": float(own.mean()), "all": float(of_all.mean())}
