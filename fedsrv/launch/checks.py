"""What a launch checks before it writes or starts anything."""

from __future__ import annotations

from pathlib import Path

from fedmodels.config.experiment import Experiment, forbidden_changes
from fedmodels.config.places import check_device
from fedmodels.errors import ConfigError
from fedmodels.resolution import parse_experiment
from fedsrv.engine.buffered_rounds import check_schedule
from fedsrv.engine.server_data import check_given
from fedsrv.launch.given_data import check_given_data
from fedsrv.state.run_directory import another_config
from fedsrv.tracking.trackers import check_extras


def check_start(experiment: Experiment, data: Path | None, held: Path, device: str) -> None:
    """Check what can be known before anything starts.

    Raises:
        FedtideError: the first thing that is wrong.
    """
    check_device(device)
    check_extras(experiment)
    check_schedule(experiment)
    check_given_data(experiment, data)
    asked = experiment.data is not None and experiment.data.server_examples is not None
    check_given(experiment, (data is None and asked) or held.is_dir())
    if experiment.evaluate.reference:  # fail before the run, not after it
        from fedsrv.engine.summary import iaa_series

        iaa_series(Path(experiment.evaluate.reference))


def check_resumed(experiment: Experiment, config: Path) -> None:
    """Check that a resumed run has its config, before data are dealt out for another one.

    Raises:
        ConfigError: names the keys that differ.
    """
    try:
        before = parse_experiment(config.read_text("utf-8"), str(config))
    except (OSError, UnicodeDecodeError, ConfigError):
        return  # the coordinator has the config in its database, and looks again
    changed = [key for key in forbidden_changes(before, experiment) if "sha256" not in key]
    if changed:
        raise another_config(config.parent, changed)
