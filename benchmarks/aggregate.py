"""The reduction on the server: time and memory against what one would write with a library.

    python -m benchmarks.aggregate [--clients 2 10 50] [--parameters 11178562] [--budget 256]

The weighted mean runs over uploads as they lie in the spool (in memory up to the budget in MiB,
mapped from disk beyond), against numpy's mean over stacked uploads and a running sum in torch.
Memory is the peak of anonymous memory beyond the uploads themselves, each way in a process of its
own. K-means is FedAli's, per block, against scikit-learn and against comparing with neighbours.
The search for personal weights has a benchmark of its own, ``benchmarks.aggregation_weights``.
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
from torch import Tensor

from benchmarks.measure import Peak, in_turn, parser_of, said_by, tell
from fedmodels.numerics.clustering import cluster
from fedmodels.numerics.neighbour_clustering import cluster_near
from fedmodels.tensors.packed_weights import PackedWeights, layout_of
from fedmodels.tensors.weighted_mean import weighted_mean
from fedsrv.transport.spool import Spool

WAYS = ("fedtide", "torch", "numpy")
REPEATS = 3


def main() -> None:
    """Measure and print both tables."""
    parser = parser_of("aggregate", __doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10, 50])
    parser.add_argument("--parameters", type=int, default=11_178_562, help="ResNet-18's")
    parser.add_argument("--budget", type=int, default=256, help="MiB of uploads in memory")
    parser.add_argument("--prototypes", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        way, *sizes = options.alone
        print(json.dumps(_mean_alone(way, *map(int, sizes))))
        return
    tell("weighted_mean", [_mean_row(n, options) for n in options.clients])
    tell("kmeans", [_kmeans_row(g) for g in options.prototypes])


def _mean_row(clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the three ways, each in a process of its own."""
    row: dict[str, Any] = {"clients": clients}
    for way in WAYS:
        sizes = (clients, options.parameters, options.budget)
        seconds, peak = said_by("benchmarks.aggregate", "--alone", way, *sizes)
        row |= {f"{way}_s": seconds, f"{way}_mb": peak}
    return row | {"ratio": row["fedtide_s"] / row["torch_s"]}


def _mean_alone(way: str, clients: int, parameters: int, budget_mib: int) -> tuple[float, float]:
    """Return (median seconds, MB of anonymous memory at the peak beyond the uploads)."""
    shares = [1 / clients] * clients
    with tempfile.TemporaryDirectory() as place:
        spool = Spool(Path(place), budget_mib << 20)
        layout, blocks = layout_of(((torch.float32, (parameters,)),)), []
        for i in range(clients):
            buffer = np.frombuffer(spool.allocate(layout.size), np.uint8)
            buffer.view(np.float32)[:] = np.float32(i)
            blocks.append(PackedWeights(("w",), layout, torch.from_numpy(buffer)))
        uploads = [block["w"] for block in blocks]
        work: dict[str, Callable[[], object]] = {
            "fedtide": lambda: weighted_mean(blocks, shares),
            "torch": lambda: running_sum(uploads, shares),
            "numpy": lambda: np.average(np.stack([u.numpy() for u in uploads]), 0, shares),
        }
        with Peak() as peak:
            seconds = in_turn({way: work[way]}, REPEATS)[way]
    return seconds, peak.mb


def running_sum(uploads: list[Tensor], shares: list[float], device: str = "cpu") -> Tensor:
    """Return the weighted sum, as one would write it with torch; on the device of that name."""
    total = torch.zeros(len(uploads[0]), dtype=torch.float64, device=device)
    for upload, share in zip(uploads, shares, strict=True):
        total.add_(upload.to(device), alpha=share)
    return total.float().cpu()


def _kmeans_row(prototypes: int) -> dict[str, Any]:
    """Compare three ways to cluster ten clients' prototypes of one block, width 192."""
    from sklearn.cluster import KMeans

    draw = torch.Generator().manual_seed(0)
    first = torch.randn(prototypes, 192, generator=draw)
    clients = [first + 0.5 * torch.randn(prototypes, 192, generator=draw) for _ in range(10)]
    points, init = torch.cat(clients), torch.stack(clients).mean(0)
    row: dict[str, Any] = {"prototypes": prototypes, "points": len(points)}
    begun = time.perf_counter()
    exact = cluster(points, init)
    row["lloyd_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    peer = KMeans(prototypes, init=init.numpy(), n_init=1, max_iter=300).fit(points.numpy())
    row["sklearn"] = (time.perf_counter() - begun) / row["lloyd_s"]
    begun = time.perf_counter()
    near = cluster_near(clients, init)
    row["neighbours"] = (time.perf_counter() - begun) / row["lloyd_s"]
    fits = [_fit(points, centres) for centres in (exact[0], near[0])]
    row["sklearn_fit"] = float(peer.inertia_) / fits[0]
    row["neighbours_fit"] = fits[1] / fits[0]
    return row


def _fit(points: Tensor, centres: Tensor) -> float:
    """Return the sum of squared distances to the nearest centre."""
    parts = [torch.cdist(part, centres).amin(1).square().sum() for part in points.split(1024)]
    return float(torch.stack(parts).sum())


if __name__ == "__main__":
    main()
