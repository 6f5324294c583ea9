"""Whom an order is for; apart from what travels, as certificates name clients without torch."""

from __future__ import annotations

from typing import Literal

EVALUATOR: Literal["evaluator"] = "evaluator"
"""The id of the client that holds only the global test set."""

ClientId = int | Literal["evaluator"]
