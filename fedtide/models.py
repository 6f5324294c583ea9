"""Trained models: nets with their normalisation and the names of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmodels.nets.trained import ModelFacts, TrainedModel

__all__ = ["ModelFacts", "TrainedModel", "predict"]


def predict(
    inputs: str | Path | Sequence[str | Path],
    *,
    run: str | Path | None = None,
    client: int | None = None,
    model: str | Path | None = None,
    keep: str | Sequence[str] = (),
    unknown: float = 0.0,
) -> list[dict[str, Any]]:
    """Answer a table, a photo, an array or a folder, as ``fedcli predict`` does.

    Args:
        inputs: a file or a directory, or several.
        run: the run directory, or a client's state directory.
        client: the client whose model answers.
        model: in place of both, a model's file.
        keep: a column of tables that passes through, such as an id, or several.
        unknown: an input whose most probable class has less, or which is far from the training
            data, is called unknown.

    Returns:
        A row for each input, and for each row of a table that makes none: ``input``, ``from`` and
        ``to`` (its lines), the columns kept, ``class``, ``probability``, ``probabilities`` by class
        and ``note``. Of a model that learns numbers it has ``values`` by name in place of the
        class, of labels ``labels`` and their ``probabilities``. A row without an answer has None in
        place of the class, and a note.

    Raises:
        ConfigError: it is not said whose model it is, a column to keep has the name of another one
            of the answers, or ``unknown`` is no share.
        DataError: a file cannot be read or does not fit the model.
    """
    from fedcli.predicting.prediction import personal_file, predictions
    from fedcli.predicting.whose import whose_model

    whose = whose_model(
        None if run is None else Path(run), client, None if model is None else Path(model)
    )
    file = whose if isinstance(whose, Path) else personal_file(*whose)
    paths = [Path(p) for p in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    keep = [keep] if isinstance(keep, str) else keep
    found = predictions(TrainedModel.load(file), file, paths, keep, unknown)
    return [answer for one in found for answer in one.answers(keep)]
