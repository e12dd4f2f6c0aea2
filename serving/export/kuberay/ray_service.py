"""The RayService: the Ray cluster for the lab, its pods and their sizes, and the lab's config within.

Field names are those of KubeRay's `ray.io/v1`, 1.6.0 or later for the port of the Service.
Sizes are those of `tandem doctor`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from serving.config import LabConfig, LaneConfig
from serving.core.errors import ConfigError
from serving.core.ray_application import ENGINE_RESOURCE, LOOPBACK_SWITCH, OBJECT_STORE_BYTES
from serving.doctor import BASE_MEMORY_GIB, MODELLESS_MEMORY_GIB, SHM_GIB, engine_memory_gib
from serving.export.kuberay.objects import (
    GATEWAY_SERVICE,
    KEYS_SECRET,
    LABELS,
    NAME,
    Cluster,
    lab_object,
)
from serving.export.serve_config import serve_config, to_yaml
from serving.gateway.api_keys import KEYS_VARIABLE

RAY_VERSION = "2.60.0"
USER_ID = 10001  # of deploy/Dockerfile
MODELS_DIR = PurePosixPath("/models")  # where the claim `tandem-models` is mounted
MODELS_CLAIM = "tandem-models"
REDIS_SECRET = "tandem-redis"  # `password`
CUDA_HOST_MEMORY_GIB = 8.0  # of one CUDA engine beside its GPU memory: a guess, to be seen on your cluster
MIN_ENGINE_CPUS = 2
GCS_PORT, DASHBOARD_PORT, AGENT_PORT, METRICS_PORT = 6379, 8265, 52365, 8080
# KubeRay's name for the head's port whose `/-/healthz` says whether the head serves.
SERVE_PORT_NAME = "serve"
ALL_INTERFACES = "0.0.0.0"
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Worker:
    """One worker pod: all are alike, so any engine fits any of them."""

    engines: int
    cpus: int
    gpus: int
    memory_gib: int

    @classmethod
    def of(cls, config: LabConfig) -> Worker:
        """Sized for the largest lane. One engine for each pod, or as many as share one GPU."""
        lanes, device = config.lanes, "cpu" if config.model.device == "cpu" else "cuda"
        gpus_per_engine = max(lane.reserved_gpus(device) for lane in lanes)
        engines = max(1, math.floor(1 / gpus_per_engine)) if gpus_per_engine else 1
        memory_gib = BASE_MEMORY_GIB + SHM_GIB + engines * max(_memory_gib(lane, device) for lane in lanes)
        cpus = engines * max(MIN_ENGINE_CPUS, *(math.ceil(lane.num_cpus) for lane in lanes))
        return cls(engines, cpus, math.ceil(engines * gpus_per_engine), math.ceil(memory_gib))


def _memory_gib(lane: LaneConfig, device: str) -> float:
    if not lane.has_model:
        return MODELLESS_MEMORY_GIB
    return CUDA_HOST_MEMORY_GIB if lane.reserved_gpus(device) else engine_memory_gib(lane)


def ray_service(config: LabConfig, cluster: Cluster) -> dict[str, Any]:
    """The RayService.

    Raises:
        ConfigError: a lane's servers run already: neither their keys nor a way to them is in these manifests; or an
            engine of several cards reserves none, and a pod has those that its engines reserve.
    """
    for lane in config.lanes:
        if lane.num_ranks > 1 and config.model.device != "cpu" and not lane.reserved_gpus("cuda"):
            raise ConfigError(
                f"lanes[{lane.name}].num_gpus = 0: is not exported to Kubernetes for an engine of {lane.num_ranks} "
                "cards, for a pod is given the cards that Ray reserves; leave it out"
            )
        if lane.is_attached:
            raise ConfigError(
                f"lanes[{lane.name}].engine = 'openai' is not exported to Kubernetes: add its keys and its way "
                "through the network policy by hand, or use `tandem export serve`"
            )
    worker = Worker.of(config)
    scales = any(lane.autoscaling for lane in config.lanes)
    ray_cluster: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "gcsFaultToleranceOptions": {
            "redisAddress": cluster.redis_address,
            "redisPassword": {"valueFrom": _secret(REDIS_SECRET, "password")},
        },
        "enableInTreeAutoscaling": scales,
    }
    if scales:
        ray_cluster["autoscalerOptions"] = {"idleTimeoutSeconds": 300, "securityContext": RESTRICTED}
    ray_cluster["headGroupSpec"] = _head(config, cluster, scales=scales)
    ray_cluster["workerGroupSpecs"] = [_workers(config, cluster, worker)]
    # As many as the head is sized for: by itself a gateway would count the cores of the node.
    in_a_pod = config.gateway.model_copy(update={"host": ALL_INTERFACES, "replicas": _num_gateways(config)})
    spec = {
        "serveConfigV2": to_yaml(serve_config(config.model_copy(update={"gateway": in_a_pod}))),
        "serveService": _gateway_service(config),
        "rayClusterConfig": ray_cluster,
    }
    return lab_object("ray.io/v1", "RayService", NAME, cluster, spec=spec)


def _num_gateways(config: LabConfig) -> int:
    return config.gateway.replicas or 1


def _gateway_service(config: LabConfig) -> dict[str, Any]:
    """The Service that KubeRay turns to the cluster that serves, once all of that one is ready.

    KubeRay selects all pods of the cluster. The port goes by its name, and only the head has one of that name.
    """
    port = {"name": SERVE_PORT_NAME, "port": config.gateway.port, "targetPort": SERVE_PORT_NAME}
    return {"metadata": {"name": GATEWAY_SERVICE, "labels": LABELS}, "spec": {"ports": [port]}}


def _head(config: LabConfig, cluster: Cluster, *, scales: bool) -> dict[str, Any]:
    num_gateways = _num_gateways(config)
    cpus, memory_gib = (
        1 + num_gateways,
        math.ceil(2 * BASE_MEMORY_GIB + num_gateways / 4),
    )
    container = {
        "name": "ray-head",
        "image": cluster.image,
        "env": [
            *_environment(),
            {"name": KEYS_VARIABLE, "valueFrom": _secret(KEYS_SECRET, "keys")},
        ],
        "ports": [
            {"name": "gcs-server", "containerPort": GCS_PORT},
            {"name": "dashboard", "containerPort": DASHBOARD_PORT},
            {"name": SERVE_PORT_NAME, "containerPort": config.gateway.port},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        # Ready: workers may join. Whether the lab serves is a condition of the RayService.
        "readinessProbe": _probe("/api/gcs_healthz", DASHBOARD_PORT, failures=6),
        "livenessProbe": _probe("/api/local_raylet_healthz", AGENT_PORT, failures=24),
        "resources": _resources(cpus, memory_gib),
        "securityContext": RESTRICTED,
    }
    return {
        # No engine and no other work: scheduler and gateways must not wait for a processor.
        "rayStartParams": {"num-cpus": "0", "object-store-memory": str(OBJECT_STORE_BYTES)},
        # The autoscaler beside Ray talks to Kubernetes; nothing else in these pods does.
        "template": _pod(config, container, needs_kubernetes=scales),
    }


def _workers(config: LabConfig, cluster: Cluster, worker: Worker) -> dict[str, Any]:
    container = {
        "name": "ray-worker",
        "image": cluster.image,
        "env": _environment(),
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        # Ready: it belongs to the cluster. Without a probe of ours KubeRay asks for Serve's proxy: there is none.
        "readinessProbe": _probe("/api/local_raylet_healthz", AGENT_PORT, failures=6),
        "livenessProbe": _probe("/api/local_raylet_healthz", AGENT_PORT, failures=24),
        "resources": _resources(worker.cpus, worker.memory_gib, worker.gpus),
        "securityContext": RESTRICTED,
    }
    scaling = [(lane, lane.autoscaling) for lane in config.lanes]
    return {
        "groupName": "engines",
        "replicas": _pods(sum(lane.replicas for lane in config.lanes), worker),
        "minReplicas": _pods(
            sum(bounds.min_replicas if bounds else lane.replicas for lane, bounds in scaling), worker
        ),
        "maxReplicas": _pods(
            sum(bounds.max_replicas if bounds else lane.replicas for lane, bounds in scaling), worker
        ),
        "rayStartParams": {
            "object-store-memory": str(OBJECT_STORE_BYTES),
            # Quoted for the shell, and as Ray's autoscaler reads it.
            "resources": f'"{{\\"{ENGINE_RESOURCE}\\": {worker.engines}}}"',
        },
        "template": _pod(config, container, needs_kubernetes=False),
    }


def _pods(engines: int, worker: Worker) -> int:
    return math.ceil(engines / worker.engines)


def _pod(config: LabConfig, container: dict[str, Any], *, needs_kubernetes: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "automountServiceAccountToken": needs_kubernetes,
        # A Service named `vllm` would set VLLM_PORT, which an engine takes for its own.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
    }
    if _reads_models(config):
        container["volumeMounts"] = [{"name": "models", "mountPath": str(MODELS_DIR), "readOnly": True}]
        claim = {"claimName": MODELS_CLAIM, "readOnly": True}
        spec["volumes"] = [{"name": "models", "persistentVolumeClaim": claim}]
    return {"metadata": {"labels": LABELS}, "spec": spec}


def _reads_models(config: LabConfig) -> bool:
    """Whether a model comes from the claim and not with the image.

    Raises:
        ConfigError: from neither.
    """
    paths = [(key, path) for key, path in config.checkpoints.items() if path != "auto"]
    for key, path in paths:
        if not PurePosixPath(path).is_relative_to(MODELS_DIR):
            raise ConfigError(
                f"{key} = {path!r}: on Kubernetes it must be auto or lie below {MODELS_DIR}, "
                f"where the claim {MODELS_CLAIM} is mounted"
            )
    return bool(paths)


def _environment() -> list[dict[str, Any]]:
    # This pod is one node of several: Ray must listen on its address, not on the loopback alone.
    return [{"name": LOOPBACK_SWITCH, "value": "1"}]


def _secret(name: str, key: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": name, "key": key}}


def _probe(path: str, port: int, *, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "initialDelaySeconds": 10,
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(cpus: int, memory_gib: int, gpus: int = 0) -> dict[str, Any]:
    """Requests and limits alike: with whole cores, a kubelet of policy `static` gives the pod cores of its own."""
    sizes = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
    if gpus:
        sizes["nvidia.com/gpu"] = str(gpus)
    return {"requests": sizes, "limits": sizes}
