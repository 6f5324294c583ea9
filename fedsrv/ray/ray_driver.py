"""``python -m fedsrv.ray.ray_driver PARENT``: the process that talks to a Ray cluster.

Ray's own code waits for a head without a limit that others could set, writes to the terminal, and
ends the process that has loaded it when the head is gone. So it runs in a process of its own, which
its parent may kill at any time; its words go to a log.

Orders come on standard input, one JSON object a line; the first has the address: ``{"address":
"HEAD:PORT"}``, null for the cluster of this machine. Then ``{"id": "0-4", "function":
"module:name", "given": {…}, "takes": {"num_cpus": 1}, "log": "path"}`` runs a function on a node
that has room. The function is a generator that takes what is given, and yields lines for the log
and facts. An order with an id of before ends what runs under it.

What happens is told on standard output: ``{"nodes": [{"CPU": 4.0}, …], "here": "10.0.0.1"}`` once
it is connected, ``{"error": "…"}`` if it cannot be, and ``{"id": "0-4", …}`` with ``node`` when a
function begins, ``waits`` while no node has room, ``refused`` if Ray knows no such resource, each
fact of the function, and ``"status": 1`` with ``why`` when its node or its process there has died.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedmodels.host.guarded import Guarded
from fedmodels.host.processes import end_with_parent
from fedmodels.times import NO_ROOM_S
from fedsrv.ray.ray_cluster import taken


class Remote:
    """The actor that runs one function on a node."""

    def run(self, function: str, given: dict[str, Any]) -> Iterator[str | dict[str, Any]]:
        """Tell the node, then what the function yields."""
        yield {"node": socket.gethostname()}
        module, _, name = function.partition(":")
        yield from getattr(importlib.import_module(module), name)(given)


class Driver:
    """What runs on the cluster, by the ids of orders."""

    _actors: Guarded[dict[str, Any]] = Guarded("_lock")
    _waiting: Guarded[dict[str, tuple[float, Mapping[str, float]]]] = Guarded("_lock")
    """Since when something waits to begin, and what it takes."""

    def __init__(self, ray: Any, told: int) -> None:
        """Remember the module ``ray``, connected, and the file in which facts are told."""
        self._ray, self._told = ray, told
        self._lock = threading.RLock()
        """Also keeps the facts apart that threads tell."""
        self._actors, self._waiting = {}, {}
        threading.Thread(target=self._tell_of_waits, daemon=True).start()

    def tell(self, **fact: Any) -> None:
        """Tell the parent a fact."""
        with self._lock:
            os.write(self._told, json.dumps(fact).encode() + b"\n")

    def start(self, order: dict[str, Any]) -> None:
        """Have Ray run a function on a node."""
        key, takes = order["id"], order["takes"]
        with self._lock:
            if key in self._actors:
                self._ray.kill(self._actors[key])  # it would keep its CPU
        try:
            options = {"max_restarts": 0, "scheduling_strategy": "SPREAD", **takes}
            actor = self._ray.remote(**options)(Remote).remote()
        except (TypeError, ValueError) as error:
            return self.tell(id=key, refused=" ".join(str(error).split()))
        with self._lock:
            self._actors[key], self._waiting[key] = actor, (time.monotonic(), takes)
        threading.Thread(target=self._follow, args=(actor, order), daemon=True).start()

    def end(self) -> None:
        """End everything that runs, and leave the cluster."""
        with self._lock:
            for actor in self._actors.values():
                self._ray.kill(actor)
        self._ray.shutdown()

    def _follow(self, actor: Any, order: dict[str, Any]) -> None:
        """Tell what a function yields, until its end."""
        key = order["id"]
        try:
            with Path(order["log"]).open("a") as log:
                run = actor.run.options(num_returns="streaming")
                for ref in run.remote(order["function"], order["given"]):
                    found = self._ray.get(ref)
                    if isinstance(found, str):
                        log.write(found)
                        log.flush()
                    else:
                        with self._lock:
                            self._waiting.pop(key, None)
                        self.tell(id=key, **found)
        except self._ray.exceptions.RayActorError:
            self._tell_end(key, actor, "its node or its process there is gone")
        except self._ray.exceptions.RayError as error:
            self._tell_end(key, actor, str(error).strip().splitlines()[-1])
        except OSError as error:
            self._tell_end(key, actor, f"{order['log']}: {error.strerror}")

    def _tell_end(self, key: str, actor: Any, why: str) -> None:
        with self._lock:
            if self._actors.get(key) is actor:  # not one that another has replaced
                self.tell(id=key, status=1, why=why)

    def _tell_of_waits(self) -> None:
        """Tell once of each function for which no node has room."""
        told = set[tuple[str, float]]()
        while True:
            time.sleep(1)
            with self._lock:
                waiting = [*self._waiting.items()]
            for key, (since, takes) in waiting:
                if time.monotonic() - since < NO_ROOM_S or (key, since) in told:
                    continue
                told.add((key, since))
                self.tell(id=key, waits=no_room(takes, self._ray.available_resources()))


def no_room(takes: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Say why something has not begun, by what it takes and what is free on all nodes."""
    wanted = taken(takes)
    wants = ", ".join(f"{n:g} {unit}" for unit, n in wanted.items())
    has = ", ".join(f"{free.get(unit, 0):g} {unit}" for unit in wanted)
    lacks = any(free.get(unit, 0) < n for unit, n in wanted.items())
    what = "no room on the Ray cluster" if lacks else "Ray has not placed it yet"
    return f"{what}: it takes {wants or 'nothing'}, and {has or 'nothing'} is free on all nodes"


def main() -> None:
    """Connect, say so, and take orders until standard input ends."""
    end_with_parent(signal.SIGKILL, int(sys.argv[1]))
    told = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is for the log
    order = json.loads(sys.stdin.readline())
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = importlib.import_module("ray")
        ray.init(order["address"], log_to_driver=False, logging_level=logging.ERROR)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        os.write(told, json.dumps({"error": why}).encode() + b"\n")
        sys.exit(1)
    driver = Driver(ray, told)
    driver.tell(nodes=nodes, here=ray.util.get_node_ip_address())
    for line in sys.stdin:
        driver.start(json.loads(line))
    driver.end()


if __name__ == "__main__":
    main()
