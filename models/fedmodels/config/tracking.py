"""``[tracking]``: where else the numbers go."""

from __future__ import annotations

from fedmodels.config.bounds import StrictTable


class Tracking(StrictTable):
    """``[tracking]``: where else the numbers go."""

    tensorboard: bool = False
    """Write metrics to OUT/tensorboard as they come; needs the extra ``tensorboard``."""
    mlflow: bool = False
    """Log metrics to ``$MLFLOW_TRACKING_URI``, or OUT/mlflow.db; needs the extra ``mlflow``. A
    resumed run goes on in the same run of MLflow. A finished one leaves its page and the server's
    model there."""
    wandb: bool = False
    """Log metrics to Weights & Biases, as its environment says; needs the extra ``wandb``. A
    resumed run has the same id there. A finished one leaves its page and the server's model."""

    @property
    def is_on(self) -> bool:
        """Whether numbers go anywhere else."""
        return self.tensorboard or self.mlflow or self.wandb
