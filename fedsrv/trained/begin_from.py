"""A new run that begins with the models of another one: ``[net] begin_from``.

The weights of the other run's newest state become a file in that run's directory, which is the new
run's ``[net] weights``. Its header says of which run, interaction and classes they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, ConfigError, FedtideError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import make
from fedmodels.tensors.archive import load, load_named, save
from fedmodels.tensors.bundle import Bundle, Weights, state_digest
from fedmodels.training.asked import global_weights
from fedsrv.state.run_record import read_run
from fedsrv.state.state_files import state_path
from fedsrv.state.stated import newest_state

FILE = "begin-{}.safetensors"
"""The file of weights in the directory of the run that they are of."""
KEY = "begin"
"""Key of the header of a file of weights that another run gave."""


def begun(experiment: Experiment, out: Path) -> Experiment:
    """Return an experiment whose initial weights are those that it is to begin from.

    A run that is resumed keeps the weights that it began with.

    Raises:
        ConfigError: no weights can be taken from there.
    """
    net = experiment.net
    if net.begin_from is None:
        return experiment
    if net.weights is not None and not Path(net.weights).match(FILE.format("*")):
        raise ConfigError("[net] begin_from gives the weights: leave [net] weights out")
    kept = _kept(out)
    place = kept or net.weights or str(_written(Path(net.begin_from)))
    moved = Path(net.begin_from) / Path(place).name
    if kept is not None and Path(kept).is_file() and not moved.is_file():
        raise ConfigError(
            f"[net] begin_from = {net.begin_from!r}, but {out} started with {place}: a run "
            "keeps its initial weights; restore begin_from, or start a new run"
        )
    if not Path(place).is_file() and moved.is_file():
        place = str(moved)  # the digest in the run's config says whether it is the same one
    return experiment.model_copy(update={"net": net.model_copy(update={"weights": place})})


def beginning_of(experiment: Experiment) -> dict[str, Any]:
    """Return of which run, interaction and classes the initial weights are."""
    assert experiment.net.weights is not None, "the run starts from another one"
    try:
        return dict(load(experiment.net.weights)[1][KEY])
    except (ArchiveError, KeyError, TypeError) as error:
        raise ConfigError(f"[net] begin_from: {error}") from None


def _kept(out: Path) -> str | None:
    """Return the file of weights that the run in a directory began with, if it did."""
    try:
        config = (out / "config.toml").read_text("utf-8")
        net = parse_experiment(config, str(out / "config.toml")).net
    except (OSError, UnicodeDecodeError, FedtideError):
        return None
    return net.weights if net.begin_from is not None else None


def _written(run: Path) -> Path:
    """Write the weights of a run's newest state to a file beside it, and return the file."""
    try:
        interaction = newest_state(run)
        record = read_run(run)
        table = experiment_of(record.config, str(run / "config.toml")).method
        method = make(table.name, **table.hyper_parameters())
        bundles, header = load_named(state_path(run / "server", interaction))
        weights = _shared(global_weights(method, bundles.get("common", Bundle())))
        if not weights:
            raise ConfigError(
                f"[net] begin_from: clients of {table.name} in {run} share no weights: name a file "
                "of one client's ([net] weights, fedsrv export --client)"
            )
        said = {
            "run": str(header["run"]),
            "interaction": interaction,
            "sha256": state_digest([("", Bundle(weights))]),
            "classes": _classes(run),
        }
        place = run / FILE.format(f"{interaction:08d}")
        save(place, Bundle(weights), {KEY: said}, fsync=True)
    except (ArchiveError, KeyError, ValueError) as error:
        raise ConfigError(f"[net] begin_from: {error}") from None
    return place


def _shared(weights: Weights) -> Weights:
    """Return the weights of the net alone."""
    return {k: t for k, t in weights.items() if k.startswith(("base/", "head/"))}


def _classes(run: Path) -> list[str]:
    """Return the names of a run's classes in label order; none where nobody named them."""
    try:
        return [str(name) for name in json.loads((run / "data.json").read_text("utf-8"))["classes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
