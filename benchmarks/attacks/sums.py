"""What many honest sums of secure aggregation tell of single clients: least squares.

    python -m benchmarks.attacks.sums [--rounds 20 60] [--keep]

Ten clients learn handwritten digits by federated averaging of a softmax regression; each has two
classes. The coordinator keeps to the protocol. All that it has of a round is who took part, how
many examples each upload counts, and the sum of the uploads of each group. It looks for the upload
u_c of each client that explains all sums best,

    min_u  sum_t | s_t - sum_{c in S_t} n_c u_c |^2,

the solution of least norm where there are several. ``cosine`` is the mean cosine of u_c and the
mean of what client c really uploaded. Told apart: the client whose mean upload is nearest to u_c,
over all clients, is c. Classes read: the two classes that u_c raises most are those of the client.
Where the sums do not tell the members of a group from one another, as many as groups are told
apart, by their order.

Forms of a run:

- drawn: 6 of 10 clients in each round.
- drop-outs: all clients, of which each misses 5 % of the rounds; the sum is of those that came.
- fixed groups: two groups of five that open whole or not, with the same drop-outs.
- tasks of other sizes: fixed groups of five without drop-outs; ten tasks in turn, in each of which
  a client has between a tenth and all of its examples, so that the weights of a sum change.
- a new task: a fixed group of an open run, in which one client after the other gets new data, of
  two other classes, every few rounds. The attack subtracts the sums before and after.
- noise of clients: as drawn, where each bounds its upload to the norm 1 and adds its share of noise
  of the multiplier that is named.

Lost: the share of a group's rounds in which a client of it is missing, if each misses 2 % of the
rounds, counted over rounds by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from benchmarks.measure import parser_of, tell
from benchmarks.measured import given_as, keep

Array = NDArray[np.float64]
CLIENTS, CLASSES = 10, 10
TITLE, LOST = "Uploads out of sums", "Rounds that fixed groups lose"
EPOCHS, BATCH, RATE = 2, 16, 0.05


@dataclass(frozen=True)
class Sum:
    """A sum that a coordinator opens."""

    weights: Array
    """How many examples each client counts in it, (10,); 0 for who is not in it."""
    total: Array
    """The sum of the uploads by these weights, (10 * 65,)."""


@dataclass
class Told:
    """What a run told, and what it should not."""

    sums: list[Sum]
    uploads: list[list[Array]]
    """Of each client, all that it uploaded."""

    @property
    def means(self) -> Array:
        """The mean upload of each client, (10, 10 * 65)."""
        return np.stack([np.mean(each, axis=0) for each in self.uploads])


def main() -> None:
    """Print the tables, and keep them as a record where that is asked for."""
    parser = parser_of("attacks.sums", __doc__, "sums")
    parser.add_argument("--rounds", type=int, nargs="+", default=[20, 60])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = [row for rounds in options.rounds for row in attacked(rounds, options.seeds)]
    lost = [lost_rounds(size) for size in (4, 8)]
    tell(TITLE, rows)
    tell(LOST, lost)
    if options.keep:
        keep(options.keep, given_as("attacks.sums"), {TITLE: rows, LOST: lost})


def attacked(rounds: int, seeds: int = 1) -> list[dict[str, Any]]:
    """Return what the attack comes to against each form, over seeds."""
    everybody = range(CLIENTS)

    def drawn(rng: np.random.Generator) -> list[list[int]]:
        return [sorted(rng.choice(CLIENTS, 6, replace=False).tolist())]

    def dropping(rng: np.random.Generator) -> list[list[int]]:
        return [[c for c in everybody if rng.random() >= 0.05]]

    def fixed(rng: np.random.Generator) -> list[list[int]]:
        (there,) = dropping(rng)
        groups = [[*range(place, CLIENTS, 2)] for place in range(2)]
        return [group for group in groups if {*group} <= {*there}]

    def whole(rng: np.random.Generator) -> list[list[int]]:
        return [[*range(place, CLIENTS, 2)] for place in range(2)]

    def of_sizes(client: int, round: int) -> float:
        task = round * 10 // rounds
        return float(np.random.default_rng((client, task)).uniform(0.1, 1.0))

    forms: dict[str, Callable[[int], Told]] = {
        "drawn, 6 of 10": lambda seed: played(drawn, rounds, seed),
        "drop-outs of 5 %": lambda seed: played(dropping, rounds, seed),
        "fixed groups of 5": lambda seed: played(fixed, rounds, seed),
        "fixed groups of 5, tasks of other sizes": lambda seed: played(
            whole, rounds, seed, share=of_sizes
        ),
        "drawn, noise of clients × 0.3": lambda seed: played(drawn, rounds, seed, noise=0.3),
        "drawn, noise of clients × 1": lambda seed: played(drawn, rounds, seed, noise=1.0),
    }
    return [
        {"what": name, "sums": rounds} | _judged([play(seed) for seed in range(seeds)])
        for name, play in forms.items()
    ] + [{"what": "fixed group, new tasks", "sums": rounds} | _new_tasks(rounds, seeds)]


def least_squares(sums: Sequence[Sum]) -> Array:
    """Return the uploads of least norm that explain sums best, (10, 10 * 65)."""
    weights = np.stack([one.weights for one in sums])
    totals = np.stack([one.total for one in sums])
    scale = weights.max()
    return np.linalg.lstsq(weights / scale, totals / scale, rcond=1e-9)[0]


def cosines(found: Array, true: Array) -> Array:
    """Return the cosine of each row with each row of another array; 0 for rows of zeros."""
    norms = np.linalg.norm(found, axis=1)[:, None] * np.linalg.norm(true, axis=1)[None]
    return np.divide(found @ true.T, norms, out=np.zeros_like(norms), where=norms > 0)


def _judged(told: Sequence[Told]) -> dict[str, Any]:
    rows = []
    for one in told:
        found = least_squares(one.sums)
        likeness = cosines(found, one.means)
        apart = int((likeness.argmax(axis=1) == np.arange(CLIENTS)).sum())
        read = sum({*raised(u)} == {*classes_of(c)} for c, u in enumerate(found))
        rows.append((float(np.diag(likeness).mean()), apart, read))
    cosine, apart, read = np.mean(rows, axis=0)
    return {"cosine": round(float(cosine), 3), "apart": float(apart), "read": float(read)}


# --- a run ----------------------------------------------------------------------------------------


def played(
    groups_of: Callable[[np.random.Generator], list[list[int]]],
    rounds: int,
    seed: int,
    noise: float = 0.0,
    tasks: Callable[[int, int], int] = lambda client, round: 0,
    share: Callable[[int, int], float] = lambda client, round: 1.0,
) -> Told:
    """Learn for some rounds, and return what was told.

    Args:
        groups_of: draws the groups whose sums a round opens.
        rounds: how many.
        seed: of everything that is drawn.
        noise: the multiplier of the noise of clients, which bound uploads to the norm 1 then.
        tasks: the task of a client in a round.
        share: the part of its examples that it has in a round.
    """
    rng, told = np.random.default_rng(seed), Told([], [[] for _ in range(CLIENTS)])
    model = np.zeros((CLASSES, 65))
    for round in range(rounds):
        groups, changes, counts = groups_of(rng), np.zeros_like(model), 0.0
        for group in groups:
            weights, total = np.zeros(CLIENTS), np.zeros(model.size)
            for client in group:
                x, y = examples_of(client, tasks(client, round))
                some = np.random.default_rng(client).permutation(len(x))
                some = some[: int(np.ceil(share(client, round) * len(x)))]
                x, y = x[some], y[some]
                upload = (trained(model, x, y, rng) - model).ravel()
                told.uploads[client].append(upload)
                weights[client] = 1.0 if noise else len(x)
                total += weights[client] * hidden(upload, noise, len(group), rng)
            told.sums.append(Sum(weights, total))
            changes, counts = changes + total.reshape(model.shape), counts + weights.sum()
        if counts:
            model = model + changes / counts
    return told


def hidden(upload: Array, noise: float, company: int, rng: np.random.Generator) -> Array:
    """Return an upload with its client's share of the noise; as it is where there is none."""
    if not noise:
        return upload
    bounded = upload * min(1.0, 1.0 / float(np.linalg.norm(upload)))
    return bounded + rng.normal(0.0, noise / np.sqrt(company), upload.shape)


