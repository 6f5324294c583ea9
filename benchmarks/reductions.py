"""Robust rules on the server: time and memory against the same rule in plain NumPy.

    python -m benchmarks.reductions [--clients 50] [--parameters 11178562] [--attackers 10]

Uploads lie in the spool, in memory up to the budget in MiB, and mapped from disk beyond. NumPy
stacks them first, as every rule needs, and computes in float32 what the formulas say. Each way runs
in a process of its own; memory is the peak of anonymous memory beyond the uploads. The results of
both are compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Peak, parser_of, said_by, tell
from fedmodels.config.reduction import Reduction
from fedmodels.reductions.rule import rule_of
from fedmodels.tensors.aggregation_rule import Facts
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.packed_weights import PackedWeights, layout_of
from fedsrv.transport.spool import Spool

Array, FLOAT = NDArray[np.float32], torch.float32
TAKES_F = ("trimmed_mean", "krum", "multi_krum", "bulyan")
RULES = (
    "mean", "median", "trimmed_mean", "norm_clipped", "krum", "multi_krum", "bulyan",
    "geometric_median", "centered_clipping", "nearest, median", "bucketing, median",
)  # fmt: skip
"""Each may have what is done before it, and a comma, in front of it."""


def main() -> None:
    """Measure and print the table."""
    parser = parser_of("reductions", __doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=11_178_562, help="ResNet-18's")
    parser.add_argument("--attackers", type=int, default=0, help="f; as many as Bulyan takes")
    parser.add_argument("--budget", type=int, default=256, help="MiB of uploads in memory")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.attackers = options.attackers or max(1, (options.clients - 3) // 4)
    if options.alone:
        print(json.dumps(_alone(options)))
        return
    tell("reductions", [_row(rule, options) for rule in options.rules])


def _row(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compare both ways, each in a process of its own."""
    row: dict[str, Any] = {"rule": rule}
    sums = []
    for way in ("fedtide", "numpy"):
        sizes = [f"--{n}={getattr(options, n)}" for n in ("clients", "parameters", "attackers")]
        sizes += [f"--budget={options.budget}", "--rules", rule]
        found = said_by("benchmarks.reductions", f"--alone={way}", *sizes)
        row |= {f"{way}_s": found["s"], f"{way}_cpu_s": found["cpu_s"], f"{way}_mb": found["mb"]}
        sums.append(found["norm"])
    row |= {"ratio": row["fedtide_s"] / row["numpy_s"]}
    row |= {"cpu_ratio": row["fedtide_cpu_s"] / row["numpy_cpu_s"]}
    return row | {"differs_by": abs(sums[0] - sums[1]) / sums[1]}


def _alone(options: argparse.Namespace) -> dict[str, float]:
    """Return seconds, seconds of CPU, MB beyond the uploads, and the norm of the result."""
    (name,), f = options.rules, options.attackers
    mix, _, rule = name.rpartition(", ")
    draw, size = np.random.default_rng(0), options.parameters
    given = draw.standard_normal(size, np.float32)
    with tempfile.TemporaryDirectory() as place:
        spool, layout = Spool(Path(place), options.budget << 20), layout_of(((FLOAT, (size,)),))
        noise, sent = 0.1 * draw.standard_normal(size, np.float32), {}
        for client in range(options.clients):
            buffer = np.frombuffer(spool.allocate(layout.size), np.uint8)
            sent[client] = PackedWeights(("w",), layout, layout.clear(torch.from_numpy(buffer)))
            sent[client]["w"].numpy()[:] = given + np.roll(noise, 7919 * client)
        uploads = [each["w"].numpy() for each in sent.values()]
        keys = {"attackers": f if rule in TAKES_F or mix == "nearest" else None, "mix": mix or None}
        settings = Reduction(reduce=rule, **keys)  # type: ignore[arg-type]
        facts = Facts(0, 0, Bundle({"w": torch.from_numpy(given)}))
        counts = dict.fromkeys(sent, 1.0)
        work: dict[str, Callable[[], Any]] = {
            "fedtide": lambda: rule_of(settings).weights(sent, counts, facts)[0]["w"].numpy(),
            "numpy": lambda: in_numpy(np.stack(uploads), given, rule, mix, f),
        }
        little = {client: {"w": each["w"][:4096].clone()} for client, each in sent.items()}
        rule_of(settings).weights(little, counts, Facts())  # what a process does once
        with Peak() as peak:
            begun, cpu = time.perf_counter(), time.process_time()
            found = work[options.alone]()
            seconds = {"s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
    norm = float(np.linalg.norm(found.astype(np.float64)))
    return {**seconds, "mb": peak.mb, "norm": norm}


def in_numpy(x: Array, given: Array, rule: str, mix: str, f: int) -> Array:
    """Return what a rule makes of uploads (n, d), as its paper says it."""
    n = len(x)
    if mix == "nearest":
        order = np.argsort(_squared(x), axis=1)[:, : n - f]
        mixing = np.zeros((n, n), np.float32)
        np.put_along_axis(mixing, order, 1 / (n - f), axis=1)
        x = mixing @ x
    elif mix == "bucketing":
        order = np.random.default_rng(0).permutation(n)
        x = np.stack([x[order[i : i + 2]].mean(0) for i in range(0, n, 2)])
    match rule:
        case "mean":
            return x.mean(0)
        case "median":
            return np.median(x, axis=0)
        case "trimmed_mean":
            return np.sort(x, axis=0)[f : n - f].mean(0)
        case "krum" | "multi_krum":
            scores = np.sort(_squared(x), axis=1)[:, 1 : n - f - 1].sum(1)
            return x[np.argsort(scores)[: 1 if rule == "krum" else n - f]].mean(0)
        case "bulyan":
            return _bulyan(x, f)
    return given + _of_differences(x - given, rule)


def _of_differences(x: Array, rule: str) -> Array:
    """Return what a rule that begins at what was given makes of differences (n, d) from it."""
    if rule == "norm_clipped":
        return (_clip(np.linalg.norm(x, axis=1))[:, None] * x).mean(0)
    v = np.zeros_like(x[0])
    for _ in range(3):
        lengths = np.linalg.norm(x - v, axis=1)
        if rule == "centered_clipping":
            v = v + (_clip(lengths)[:, None] * (x - v)).mean(0)
        else:
            weights = 1 / np.maximum(lengths, 1e-6)
            v = (weights[:, None] * x).sum(0) / weights.sum()
    return v


def _clip(lengths: Array) -> Array:
    bound = np.sort(lengths)[(len(lengths) - 1) // 2]
    return np.minimum(1, bound / lengths)


def _squared(x: Array) -> Array:
    own = (x * x).sum(1)
    return np.maximum(own[:, None] + own - 2 * x @ x.T, 0)


def _bulyan(x: Array, f: int) -> Array:
    squared, left, chosen = _squared(x), list(range(len(x))), []
    while len(chosen) < len(x) - 2 * f:
        near = np.sort(squared[np.ix_(left, left)], axis=1)[:, 1 : max(2, len(left) - f - 1)]
        chosen.append(left.pop(int(near.sum(1).argmin())))
    kept = x[sorted(chosen)]
    far = np.abs(kept - np.median(kept, axis=0))
    nearest = np.argsort(far, axis=0)[: len(kept) - 2 * f]
    return np.take_along_axis(kept, nearest, axis=0).mean(0)


if __name__ == "__main__":
    main()
