"""What records steps of training, and the records that a process keeps.

A CUDA graph is recorded on a stream of its own, and repeated on any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from fedmodels.config.combinations import part_at
from fedmodels.training.steps import RECORDERS

log = logging.getLogger(__name__)

MOST = 64
"""Kinds of steps, apart from shapes of batches, whose graphs a process keeps."""


class Recorder(Protocol):
    """Records steps on one device."""

    def aside(self, step: Callable[[], None]) -> None:
        """Take a step where a recording may follow."""
        ...

    def recorded(self, step: Callable[[], object]) -> Callable[[], None]:
        """Record a step without taking it; return what takes it."""
        ...


class CudaRecorder:
    """CUDA graphs of one device. They share memory, as they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream to record on."""
        self._device = device
        self._begin()

    def _begin(self) -> None:
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def aside(self, step: Callable[[], None]) -> None:
        """Take a step on the stream that records, where libraries get their workspaces."""
        here = torch.cuda.current_stream(self._device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            step()
        here.wait_stream(self._side)

    def recorded(self, step: Callable[[], object]) -> Callable[[], None]:
        """Record a step as a CUDA graph; only this thread keeps off what a recording forbids."""
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._side):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except Exception:
            self._begin()  # what failed may still hold the stream and the memory
            raise
        return graph.replay


class StepGraphs:
    """The graphs of a process on one device, across clients and interactions."""

    def __init__(self, recorder: Recorder) -> None:
        """Begin without a graph."""
        self.recorder = recorder
        self._slots: dict[Any, Any] = {}
        self._optimizers: dict[Any, tuple[Any, torch.optim.Optimizer]] = {}
        self.told = set[tuple[str, str]]()
        """Methods whose steps are not captured, and why: what was said."""

    def slot(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the slot of a key; the one that was not used for longest makes room for it."""
        return _recent(self._slots, key, make)

    def optimizer(
        self, key: Any, of: Any, make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Return the optimiser of a key; ``of`` are the objects whose identity the key has."""
        found: torch.optim.Optimizer = _recent(self._optimizers, key, lambda: (of, make()))[1]
        return found

    def tell(self, method: str, why: str) -> None:
        """Say once that a method's steps are not captured."""
        if (method, why) not in self.told:
            self.told.add((method, why))
            log.info("steps of %s are taken operator by operator, as %s", method, why)


def _recent(kept: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what is kept under a key, made if it is not there, and drop what is beyond MOST."""
    found = kept.pop(key) if key in kept else make()
    kept[key] = found
    while len(kept) > MOST:
        kept.pop(next(iter(kept)))
    return found


@cache
def graphs_on(device: torch.device) -> StepGraphs:
    """Return the graphs of this process on a device."""
    return StepGraphs(part_at(RECORDERS[device.type])(device))
