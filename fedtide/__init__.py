"""fedtide from Python: run an experiment, open its result, write a custom method.

>>> import fedtide
>>> "gldp" in fedtide.methods()
True
>>> fedtide.make_method("fedprox", mu=0.1).mu
0.1

A run needs a config: a TOML file, a mapping, or the name of a preset.

>>> run = fedtide.run("quickstart", overrides={"schedule.rounds": 1}, backend="inprocess")
>>> run.summary["rounds"]
1
>>> model = run.personal_model(0)
>>> model(run.example(0)).shape[1] == len(model.class_names)
True

Importing this package does not import torch: a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcli.data.cuts.cut_input import CutInput
    from fedmodels.errors import FedtideError
    from fedmodels.methods import make as make_method
    from fedmodels.methods import names as methods
    from fedmodels.methods import register
    from fedmodels.methods.centralized import Centralized
    from fedmodels.methods.fedali import FedAli
    from fedmodels.methods.fedavg import FedAvg
    from fedmodels.methods.fedavg_replay import FedAvgReplay
    from fedmodels.methods.fedmlp import FedMLP
    from fedmodels.methods.fedper import FedPer
    from fedmodels.methods.fedproto import FedProto
    from fedmodels.methods.fedprox import FedProx
    from fedmodels.methods.fedrep import FedRep
    from fedmodels.methods.gldp import Gldp
    from fedmodels.methods.local import Local
    from fedmodels.methods.pfedgrp import PFedGRP
    from fedmodels.nets import make_net
    from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Problem, Prototypes
    from fedmodels.tensors.bundle_spec import BundleSpec, prototype_spec, scalar_spec
    from fedmodels.tensors.uploads import Reduction, Uploads
    from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
    from fedmodels.training.method import Method, Payload, Reduced, Scores
    from fedmodels.training.run import RunFacts
    from fedmodels.training.stepped import Batch, Output, Phase
    from fedtide.models import TrainedModel, predict
    from fedtide.open_runs import OpenRun, open_run
    from fedtide.own_loop import LoopTask, client
    from fedtide.runs import Run, open, run
    from fedtide.server_half import ServerHalf

_BUNDLE = "fedmodels.tensors.bundle"
_METHODS = {
    "Centralized": "fedmodels.methods.centralized",
    "FedAli": "fedmodels.methods.fedali",
    "FedAvgReplay": "fedmodels.methods.fedavg_replay",
    "FedMLP": "fedmodels.methods.fedmlp",
    "FedPer": "fedmodels.methods.fedper",
    "FedProto": "fedmodels.methods.fedproto",
    "FedProx": "fedmodels.methods.fedprox",
    "FedRep": "fedmodels.methods.fedrep",
    "Gldp": "fedmodels.methods.gldp",
    "Local": "fedmodels.methods.local",
    "PFedGRP": "fedmodels.methods.pfedgrp",
}
"""The class of each further method: a base for methods of one's own."""

_HOMES = {
    **_METHODS,
    "run": "fedtide.runs",
    "open": "fedtide.runs",
    "Run": "fedtide.runs",
    "open_run": "fedtide.open_runs",
    "OpenRun": "fedtide.open_runs",
    "TrainedModel": "fedtide.models",
    "predict": "fedtide.models",
    "client": "fedtide.own_loop",
    "LoopTask": "fedtide.own_loop",
    "ServerHalf": "fedtide.server_half",
    "methods": "fedmodels.methods:names",
    "make_method": "fedmodels.facts.resolution:make_method",
    "register": "fedmodels.methods",
    "make_net": "fedmodels.nets",
    "FedAvg": "fedmodels.methods.fedavg",
    "CutInput": "fedcli.data.cuts.cut_input",
    "FedtideError": "fedmodels.errors",
    "RunFacts": "fedmodels.training.run",
    **dict.fromkeys(("Method", "Payload", "Reduced", "Scores"), "fedmodels.training.method"),
    **dict.fromkeys(("Batch", "Output", "Phase"), "fedmodels.training.stepped"),
    **dict.fromkeys(
        ("ClientContext", "ServerContext", "ServerState"), "fedmodels.training.contexts"
    ),
    **dict.fromkeys(("Bundle", "Prototypes", "GeneratorState", "Histogram", "Problem"), _BUNDLE),
    **dict.fromkeys(("Reduction", "Uploads"), "fedmodels.tensors.uploads"),
    **dict.fromkeys(("BundleSpec", "prototype_spec", "scalar_spec"), f"{_BUNDLE}_spec"),
}
"""Where each public name lives: a module, and the name there if it is another one."""

_MODULES = ("metrics", "nets", "numerics", "partition", "prototypes", "testing")

__all__ = [
    "Batch",
    "Bundle",
    "BundleSpec",
    "Centralized",
    "ClientContext",
    "CutInput",
    "FedAli",
    "FedAvg",
    "FedAvgReplay",
    "FedMLP",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedtideError",
    "GeneratorState",
    "Gldp",
    "Histogram",
    "Local",
    "LoopTask",
    "Method",
    "OpenRun",
    "Output",
    "PFedGRP",
    "Payload",
    "Phase",
    "Problem",
    "Prototypes",
    "Reduced",
    "Reduction",
    "Run",
    "RunFacts",
    "Scores",
    "ServerContext",
    "ServerHalf",
    "ServerState",
    "TrainedModel",
    "Uploads",
    "client",
    "make_method",
    "make_net",
    "methods",
    "open",
    "open_run",
    "predict",
    "prototype_spec",
    "register",
    "run",
    "scalar_spec",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of this package, when it is first used."""
    if name in _MODULES:
        return importlib.import_module(f"fedtide.{name}")
    if name in _HOMES:
        module, _, there = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), there or name)
    if (point := _of_plugins().get(name)) is not None:
        return point.load()
    raise AttributeError(f"module 'fedtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, *_MODULES, *_of_plugins()])


def _of_plugins() -> dict[str, Any]:
    """Return the entry points of the methods that plugins bring, by the names of their classes."""
    from fedmodels.plugins import offered

    return {point.attr: point for point in offered("fedtide.methods") if point.attr}
