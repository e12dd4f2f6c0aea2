"""What Prometheus and Grafana need: where the lab's metrics are, the rules, the dashboards.

Field names are those of the Prometheus operator's `monitoring.coreos.com`; what they say comes from `dashboards/`.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import yaml

from serving.config import LabConfig
from serving.export.kuberay.objects import GATEWAY_SERVICE, KEYS_SECRET, LABELS, NAME, Cluster, lab_object

DASHBOARD_LABEL = {"grafana_dashboard": "1"}  # what the sidecar of Grafana's chart looks for


def scrape_config(config: LabConfig, cluster: Cluster) -> dict[str, Any]:
    """The lab's own processes, by the gateway's list; Ray's are the PodMonitor's."""
    job = _scrape_job()
    url = f"http://{GATEWAY_SERVICE}.{cluster.namespace}.svc:{config.gateway.port}/targets"
    discovery = {
        "url": url,
        "refreshInterval": job["http_sd_configs"][0]["refresh_interval"],
        "authorization": {"type": "Bearer", "credentials": {"name": KEYS_SECRET, "key": "prometheus"}},
    }
    spec = {
        "honorLabels": job["honor_labels"],
        "scrapeInterval": _prometheus("prometheus.yml")["global"]["scrape_interval"],
        "httpSDConfigs": [discovery],
        "relabelings": [{"action": "drop", "sourceLabels": ["role"], "regex": "ray"}, _label("job", NAME)],
    }
    return lab_object("monitoring.coreos.com/v1alpha1", "ScrapeConfig", NAME, cluster, spec=spec)


def pod_monitor(cluster: Cluster) -> dict[str, Any]:
    """Ray's own metrics, one port for each pod, also while no gateway answers."""
    job = _scrape_job()
    endpoint = {
        "port": "metrics",
        "honorLabels": job["honor_labels"],
        "interval": _prometheus("prometheus.yml")["global"]["scrape_interval"],
        "relabelings": [_label("job", NAME), _label("role", "ray")],
        "metricRelabelings": [
            {_camel(key): value for key, value in rule.items()} for rule in job["metric_relabel_configs"]
        ],
    }
    spec = {
        "selector": {"matchLabels": LABELS},
        "podMetricsEndpoints": [endpoint],
    }
    return lab_object("monitoring.coreos.com/v1", "PodMonitor", f"{NAME}-ray", cluster, spec=spec)


def _label(name: str, value: str) -> dict[str, Any]:
    return {"targetLabel": name, "replacement": value}


def _camel(snake: str) -> str:
    first, *rest = snake.split("_")
    return first + "".join(word.title() for word in rest)


def prometheus_rule(cluster: Cluster) -> dict[str, Any]:
    groups = [
        group for name in ("rules/recording.yml", "rules/alerts.yml") for group in _prometheus(name)["groups"]
    ]
    return lab_object("monitoring.coreos.com/v1", "PrometheusRule", NAME, cluster, spec={"groups": groups})


def _scrape_job() -> dict[str, Any]:
    jobs: list[dict[str, Any]] = _prometheus("prometheus.yml")["scrape_configs"]
    (own,) = [job for job in jobs if job["job_name"] == NAME]
    return own


def _prometheus(name: str) -> dict[str, Any]:
    text = resources.files("dashboards").joinpath("prometheus", name).read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def dashboards(cluster: Cluster) -> list[dict[str, Any]]:
    """One ConfigMap each, for a size that `kubectl apply` can note; with the label that Grafana's sidecar wants."""
    config_maps = []
    for path in sorted(resources.files("dashboards").iterdir(), key=lambda file: file.name):
        if not path.name.endswith(".json"):
            continue
        dashboard = _with_datasource(json.loads(path.read_text(encoding="utf-8")), cluster.datasource_uid)
        made = lab_object(
            "v1",
            "ConfigMap",
            f"{NAME}-dashboard-{path.name.removesuffix('.json')}",
            cluster,
            data={path.name: json.dumps(dashboard, indent=1, sort_keys=True) + "\n"},
        )
        made["metadata"]["labels"] = LABELS | DASHBOARD_LABEL
        config_maps.append(made)
    return config_maps


def _with_datasource(part: Any, uid: str) -> Any:
    """The same with every reference to a Prometheus datasource turned to that one."""
    if isinstance(part, list):
        return [_with_datasource(item, uid) for item in part]
    if isinstance(part, dict):
        if part.get("type") == "prometheus" and "uid" in part:
            return part | {"uid": uid}
        return {key: _with_datasource(value, uid) for key, value in part.items()}
    return part
