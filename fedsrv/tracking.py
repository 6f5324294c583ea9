"""Metrics to TensorBoard as they come, for those who watch there (``[tracking] tensorboard``)."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedsrv.events import EventLog

MISSING = "[tracking] tensorboard = true needs TensorBoard: pip install 'fedtide[tensorboard]'"


def check_extras(experiment: Experiment) -> None:
    """Check that what the config asks for is installed.

    Raises:
        ConfigError: says how to install it.
    """
    wanted = experiment.tracking.tensorboard
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(MISSING)


def track(events: EventLog, directory: Path) -> Callable[[], None]:
    """Write every score to ``directory`` from a thread of its own; return what ends it.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ConfigError(MISSING) from None
    writer = tensorboard.SummaryWriter(str(directory))
    thread = threading.Thread(target=_write, args=(events, writer), name="tracking", daemon=True)
    thread.start()

    def end() -> None:
        events.close()
        thread.join()

    return end


def _write(events: EventLog, writer: Any) -> None:
    for event in events.listen(from_start=True):
        if event.kind == "scores":
            for name, value in event.detail["metrics"].items():
                writer.add_scalar(name, value, event.interaction)
    writer.close()
