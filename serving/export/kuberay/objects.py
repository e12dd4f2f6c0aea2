"""What all manifests share: where they go, their labels, the Secrets they read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from serving.core.errors import ConfigError

NAME = "tandem"
GATEWAY_SERVICE = "tandem-gateway"
# Not `name`: KubeRay selects its own pods by app.kubernetes.io/name.
LABELS = {"app.kubernetes.io/part-of": NAME}
KEYS_SECRET = (
    "tandem-api-keys"  # `keys`: all of them, comma between; `prometheus`: the one that Prometheus shows
)


# As Kubernetes has them: a namespace is a DNS label; the others only must be there, in one word.
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
WORD = re.compile(r"\S+")
HOST_AND_PORT = re.compile(r"\S+:\d{1,5}")


@dataclass(frozen=True)
class Cluster:
    """What the config does not say of the cluster it goes to.

    Raises:
        ConfigError: a value that Kubernetes would refuse; better before half of the files is applied.
    """

    image: str
    namespace: str
    redis_address: str  # host:port of a Redis that outlives the head
    datasource_uid: str  # of Grafana's Prometheus

    def __post_init__(self) -> None:
        for option, form, wanted in (
            ("image", WORD, "the name of an image"),
            (
                "namespace",
                NAMESPACE,
                "1 to 63 of lower case letters, digits and '-', none of these at an end",
            ),
            ("redis_address", HOST_AND_PORT, "host:port"),
            ("datasource_uid", WORD, "one word"),
        ):
            value = getattr(self, option)
            if not form.fullmatch(value):
                raise ConfigError(f"--{option.replace('_', '-')} = {value!r}: must be {wanted}")


def lab_object(api_version: str, kind: str, name: str, cluster: Cluster, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": cluster.namespace, "labels": LABELS}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}
