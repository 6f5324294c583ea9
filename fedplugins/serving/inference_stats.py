"""What became of inferences, as the statistics of the Open Inference Protocol have it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from fedmodels.host.guarded import Guarded


@dataclass
class Spent:
    """How often, and in how many nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Count one more."""
        self.count, self.ns = self.count + 1, self.ns + ns

    def told(self) -> dict[str, int]:
        """Return it as the protocol has it."""
        return {"count": self.count, "ns": self.ns}


class Tally:
    """The inferences of one model since the server began; safe between threads."""

    _inputs: Guarded[int] = Guarded("_lock")
    _last_ms: Guarded[int] = Guarded("_lock")
    _success: Guarded[Spent] = Guarded("_lock")
    _fail: Guarded[Spent] = Guarded("_lock")
    _infer: Guarded[Spent] = Guarded("_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inputs, self._last_ms = 0, 0
        self._success, self._fail, self._infer = Spent(), Spent(), Spent()

    def infer(self, inputs: int, ns: int) -> None:
        """Count inputs that the model has answered, and the time that it took alone."""
        with self._lock:
            self._inputs += inputs
            self._last_ms = int(time.time() * 1000)
            self._infer.add(ns)

    def end(self, ns: int, *, is_well: bool) -> None:
        """Count a request, from its first byte to its answer."""
        with self._lock:
            (self._success if is_well else self._fail).add(ns)

    def told(self, name: str, version: str) -> dict[str, Any]:
        """Return the statistics of the model, of whichever version answered."""
        with self._lock:
            return {
                "name": name,
                "version": version,
                "last_inference": self._last_ms,
                "inference_count": self._inputs,
                "execution_count": self._infer.count,
                "inference_stats": {
                    "success": self._success.told(),
                    "fail": self._fail.told(),
                    "compute_infer": self._infer.told(),
                },
            }
