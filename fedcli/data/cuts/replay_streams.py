"""pFedGRP's streams of replay scenarios (arXiv 2410.01502v2, section 4 and appendix).

Client i permutes the K classes by its own seed and pairs them up: ``pair_j = (c[2j], c[2j + 1])``,
j < K // 2; for odd K one class stays out. A *type* is ``width`` consecutive pairs on the ring of
pairs. Every class is cut into P parts; a part is used in one task only.
"""

from __future__ import annotations

import numpy as np

from fedcli.data.arrays import IntArray
from fedmodels.errors import ConfigError


def replay_stream_rounds(parts: int, width: int, pairs: int = 5) -> int:
    """Return R = pairs * 2 * floor(P / (2 w)), the tasks of the gradually changing stream.

    For 10 classes (5 pairs) and w = 1, 2, 3, 4 these are the paper's 150, 70, 50, 30 for P = 30 and
    120, 60, 40, 30 for P = 25.
    """
    return pairs * 2 * (parts // (2 * width))


def gradual_types(parts: int, width: int, pairs: int = 5) -> list[int]:
    """Return the type of each task: segment s alternates type s and type s + 1 on the ring.

    ``gradual_types(4, 1)`` is 0101 1212 2323 3434 4040.
    """
    length = 2 * (parts // (2 * width))
    return [(s + r % 2) % pairs for s in range(pairs) for r in range(length)]


def circulating_types(parts: int, order: IntArray) -> list[int]:
    """Return the type of each task: the types in this order, ``2 * floor(P / 2)`` times."""
    return [int(j) for _ in range(2 * (parts // 2)) for j in order]


def classes_of_type(permuted: IntArray, kind: int, width: int) -> list[int]:
    """Return the classes of a type: ``width`` consecutive pairs of the permuted classes.

    For 0 … 9 unpermuted and width 2 the types are 0123, 2345, 4567, 6789 and 8901.
    """
    pairs = len(permuted) // 2
    ring = permuted[: 2 * pairs].reshape(pairs, 2)
    return [int(c) for j in range(width) for c in ring[(kind + j) % pairs]]


def part_sizes(class_sizes: IntArray, parts: int, limit: int | None) -> IntArray:
    """Return the size of a part of each class, ``min(limit, floor(n_c / P))``.

    MNIST in 30 parts of at most 200: 197 200 198 200 194 180 197 200 195 198.
    """
    sizes = class_sizes // parts
    return sizes if limit is None else np.minimum(sizes, limit)


def cut_in_parts(
    labels: IntArray, num_classes: int, parts: int, limit: int | None, rng: np.random.Generator
) -> list[IntArray]:
    """Cut each class, shuffled, into parts of one size; return indices (P, size), by class."""
    sizes = part_sizes(np.bincount(labels, minlength=num_classes), parts, limit)
    cut = []
    for k, size in enumerate(sizes):
        members = rng.permutation(np.flatnonzero(labels == k))
        cut.append(members[: parts * size].reshape(parts, size).astype(np.int64))
    return cut


def replay_stream(
    types: list[int],
    width: int,
    permuted: IntArray,
    train_parts: list[IntArray],
    test_parts: list[IntArray],
) -> list[tuple[IntArray, IntArray]]:
    """Return the training and the test indices of each task of one client, by the tasks' types.

    A task takes the next unused part of every class of its type; the test part of the same number
    goes with it, so that test sets of different tasks are disjoint. Parts are indices (P, size), by
    class; the client has the classes in its own order (K,).

    Raises:
        ConfigError: a part has no training example, as P is larger than a class.
    """
    used = np.zeros(len(permuted), dtype=np.int64)
    stream = []
    for kind in types:
        classes = classes_of_type(permuted, kind, width)
        for c in classes:
            if train_parts[c].shape[1] == 0:
                raise ConfigError(
                    f"[scenario] parts = {len(train_parts[c])}, and class {c} has fewer training "
                    "examples: lower parts, or use more data"
                )
        train = np.concatenate([train_parts[c][used[c]] for c in classes])
        test = np.concatenate([test_parts[c][used[c]] for c in classes])
        used[classes] += 1
        stream.append((np.sort(train), np.sort(test)))
    return stream
