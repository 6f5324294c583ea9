"""Hosts on a Ray cluster: each is an actor, which Ray places on a node that has room for it."""

from __future__ import annotations

import hashlib
import json
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import EVALUATOR
from fedpb.channels import is_loopback
from fedsrv.identity.certificates import SERVER, init_authority, issue
from fedsrv.launch.hosts import Joining
from fedsrv.launch.processes import Box, Said
from fedsrv.launch.remote_host import Dealing, RemoteHost, Stay
from fedsrv.ray_cluster import RAY, RayPlace, connected

LEAVING_S = 5.0
"""Time in which a killed actor is noticed."""


class RayHosts:
    """Hosts as actors of a Ray cluster."""

    def __init__(
        self, ray: RayPlace, joining: Joining, out: Path, config: str, deals: bool
    ) -> None:
        """Remember where to run; :meth:`begin` connects.

        Args:
            ray: the cluster.
            joining: what hosts are told.
            out: the run directory.
            config: the experiment's TOML.
            deals: whether the data are dealt out for this run.
        """
        self._ray_place, self._logs = ray, out / "logs"
        self._dealing: Dealing | None = None
        self._joining = replace(
            joining, data=joining.data.resolve(), states=joining.states.resolve()
        )
        if ray.node_dir is not None:
            here = ray.node_dir / _key_of(out)
            self._joining = replace(self._joining, states=here / "clients")
            if deals:
                self._joining = replace(self._joining, data=here / "data")
                self._dealing = Dealing(config, here / "data")
        self._stack = ExitStack()
        self._actors: dict[str, Any] = {}
        self._followers: list[threading.Thread] = []
        self._certificates: Path | None = None
        self._secrets: dict[str, dict[str, bytes]] = {}
        self.listen = "127.0.0.1:0"
        self.serve_options: Sequence[str] = ()

    def begin(self, box: Box) -> None:
        """Connect; issue certificates unless Ray has this machine alone.

        Raises:
            ConfigError: Ray is not installed.
            RunFailed: the cluster cannot be reached.
        """
        self._box = box
        self._ray = self._stack.enter_context(connected(self._ray_place.place))
        cpus, gpus = self._ray_place.cpus, self._ray_place.gpus
        self._actor = self._ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )(RemoteHost)
        if self._ray_place.place != RAY or len(self._nodes()) > 1:
            address = self._ray.util.get_node_ip_address()
            self.listen = f"[{address}]:0" if ":" in address else f"{address}:0"
            self._secure(address)

    def begin_again(self) -> None:
        """Do nothing: the nodes of a cluster do not all go at once."""

    def divide(self, clients: int, cohort: int, hosts: int | None, evaluator: bool) -> list[str]:
        """Give every host clients that follow each other, as a certificate names a range.

        Raises:
            ConfigError: the cluster never has room for so many hosts.
        """
        place, room = self._ray_place, sum(map(self._room_of, self._nodes()))
        left = max(1, room - evaluator)
        wanted = min(clients, hosts or (left if clients <= left else min(left, cohort)))
        if wanted + evaluator > room:
            raise ConfigError(
                f"the Ray cluster has room for {room} hosts of {place.cpus:g} CPU and "
                f"{place.gpus:g} GPU, and {wanted + evaluator} are to run"
                f"{', one of them for the evaluator' if evaluator else ''}; "
                "give less of --hosts, --host-cpus or --host-gpus"
            )
        firsts = [clients * host // wanted for host in range(wanted + 1)]
        found = [
            f"{first}-{after - 1}" if after - first > 1 else str(first)
            for first, after in pairwise(firsts)
        ]
        found += [EVALUATOR] if evaluator else []
        self._secrets = {host: self._issued(host) for host in found}
        return found

    def start(self, clients: str, server: str) -> None:
        """Have Ray place an actor for a host; it replaces an earlier actor of this host."""
        device = "cuda:0" if self._ray_place.gpus else "cpu"  # Ray shows an actor its own GPU only
        stay = Stay(
            clients,
            self._joining.arguments(clients, server, device),
            Path.cwd(),
            self._secrets[clients],
            self._dealing,
        )
        if clients in self._actors:
            self._ray.kill(self._actors[clients])  # it would keep its CPU
        self._actors[clients] = actor = self._actor.remote()
        follower = threading.Thread(target=self._follow, args=(clients, actor, stay), daemon=True)
        self._followers.append(follower)
        follower.start()

    def end(self) -> None:
        """Kill every actor, and let the cluster go."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        for follower in self._followers:
            follower.join(LEAVING_S)
        self._stack.close()

    def _nodes(self) -> list[Mapping[str, Any]]:
        """Return the nodes of the cluster that are alive, as Ray describes them."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _room_of(self, node: Mapping[str, Any]) -> int:
        """Return how many hosts a node has room for, were it idle."""
        wanted = {"CPU": self._ray_place.cpus, "GPU": self._ray_place.gpus}
        has = node["Resources"]
        return min(int(has.get(name, 0) / n + 1e-9) for name, n in wanted.items() if n)

    def _follow(self, clients: str, actor: Any, stay: Stay) -> None:
        """Write what a host logs to its log here; tell the launcher of its end."""
        fact: dict[str, object] = {"id": clients, "status": 1}
        try:
            with (self._logs / f"client-{clients}.log").open("a") as log:
                for ref in actor.run.options(num_returns="streaming").remote(stay):
                    said = self._ray.get(ref)
                    if isinstance(said, int):
                        fact["status"] = said
                    else:
                        log.write(said)
                        log.flush()
        except self._ray.exceptions.RayActorError:
            fact["why"] = "its node or its process there is gone"
        except self._ray.exceptions.RayError as error:
            fact["why"] = str(error).strip().splitlines()[-1]
        self._box.put(Said("hosts", json.dumps(fact)))

    # --- certificates -----------------------------------------------------------------------------

    def _secure(self, address: str) -> None:
        """Issue this launch's own authority, and the coordinator's certificate."""
        place = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fedtide-certs-"))
        self._certificates = Path(place)
        authority, _ = init_authority(self._certificates)
        hosts = () if is_loopback(self.listen) else (address,)
        cert, key = issue(self._certificates, SERVER, hosts)
        options = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": authority}
        self.serve_options = [str(word) for pair in options.items() for word in pair]

    def _issued(self, clients: str) -> dict[str, bytes]:
        """Issue a certificate for a host's clients.

        Returns:
            The content of each file by its option of ``fedcli join``; nothing without TLS.
        """
        if self._certificates is None:
            return {}
        cert, key = issue(self._certificates, clients)
        files = {"--tls-ca": self._certificates / "ca.pem", "--tls-cert": cert, "--tls-key": key}
        return {option: file.read_bytes() for option, file in files.items()}


def _key_of(out: Path) -> str:
    """Return a name that no other run directory has on any node."""
    here = f"{socket.gethostname()}:{out.resolve()}"
    return f"{out.name}-{hashlib.sha256(here.encode()).hexdigest()[:8]}"
