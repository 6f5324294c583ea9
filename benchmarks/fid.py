"""How good the images are that clients of a finished run replay: Fréchet distances, own features.

    python -m benchmarks.fid RUN [RUN …] [--images 200] [--keep]

The features are the embeddings of the small CNN trained on all clients' real images together, not
Inception's: compare runs on the same data with each other, not with a paper. One distance for each
client, of what its generators draw together from its real images; the table has the mean. Classes
have the shares that they have in the real images, so that one generator for all classes compares.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.measure import parser_of, tell
from benchmarks.measured import keep
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.stream import TaskStream
from fedmodels.errors import DataError
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import make
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, embeddings
from fedmodels.numerics.randomness import seeded
from fedmodels.techniques.class_replay import Replay
from fedmodels.techniques.generators import Painter
from fedmodels.tensors.archive import load
from fedmodels.training.run import RunFacts

EPOCHS, BATCH = 8, 64


def main() -> None:
    """Print the mean distance of every run."""
    parser = parser_of("fid", __doc__, "fid")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--images", type=int, default=200, help="drawn for each class")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [distance(run, options.images) for run in options.runs]
    tell("fid", rows)
    if options.keep:
        runs = "RUN …" if len(rows) > 1 else "RUN"
        said = "Fréchet distance of replayed images from real ones, mean over clients"
        keep(options.keep, f"python -m benchmarks.fid {runs} --keep", {said: rows})


def distance(path: Path, count: int) -> dict[str, Any]:
    """Return the mean distance over clients, whose generators draw so many images for a class."""
    experiment = experiment_of(tomllib.loads((path / "config.toml").read_text()))
    real = {c: _data(path, c) for c in range(experiment.schedule.clients or 0)}
    every_x, every_y = (torch.cat(parts) for parts in zip(*real.values(), strict=True))
    net = feature_net(experiment.seed, every_x, every_y)
    found: list[float] = []
    generators = 0
    for client, (x, y) in real.items():
        newest = max((path / "clients" / str(client)).glob("state-*.safetensors"))
        state = load(newest)[0]
        problem = open_data(path / "data", client).problem
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        replay = getattr(method, "replay", None)
        assert isinstance(replay, Replay), f"{path}: its clients replay nothing"
        family = replay.of(RunFacts(experiment, problem)).family
        total = count * len(y.unique())
        drawn = []
        for key, generator in state.generators.items():
            share = 1.0 if key == "all" else float((y == int(key)).float().mean())
            drawn.append(Painter(family, generator.tensors).inputs(round(total * share), client))
        generators += len(drawn)
        features = [embeddings(net, part).numpy() for part in (x, torch.cat(drawn))]
        found.append(fid(*features))
    return {"run": path.name, "generators": generators, "fid": fmean(found)}


def _data(path: Path, client: int) -> tuple[Tensor, Tensor]:
    """Return all training data of a client."""
    data = open_data(path / "data", client)
    stream = TaskStream(data, keep_history=True)
    stream.open(data.num_tasks - 1)
    return stream.train_up_to(data.num_tasks - 1)


def feature_net(seed: int, x: Tensor, y: Tensor) -> SplitNet:
    """Train the small CNN that judges images, on inputs (n, C, H, W) and labels (n,)."""
    with seeded(seed):
        net = make_net("digits-cnn", num_classes=int(y.max()) + 1, input_shape=tuple(x.shape[1:]))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(EPOCHS):
            for index in torch.randperm(len(y)).split(BATCH):
                loss = cross_entropy(net(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return net


# --- the distance, over features ----------------------------------------------------------------


def fid(real: Tensor | ArrayLike, fake: Tensor | ArrayLike) -> float:
    """Return the Fréchet distance of two sets of features, each taken as a Gaussian.

    Heusel et al., GANs Trained by a Two Time-Scale Update Rule, NeurIPS 2017, equation 6. Use at
    least ten times as many rows as columns.

    Args:
        real: (n, d).
        fake: (m, d).
    """
    r, f = (_features(x) for x in (real, fake))
    if min(len(r), len(f)) < 2 or r.shape[1:] != f.shape[1:]:
        raise DataError("FID needs two sets of at least two features of one width")
    return frechet_distance(r.mean(0), np.cov(r.T), f.mean(0), np.cov(f.T))


def frechet_distance(mu1: ArrayLike, cov1: ArrayLike, mu2: ArrayLike, cov2: ArrayLike) -> float:
    """Return ‖μ1−μ2‖² + Tr(Σ1 + Σ2 − 2(Σ1^½ Σ2 Σ1^½)^½), by symmetric eigenvalues.

    Means are (d,), covariances (d, d).
    """
    s1, s2 = (np.atleast_2d(np.asarray(c, dtype=np.float64)) for c in (cov1, cov2))
    apart = np.atleast_1d(np.subtract(mu1, mu2, dtype=np.float64))
    values, vectors = np.linalg.eigh(s1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ s2 @ root)
    distance = apart @ apart + np.trace(s1) + np.trace(s2) - 2 * np.sqrt(cross.clip(0)).sum()
    return max(float(distance), 0.0)


def _features(features: Tensor | ArrayLike) -> NDArray[np.float64]:
    """Return features as float64 rows."""
    if isinstance(features, Tensor):
        features = features.detach().cpu().numpy()
    return np.asarray(features, dtype=np.float64)


if __name__ == "__main__":
    main()
