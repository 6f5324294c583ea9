"""The server's model as MLflow has models: a signature, and a class that answers by its own file.

Nothing is pickled: MLflow keeps the text of the class, and a file of weights as fedtide writes. Who
loads the model needs fedtide.
"""

from __future__ import annotations

import hashlib
import importlib
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedmodels.nets.trained import TrainedModel

TAG = "fedtide_model"
"""The tag of a run of MLflow that holds the sha256 of the model it has."""
CODE = '''"""Everybody's model of a run of fedtide: raw inputs to probabilities, or to targets."""

from pathlib import Path

import mlflow
from fedmodels.nets.trained import TrainedModel


class Model(mlflow.pyfunc.PythonModel):
    def load_context(self, context):
        self.model = TrainedModel.load(Path(context.artifacts["weights"]))

    def predict(self, context, model_input, params=None):
        of_classes = self.model.targets is None
        return (self.model.probabilities if of_classes else self.model.predict)(model_input)


mlflow.models.set_model(Model())
'''


def log_model(client: Any, uri: str, run: str, file: Path, registered: str) -> None:
    """Log the model in a file to a run of MLflow, once; register it if it is given a name."""
    mlflow = importlib.import_module("mlflow")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if client.get_run(run).data.tags.get(TAG) == f"{digest} {registered}":
        return
    mlflow.set_tracking_uri(uri)
    with TemporaryDirectory(prefix="fedtide-mlflow-") as place:
        code = Path(place) / "fedtide_model.py"
        code.write_text(CODE, encoding="utf-8")
        with mlflow.start_run(run_id=run):
            importlib.import_module("mlflow.pyfunc").log_model(
                name="model", python_model=str(code), artifacts={"weights": str(file)},
                signature=_signature(TrainedModel.load(file)),
                registered_model_name=registered or None,
                pip_requirements=[f"fedtide=={version('fedtide')}"],
            )  # fmt: skip
    client.set_tag(run, TAG, f"{digest} {registered}")


def _signature(model: TrainedModel) -> Any:
    """Return what the model takes and answers: raw inputs (n, *shape), and numbers (n, K)."""
    schema = importlib.import_module("mlflow.types.schema")
    models = importlib.import_module("mlflow.models")
    kind = np.dtype(np.float64 if model.facts.is_wide else np.float32)
    sides = (
        (kind, (-1, *model.facts.input_shape)),
        (np.dtype(np.float32), (-1, len(model.class_names))),
    )
    taken, told = (schema.Schema([schema.TensorSpec(*side)]) for side in sides)
    return models.ModelSignature(inputs=taken, outputs=told)
