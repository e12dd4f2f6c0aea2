"""What Ray reads from the environment when it is imported: keep it off other machines' reach, and quiet.

Import before Ray.

Ray binds its services to all interfaces unless it is told that this machine is the whole cluster; and Ray Serve
binds each replica's inter-deployment gRPC server, which unpickles what it receives, to all interfaces always.
"""

from __future__ import annotations

import os
from typing import Any

from serving.core.home import home_dir
from serving.core.ray_application import LOOPBACK_SWITCH, SELDOM

os.environ.setdefault(LOOPBACK_SWITCH, "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray makes each worker nice, those that route among them; engines make themselves nice: docs/decisions/0008.
os.environ.setdefault("RAY_worker_niceness", "0")
# Serve kills its controller at the end of every shutdown; Ray reports the controller's open calls as failures.
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX", r"Task ServeController\.\w+ failed.*was killed by `ray.kill`"
)


def rest_when_idle() -> None:
    """Let the Ray that this process starts wake up seldom; before Ray is imported. A variable that is set stays."""
    for name, value in SELDOM.items():
        os.environ.setdefault(name, value)


def allow_cluster() -> None:
    """Let this process join a cluster of several nodes; before Ray is imported.

    Where `ray start` finds a token it asks for it from everyone, but `ray.init` shows it only in mode `token`.
    """
    os.environ[LOOPBACK_SWITCH] = "1"
    variables = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(os.environ.get(name) for name in variables) or (home_dir() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def bind_replica_server_to_node() -> None:
    """Bind this replica's inter-deployment server to the node's own address instead of all of them.

    Call it in a replica's constructor: Serve opens the port after that. Private names of Ray 2.60; the integration
    tests look at the listening sockets, so a Ray that renames them is noticed.
    """
    import ray
    from ray.serve._private import replica

    original = replica.add_port_to_grpc_server

    def on_node_address(server: Any, address: str) -> Any:
        return original(server, address.replace("[::]", ray.util.get_node_ip_address()))

    replica.add_port_to_grpc_server = on_node_address


def start_needed_processes_only() -> None:
    """Let the next `ray.init` start no log monitor and no autoscaler's monitor.

    Nobody reads a worker's log through the driver, and there is no node to add. `ray.init` has no switch for them:
    these are private names of Ray 2.60, and the integration tests look at the processes.
    """
    from ray._private.node import Node

    def not_started(self: Any) -> None:
        pass

    Node.start_log_monitor = Node.start_monitor = not_started
