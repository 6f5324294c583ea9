"""``[tracking]`` of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from fedmodels.config.bounds import StrictTable
from fedmodels.config.part import keys_of

if TYPE_CHECKING:
    from fedmodels.config.experiment import Experiment


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
    name: Annotated[str, Field(max_length=100)] = ""
    """What MLflow and Weights & Biases call the run; by default as its directory is called."""
    clients: bool = False
    """Tell TensorBoard and MLflow each client's loss and accuracies, too, once the run ends or
    stops."""
    model: Annotated[str, Field(pattern=r"^[\w .-]{0,100}$")] = ""
    """The name under which a finished run registers the server's model at MLflow, a version each
    time; by default the model is logged and not registered."""

    @model_validator(mode="after")
    def _check_wanted(self) -> Tracking:
        if self.name and not (self.mlflow or self.wandb):
            raise ValueError("name is for mlflow = true or wandb = true")
        if self.clients and not (self.mlflow or self.tensorboard):
            raise ValueError("clients is for mlflow = true or tensorboard = true")
        if self.model and not self.mlflow:
            raise ValueError("model is for mlflow = true")
        return self

    @property
    def is_on(self) -> bool:
        """Whether numbers go anywhere else."""
        return self.tensorboard or self.mlflow or self.wandb


def tracking_of(experiment: Experiment) -> Tracking:
    """Return the table of a config."""
    table: Tracking = keys_of(experiment, "tracking")
    return table
