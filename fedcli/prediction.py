"""Predictions of a client's trained model for new inputs: images, or arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcli.data.arrays import read_array
from fedcli.data.pictures import read_image
from fedcli.runtime.state import PERSONAL
from fedmodels.config.transforms import ImageTransform, parsed
from fedmodels.errors import DataError
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedmodels.printable import printable


@dataclass(frozen=True)
class Prediction:
    """The model's prediction for one input."""

    source: str
    """The file, and the place in it where it holds several."""
    classes: tuple[tuple[str, float], ...]
    """Names of classes with their probabilities, the most probable first."""

    def __str__(self) -> str:
        """Return one line."""
        found = "  ".join(f"{printable(name)} {share:.3f}" for name, share in self.classes)
        return f"{self.source}: {found}"


def personal_file(run: Path, client: int) -> Path:
    """Return a client's model under a run directory, or under the client's own state directory.

    Raises:
        DataError: there is none.
    """
    for place in (run / "clients" / str(client), run / str(client)):
        if (place / PERSONAL).is_file():
            return place / PERSONAL
    if not run.is_dir():
        raise DataError(f"--run {run} is no directory")
    raise DataError(
        f"{run} holds no model of client {client}: a client stores its model when the run ends, "
        "in RUN/clients of fedsrv launch or in its own --state-dir; give one of them as --run"
    )


def predictions(model: TrainedModel, inputs: list[Path], top: int = 3) -> list[Prediction]:
    """Return the model's predictions for every example of some files.

    Args:
        model: the trained model.
        inputs: images, or ``.npy`` files of one example or several.
        top: how many classes to name.

    Raises:
        DataError: a file cannot be read, does not fit the model or is beyond it; names it.
    """
    found = list[Prediction]()
    for path in inputs:
        x = read_input(path, model.facts)
        for place, shares in enumerate(model.probabilities(x)):
            if not np.isfinite(shares).all():
                raise DataError(f"{path} holds values so large that the model's outputs are none")
            order = np.argsort(-shares, kind="stable")[:top]
            classes = tuple((model.class_names[k], float(shares[k])) for k in order)
            found.append(Prediction(str(path) if len(x) == 1 else f"{path}[{place}]", classes))
    return found


def image_transform(facts: ModelFacts, where: object) -> ImageTransform:
    """Return how the images were read that a model was trained on, as far as its file says.

    Raises:
        DataError: the file states a transform that is malformed.
    """
    found = parsed(facts.transform, where)
    if isinstance(found, ImageTransform):
        return found
    return ImageTransform(channels="grey" if facts.input_shape[0] == 1 else "rgb")


def read_input(path: Path, facts: ModelFacts) -> NDArray[Any]:
    """Read a file as raw inputs (n, *input_shape).

    Raises:
        DataError: it cannot be read or does not fit the model; names it.
    """
    shape = tuple(facts.input_shape)
    if path.suffix == ".npy":
        x = read_array(path)
    elif len(shape) == 3 and shape[0] in (1, 3):
        x = np.stack(read_image(path, image_transform(facts, path)))
        if not facts.is_of_bytes or (x.dtype == np.uint16) != (facts.scale > 255):
            trained = f"values from 0 to {facts.scale:g}" if facts.is_of_bytes else "numbers"
            raise DataError(
                f"{path} holds {8 * x.itemsize} bits a shade, and the model was trained on "
                f"{trained}: give an .npy file of inputs as they were, or save it likewise"
            )
    else:
        raise DataError(f"{path} is not an .npy file; the model takes {list(shape)}, not images")
    if x.dtype.kind not in "iuf":
        raise DataError(f"{path} holds {x.dtype}; expected numbers")
    x = x[None] if x.shape == shape else x
    if x.shape[1:] != shape:
        raise DataError(f"{path} is {list(x.shape)}; the model takes {list(shape)}, or several")
    if not len(x):
        raise DataError(f"{path} holds no example")
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float32)
    if not np.isfinite(narrow).all():
        raise DataError(f"{path} holds values that are not finite in float32")
    if fault := facts.fault_of(torch.from_numpy(narrow)):
        raise DataError(f"{path} {fault}")
    return x.astype(np.float64) if facts.is_wide else narrow
