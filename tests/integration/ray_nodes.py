"""``python -m tests.integration.ray_nodes``: a Ray cluster of three nodes on this machine.

Tells its address on standard output, and ends with its standard input. A line names a process: the
node on which that runs is killed. The head has no room for hosts, each other node for three.
"""

from __future__ import annotations

import sys

import psutil
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20


def has(node: Node, name: str) -> bool:
    """Tell whether a node is the one on which a process runs."""
    raylet = psutil.Process(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)
    return any(process.name() == name for process in raylet.children(recursive=True))


def main() -> None:
    """Start the nodes, obey, and take them down."""
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES) for _ in range(2)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        (found,) = (node for node in nodes if has(node, line.strip()))
        cluster.remove_node(found, allow_graceful=False)
        nodes.remove(found)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
