"""All files of `tandem export kuberay`."""

from __future__ import annotations

from typing import Any

from serving.config import LabConfig
from serving.core.errors import ConfigError
from serving.export.kuberay.monitoring import dashboards, pod_monitor, prometheus_rule, scrape_config
from serving.export.kuberay.objects import LABELS, NAME, Cluster, lab_object
from serving.export.kuberay.ray_service import DASHBOARD_PORT, ray_service
from serving.export.serve_config import to_yaml

FILE_HEADER = (
    "Made by `tandem export kuberay`. Change the lab's config and make it again, or patch it with Kustomize;",
    "what it needs and what it does: docs/kubernetes.md",
)


def files(config: LabConfig, cluster: Cluster) -> dict[str, str]:
    """Every file of the directory by name; `kubectl apply -k DIRECTORY` applies them.

    Raises:
        ConfigError: a model is neither the image's own nor below `/models`; or keys or the scheduler's profile are
            in a file.
    """
    if config.gateway.api_keys_file is not None:
        raise ConfigError(
            f"gateway.api_keys_file = {config.gateway.api_keys_file!r}: on Kubernetes keys come from the Secret "
            "that docs/kubernetes.md names; leave it out"
        )
    if config.scheduler.profile is not None:
        raise ConfigError(
            f"scheduler.profile = {config.scheduler.profile!r}: on Kubernetes no pod has that file; use another "
            "scheduler.placement, or `tandem export serve`"
        )
    content = {
        "namespace.yaml": [_namespace(cluster)],
        "rayservice.yaml": [ray_service(config, cluster)],
        "network-policy.yaml": [_network_policy(config, cluster)],
        "monitoring.yaml": [
            scrape_config(config, cluster),
            pod_monitor(cluster),
            prometheus_rule(cluster),
        ],
        "dashboards.yaml": dashboards(cluster),
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(content),
    }
    content["kustomization.yaml"] = [kustomization]
    return {name: to_yaml(*objects, header=FILE_HEADER) for name, objects in content.items()}


def _namespace(cluster: Cluster) -> dict[str, Any]:
    labels = LABELS | {"pod-security.kubernetes.io/enforce": "restricted"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": cluster.namespace, "labels": labels},
    }


def _network_policy(config: LabConfig, cluster: Cluster) -> dict[str, Any]:
    """Anyone in the cluster reaches the API; Ray's own ports, which run code, only the lab and the operator."""
    lab = {"podSelector": {"matchLabels": LABELS}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    prometheus = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    spec = {
        "podSelector": lab["podSelector"],
        "policyTypes": ["Ingress"],
        "ingress": [
            {"ports": [{"protocol": "TCP", "port": config.gateway.port}]},
            {"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
            # Metrics are served on free ports, which only /targets knows.
            {"from": [lab, prometheus]},
        ],
    }
    return lab_object("networking.k8s.io/v1", "NetworkPolicy", NAME, cluster, spec=spec)
