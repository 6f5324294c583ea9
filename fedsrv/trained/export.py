"""A trained model as a file that other programs read: raw inputs in, logits out."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fedmodels.errors import ConfigError, RunFailed, pip_line, reason_of
from fedmodels.host.files import replacing
from fedmodels.nets.trained import TrainedModel

DESCRIPTION = "model.json"
"""Beside the graph of torch.export: what the model is."""


def export(model: TrainedModel, kind: str, out: Path) -> None:
    """Write a model to a file that describes itself.

    Raises:
        ConfigError: the kind is not known, or what it needs is not installed.
        RunFailed: the net cannot be written so, or the file cannot.
    """
    check_kind(kind)
    if out.is_dir():
        raise RunFailed(f"cannot write {out}: it is a directory; name a file with --out")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporters, about themselves
            KINDS[kind][1](model, out)
    except OSError as error:
        raise RunFailed(f"cannot write {out}: {reason_of(error)}") from None


def check_kind(kind: str) -> None:
    """Check that a model can be written as this.

    Raises:
        ConfigError: names what it can be written as.
    """
    if kind not in KINDS:
        raise ConfigError(f"--to {kind!r} is none of {', '.join(KINDS)}")


def _to_safetensors(model: TrainedModel, out: Path) -> None:
    model.save(out)


def _to_torch_export(model: TrainedModel, out: Path) -> None:
    """Write the graph with the description beside it; ``torch.export.load`` reads it."""
    facts = json.dumps(asdict(model.facts))
    graph = io.BytesIO()  # torch would end the process where the disk is full
    torch.export.save(_program(model), graph, extra_files={DESCRIPTION: facts})
    with replacing(out) as temporary:
        temporary.write_bytes(graph.getbuffer())


def _to_onnx(model: TrainedModel, out: Path) -> None:
    """Write the graph with the description in its metadata."""
    for needed in ("onnx", "onnxscript"):
        if importlib.util.find_spec(needed) is None:
            raise ConfigError(f"--to onnx needs packages more: {pip_line('onnx')}")
    from torch.onnx.errors import OnnxExporterError

    try:
        found = torch.onnx.export(
            _program(model), dynamo=True, verbose=False, input_names=["x"], output_names=["logits"]
        )
    except OnnxExporterError as error:
        raise RunFailed(f"{model.facts.net} cannot be written as onnx: {_line(error)}") from None
    assert found is not None, "the exporter that knows torch.export returns a program"
    found.model.metadata_props["fedtide"] = json.dumps(asdict(model.facts))
    with replacing(out) as temporary:
        found.save(str(temporary))


def _program(model: TrainedModel) -> torch.export.ExportedProgram:
    """Return the graph of a model, for any number of raw inputs: float32, float64 if it is wide."""
    kind = torch.float64 if model.facts.is_wide else torch.float32
    x = torch.zeros(2, *model.facts.input_shape, dtype=kind)
    batch = torch.export.Dim("batch", min=1 if model.net.takes_one else 2)
    try:
        return torch.export.export(model.eval(), (x,), dynamic_shapes={"x": {0: batch}})
    except (RuntimeError, ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        raise RunFailed(f"{model.facts.net} has no graph to write: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


KINDS: dict[str, tuple[str, Callable[[TrainedModel, Path], None]]] = {
    "safetensors": (".safetensors", _to_safetensors),
    "torch.export": (".pt2", _to_torch_export),
    "onnx": (".onnx", _to_onnx),
}
"""What a model can be written as: the end of the file's name, and who writes it."""
