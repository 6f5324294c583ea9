"""Trackers of experiments (``[tracking]``) follow the scores of a run."""

from __future__ import annotations

from fedmodels.config.experiment import Experiment
from fedplugins.trackers.trackers import check_installed, track
from fedsrv.engine.server_part import ServerPart
from fedsrv.progress.events import Ending


class Trackers(ServerPart):
    """Hands scores to the trackers of the config as they come."""

    @classmethod
    def check(cls, experiment: Experiment, *, certified: bool) -> None:
        """Refuse a tracker that is not installed."""
        check_installed(experiment)

    def follows(self) -> Ending | None:
        """Begin, unless the run has ended before."""
        if self.store.ended() is not None:
            return None
        return track(self.events, self.experiment, self.store.path, self.store.run_id)
