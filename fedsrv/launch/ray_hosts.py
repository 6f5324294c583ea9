"""Hosts on a Ray cluster: each is an actor, which Ray places on a node that has room for it."""

from __future__ import annotations

import hashlib
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from fedmodels.errors import ConfigError, RunFailed
from fedmodels.host.processes import Box
from fedmodels.tensors.bundle import EVALUATOR
from fedpb.channels import is_loopback
from fedpb.identities import SERVER
from fedsrv.identity.certificates import init_authority, issue
from fedsrv.launch.hosts import Joining
from fedsrv.launch.layout import Crowd
from fedsrv.launch.remote_host import Dealing, HostInstructions, remote_host
from fedsrv.ray.ray_cluster import RAY, RayCluster, RayPlace


class RayHosts:
    """Hosts as actors of a Ray cluster."""

    name = "the process that talks to Ray"
    gpus = 0  # those of its nodes are Ray's to count

    def __init__(
        self, ray: RayPlace, joining: Joining, out: Path, config: str, deals: bool
    ) -> None:
        """Remember where to run; :meth:`begin` connects.

        ``config`` is the experiment's TOML; ``deals`` says whether data are dealt out for this run.
        """
        self._ray_place, self._logs = ray, (out / "logs").resolve()
        self._dealing: Dealing | None = None
        self._joining = replace(
            joining, data=joining.data.resolve(), states=joining.states.resolve()
        )
        if ray.node_dir is not None:
            here = ray.node_dir / _key_of(out)
            self._joining = replace(self._joining, states=here / "clients")
            if deals:
                self._joining = replace(self._joining, data=here / "data")
                self._dealing = Dealing(config, str(here / "data"))
        self._stack = ExitStack()
        self._cluster: RayCluster | None = None
        self._certificates: Path | None = None
        self._secrets: dict[str, dict[str, str]] = {}
        self.listen = "127.0.0.1:0"
        self.serve_options: Sequence[str] = ()

    def begin(self, box: Box) -> None:
        """Connect; issue certificates unless Ray has this machine alone.

        Raises:
            ConfigError: Ray is not installed.
            RunFailed: the cluster cannot be reached.
        """
        self._box = box
        cluster = self._connected()
        if self._ray_place.place != RAY or len(cluster.nodes) > 1:
            address = cluster.here
            self.listen = f"[{address}]:0" if ":" in address else f"{address}:0"
            self._secure(address)

    def begin_again(self) -> None:
        """Connect anew: what ran on the cluster has ended with the process that talked to Ray.

        Raises:
            RunFailed: the cluster is gone.
        """
        try:
            self._connected()
        except RunFailed as error:
            raise RunFailed(f"{error}; then --resume continues the run") from None

    def why(self, status: int) -> str:
        """Return why all hosts have gone at once."""
        how = f"it ended with {status}" if status >= 0 else f"killed by signal {-status}"
        return f"{how}; see {self._log('ray')}"

    def divide(self, crowd: Crowd) -> list[str]:
        """Give every host clients that follow each other; ConfigError if there is never room."""
        assert self._cluster is not None
        clients, evaluator = crowd.clients, crowd.evaluator
        place, room = self._ray_place, sum(map(self._room_of, self._cluster.nodes))
        left = max(1, room - evaluator)
        wanted = min(clients, crowd.hosts or (left if clients <= left else min(left, crowd.cohort)))
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

    def forecast(self, config: Path, data: Path, told: Path) -> bool:
        """Try nothing: what this machine takes says nothing of the cluster's nodes."""
        return False

    def start(self, clients: str, server: str) -> None:
        """Have Ray place an actor for a host; it replaces an earlier actor of this host."""
        assert self._cluster is not None
        device = "cuda:0" if self._ray_place.gpus else "cpu"  # Ray shows an actor its own GPU only
        stay = HostInstructions(
            clients,
            self._joining.arguments(clients, server, device),
            str(Path.cwd()),
            self._secrets[clients],
            self._dealing,
        )
        takes = {"num_cpus": self._ray_place.cpus, "num_gpus": self._ray_place.gpus}
        log = self._log(f"client-{clients}")
        self._cluster.start(clients, remote_host, asdict(stay), takes, log)

    def end(self) -> None:
        """Kill every actor, and let the cluster go."""
        if self._cluster is not None:
            self._cluster.end()
        self._stack.close()

    def _connected(self) -> RayCluster:
        self._cluster = RayCluster(self._ray_place.place, self._log("ray"), "hosts", self._box)
        return self._cluster

    def _log(self, source: str) -> Path:
        return self._logs / f"{source}.log"

    def _room_of(self, node: Mapping[str, float]) -> int:
        """Return how many hosts a node has room for, were it idle."""
        wanted = {"CPU": self._ray_place.cpus, "GPU": self._ray_place.gpus}
        return min(int(node.get(name, 0) / n + 1e-9) for name, n in wanted.items() if n)

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

    def _issued(self, clients: str) -> dict[str, str]:
        """Issue a certificate for a host's clients.

        Returns:
            The content of each file by its option of ``fedcli join``; nothing without TLS.
        """
        if self._certificates is None:
            return {}
        cert, key = issue(self._certificates, clients)
        files = {"--tls-ca": self._certificates / "ca.pem", "--tls-cert": cert, "--tls-key": key}
        return {option: file.read_text(encoding="utf-8") for option, file in files.items()}


def _key_of(out: Path) -> str:
    """Return a name that no other run directory has on any node."""
    here = f"{socket.gethostname()}:{out.resolve()}"
    return f"{out.name}-{hashlib.sha256(here.encode()).hexdigest()[:8]}"
