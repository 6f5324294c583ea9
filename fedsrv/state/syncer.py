"""The background thread that syncs committed states to the disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Syncer:
    """Syncs committed states in the background and knows the newest one that is safe."""

    def __init__(self, sync: Callable[[int], None]) -> None:
        self._sync = sync
        self._wanted = -1
        self.durable = -1
        self._changed = threading.Condition()
        self._closed = False
        self._failed = -1
        """The last interaction whose sync failed; only a later one is tried again."""
        self._thread = threading.Thread(target=self._work, name="syncer", daemon=True)
        self._thread.start()

    def want(self, interaction: int) -> None:
        """Ask for a sync of everything up to an interaction."""
        with self._changed:
            self._wanted = interaction
            self.durable = min(self.durable, interaction)
            self._changed.notify()

    def _is_behind(self) -> bool:
        return self._wanted > self.durable and self._wanted != self._failed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_behind())
                if self._closed:
                    return
                target = self._wanted
            try:
                self._sync(target)
            except OSError as error:
                log.error("interaction %d is not safe on the disk: %s", target + 1, error.strerror)
                self._failed = target
                continue
            with self._changed:
                self.durable = min(target, self._wanted)

    def close(self) -> None:
        """Stop after the sync under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