def trained(model: Array, x: Array, y: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """Return a softmax regression (10, 65) after local training on (n, 65) and (n,)."""
    w = model.copy()
    for _ in range(EPOCHS):
        order = rng.permutation(len(x))
        for begin in range(0, len(x), BATCH):
            some = order[begin : begin + BATCH]
            logits = x[some] @ w.T
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            p[np.arange(len(some)), y[some]] -= 1.0
            w -= RATE * p.T @ x[some] / len(some)
    return w


def classes_of(client: int, task: int = 0) -> tuple[int, int]:
    """Return the two classes of a client's task."""
    first = (client + 4 * task) % CLASSES
    return first, (first + 1) % CLASSES


def raised(upload: Array) -> list[int]:
    """Return the two classes whose scores an upload raises most, on the mean image."""
    scores = upload.reshape(CLASSES, 65) @ _X.mean(axis=0)
    return np.argsort(-scores)[:2].tolist()


def examples_of(client: int, task: int = 0) -> tuple[Array, NDArray[np.int64]]:
    """Return half of the images (n, 65) of a client's two classes, with a one for the bias."""
    first, second = classes_of(client, task)
    places = np.concatenate([np.flatnonzero(first == _Y)[::2], np.flatnonzero(second == _Y)[1::2]])
    return _X[places], _Y[places]


_IMAGES, _Y = load_digits(return_X_y=True)
_X: Array = np.hstack([_IMAGES / 16.0, np.ones((len(_IMAGES), 1))])


# --- a fixed group whose clients get new tasks, and lost rounds -----------------------------------


def _new_tasks(rounds: int, seeds: int) -> dict[str, Any]:
    """Subtract the sum before a client's new task from the one after it.

    The cosine is with what the client's upload changed by; told apart and read are of the change.
    """
    every, group = max(2, rounds // CLIENTS), [[*range(CLIENTS)]]
    rows = []
    for seed in range(seeds):
        told = played(lambda _: group, rounds, seed, tasks=lambda c, r: int(r >= every * (c + 1)))
        found, true, read = [], [], 0
        for client in range(CLIENTS):
            if (at := every * (client + 1)) >= rounds:
                continue
            change = told.sums[at].total - told.sums[at - 1].total
            before, after = told.uploads[client][at - 1 : at + 1]
            sizes = [len(examples_of(client, task)[0]) for task in (0, 1)]
            found.append(change)
            true.append(sizes[1] * after - sizes[0] * before)
            read += {*raised(change)} == {*classes_of(client, 1)}
        likeness = cosines(np.stack(found), np.stack(true))
        apart = (likeness.argmax(axis=1) == np.arange(len(found))).mean() * CLIENTS
        rows.append((np.diag(likeness).mean(), apart, read / len(found) * CLIENTS))
    cosine, apart, share = np.mean(rows, axis=0)
    return {"cosine": round(float(cosine), 3), "apart": float(apart), "read": float(share)}


def lost_rounds(size: int, missing: float = 0.02, rounds: int = 100_000) -> dict[str, Any]:
    """Return the share of rounds that a fixed group loses to drop-outs, in percent."""
    there = np.random.default_rng(size).random((rounds, size)) >= missing
    return {
        "what": f"a group of {size}",
        "lost": round(100 * float((~there.all(axis=1)).mean()), 1),
    }


if __name__ == "__main__":
    main()
