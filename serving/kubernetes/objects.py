"""What all manifests share: where they go, their labels, the Secrets they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAME = "tandem"
# Not `name`: KubeRay selects its own pods by app.kubernetes.io/name.
LABELS = {"app.kubernetes.io/part-of": NAME}
KEYS_SECRET = (
    "tandem-api-keys"  # `keys`: all of them, comma between; `prometheus`: the one that Prometheus shows
)


@dataclass(frozen=True)
class Cluster:
    """What the config does not say of the cluster it goes to."""

    image: str
    namespace: str
    redis_address: str  # host:port of a Redis that outlives the head
    datasource_uid: str  # of Grafana's Prometheus


def lab_object(api_version: str, kind: str, name: str, cluster: Cluster, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": cluster.namespace, "labels": LABELS}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}
