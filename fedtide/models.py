"""Trained models: nets with their normalisation and the names of their classes."""

from __future__ import annotations

from fedmodels.nets.trained import ModelFacts, TrainedModel

__all__ = ["ModelFacts", "TrainedModel"]
