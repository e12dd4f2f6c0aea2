"""The manifests for Kubernetes: committed as made, right by their schemas, and right with each other."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from click.testing import CliRunner

from serving import config
from serving.cli.verbs import tandem
from serving.core.errors import ConfigError
from serving.doctor import ENGINE_MEMORY_GIB
from serving.export.kuberay import manifests
from serving.export.kuberay.objects import LABELS, Cluster
from serving.export.kuberay.ray_service import USER_ID, Worker

CHECKOUT = Path(__file__).parents[3]
COMMITTED = CHECKOUT / "deploy" / "kuberay"
SCHEMAS = yaml.safe_load((Path(__file__).parent / "kubernetes_schemas.yaml").read_text())
CLUSTER = Cluster("tandem:cpu", "tandem", "tandem-redis:6379", "prometheus")
# With what no pod has: servers that already run, a checkpoint and a profile of this machine's.
REFUSED = {
    "attached": r"engine = 'openai'",
    "tensor-parallel": r"lanes\[batched\]\.num_gpus = 0",
    "comparison": r"engine = 'openai'",
    "quantised": r"lanes\[int8\]\.model\.path",
    "study-adaptive": r"scheduler\.profile",
}
CONFIGS = sorted({path.stem for path in (CHECKOUT / "deploy").glob("*.yaml")} - REFUSED.keys())
CORE = {"Namespace", "NetworkPolicy", "ConfigMap"}


def made(name: str = "lab") -> list[dict[str, Any]]:
    """Every object for one of the shipped configs."""
    lab = config.load(CHECKOUT / "deploy" / f"{name}.yaml")
    return [one for text in manifests.files(lab, CLUSTER).values() for one in yaml.safe_load_all(text)]


def only(kind: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def ray_cluster(name: str = "lab") -> dict[str, Any]:
    found: dict[str, Any] = only("RayService", made(name))["spec"]["rayClusterConfig"]
    return found


def workers(name: str) -> dict[str, Any]:
    (found,) = ray_cluster(name)["workerGroupSpecs"]
    return dict(found)


def pod_templates(name: str) -> list[dict[str, Any]]:
    return [ray_cluster(name)["headGroupSpec"]["template"], workers(name)["template"]]


def check_custom(found: dict[str, Any]) -> None:
    """Raises: jsonschema.ValidationError: it is not of its schema."""
    schema = SCHEMAS[found["kind"]] | {"definitions": SCHEMAS["definitions"]}
    jsonschema.Draft202012Validator(schema).validate(found)


def test_what_is_committed_is_what_the_command_makes(tmp_path: Path) -> None:
    lab = str(CHECKOUT / "deploy" / "lab.yaml")
    result = CliRunner().invoke(tandem, ["export", "kuberay", "--config", lab, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in COMMITTED.iterdir()}
    for name in names:
        assert (tmp_path / name).read_text() == (COMMITTED / name).read_text(), (
            f"{name}: tandem export kuberay --out deploy/kuberay"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_custom_resources_have_their_fields_and_no_others(name: str) -> None:
    custom = [one for one in made(name) if one["kind"] not in CORE]
    assert {one["kind"] for one in custom} == set(SCHEMAS) - {"definitions"}
    for one in custom:
        check_custom(one)


@pytest.mark.parametrize(
    ("kind", "where"),
    [("RayService", "rayClusterConfg"), ("ScrapeConfig", "httpSdConfigs"), ("PodMonitor", "podTargets")],
)
def test_the_schemas_refuse_a_misspelt_field(kind: str, where: str) -> None:
    one = only(kind, made())
    one["spec"][where] = []
    with pytest.raises(jsonschema.ValidationError, match=where):
        check_custom(one)


@pytest.mark.parametrize("name", CONFIGS)
def test_kubernetes_own_objects_are_right_by_its_schemas(name: str) -> None:
    objects = [one for one in made(name) if one["kind"] in CORE]
    objects += [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        for template in pod_templates(name)
    ]
    service = only("RayService", made(name))["spec"]["serveService"]
    objects.append({"apiVersion": "v1", "kind": "Service", **service})
    assert len(objects) >= 5
    for one in objects:
        kubernetes_validate.validate(one, "1.34", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(one | {"specc": {}}, "1.34", strict=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_pods_keep_the_restricted_standard_that_the_namespace_demands(name: str) -> None:
    labels = only("Namespace", made(name))["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for template in pod_templates(name):
        pod = template["spec"]["securityContext"]
        assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert pod["runAsUser"] > 0
        for container in template["spec"]["containers"]:
            own = container["securityContext"]
            assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {"readinessProbe", "livenessProbe"} <= set(container)


def test_pods_run_as_the_user_of_the_image() -> None:
    assert f"--uid {USER_ID} " in (CHECKOUT / "deploy" / "Dockerfile").read_text()


def test_the_ray_version_is_the_installed_one() -> None:
    assert ray_cluster()["rayVersion"] == version("ray")


@pytest.mark.parametrize(
    ("name", "engines", "pods"), [("lab", 1, (3, 3, 3)), ("gpu", 2, (1, 1, 1)), ("scale", 1, (3, 3, 10))]
)
def test_workers_offer_a_place_for_every_engine(name: str, engines: int, pods: tuple[int, ...]) -> None:
    group = workers(name)
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == pods
    # The shell takes one pair of quotes off; Ray's autoscaler cuts it off and drops the backslashes.
    resources = group["rayStartParams"]["resources"]
    (by_shell,) = shlex.split(resources)
    by_autoscaler = resources[1:-1].replace("\\", "")
    assert json.loads(by_shell) == json.loads(by_autoscaler) == {"tandem_engine": engines}


def test_the_head_offers_none() -> None:
    assert ray_cluster()["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in ray_cluster()["headGroupSpec"]["rayStartParams"]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_service_of_the_namespace_sets_a_variable_in_a_pod(name: str) -> None:
    """A Service named `vllm` would set VLLM_PORT to an address."""
    assert [one["spec"]["enableServiceLinks"] for one in pod_templates(name)] == [False, False]


def test_ray_scales_the_pods_only_where_lanes_scale() -> None:
    assert [ray_cluster(name)["enableInTreeAutoscaling"] for name in ("lab", "scale")] == [False, True]
    # Its autoscaler runs beside the head and talks to Kubernetes; workers do not.
    tokens = [one["spec"]["automountServiceAccountToken"] for one in pod_templates("scale")]
    assert tokens == [True, False]


def test_two_engines_on_one_gpu_share_a_pod() -> None:
    lab = config.load(CHECKOUT / "deploy" / "gpu.yaml")
    assert Worker.of(lab).gpus == 1
    (container,) = workers("gpu")["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["volumeMounts"][0]["mountPath"] == "/models"
    (container,) = workers("lab")["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert "volumeMounts" not in container


@pytest.mark.parametrize(
    ("lane", "engines", "gpus"),
    [
        ({}, 1, 0),
        ({"num_gpus": 1}, 1, 1),
        ({"num_gpus": 0.5}, 2, 1),
        ({"num_gpus": 0.3}, 3, 1),
        ({"num_gpus": 2}, 1, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1, 4),
    ],
)
def test_worker_shapes(lane: dict[str, Any], engines: int, gpus: int) -> None:
    found = Worker.of(config.from_data({"lanes": [{"name": "a", "strategy": "batched"} | lane]}, "x"))
    assert (found.engines, found.gpus) == (engines, gpus)
    assert found.cpus >= 2 * engines


def test_a_model_that_no_pod_would_find_is_refused() -> None:
    lab = config.from_data(
        {"model": {"path": "/home/me/model"}, "lanes": [{"name": "a", "strategy": "batched"}]}, "x"
    )
    with pytest.raises(ConfigError, match=r"model\.path = '/home/me/model': .* /models"):
        manifests.files(lab, CLUSTER)


def test_a_pod_has_memory_for_each_rank_of_an_engine_on_cpu() -> None:
    def memory_gib(**lane: Any) -> int:
        lanes = [{"name": "a", "strategy": "batched", "kv_cache_gib": 4} | lane]
        return Worker.of(config.from_data({"model": {"device": "cpu"}, "lanes": lanes}, "x")).memory_gib

    assert memory_gib(tensor_parallel_size=3) == memory_gib() + 2 * (4 + ENGINE_MEMORY_GIB)


@pytest.mark.parametrize("name", REFUSED)
def test_examples_with_what_no_pod_has_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        made(name)


def test_a_profile_that_no_pod_has_is_refused() -> None:
    lanes = [{"name": "a", "strategy": "batched"}]
    lab = config.from_data(
        {"scheduler": {"placement": "adaptive", "profile": "/p.json"}, "lanes": lanes}, "x"
    )
    with pytest.raises(ConfigError, match=r"scheduler\.profile = '/p\.json': .* scheduler\.placement"):
        manifests.files(lab, CLUSTER)


def test_a_file_of_keys_that_no_pod_has_is_refused() -> None:
    lanes = [{"name": "a", "strategy": "batched"}]
    lab = config.from_data({"gateway": {"api_keys_file": "/etc/keys"}, "lanes": lanes}, "x")
    with pytest.raises(ConfigError, match=r"gateway\.api_keys_file = '/etc/keys': .* Secret"):
        manifests.files(lab, CLUSTER)


def test_prometheus_asks_where_the_gateways_are_and_shows_a_key() -> None:
    objects = made("scale")
    (discovery,) = only("ScrapeConfig", objects)["spec"]["httpSDConfigs"]
    assert discovery["url"] == "http://tandem-gateway.tandem.svc:8000/targets"
    container = ray_cluster()["headGroupSpec"]["template"]["spec"]["containers"][0]
    names = [one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if "valueFrom" in one]
    assert names == [discovery["authorization"]["credentials"]["name"]]


@pytest.mark.parametrize("name", CONFIGS)
def test_gateways_are_on_the_head_and_so_is_the_service_s_only_endpoint(name: str) -> None:
    spec = only("RayService", made(name))["spec"]
    serve = yaml.safe_load(spec["serveConfigV2"])
    (application,) = serve["applications"]
    lab = config.from_data(application["args"], "args")
    assert (serve["proxy_location"], application["route_prefix"]) == ("Disabled", None)
    assert lab.gateway.host == "0.0.0.0"
    (port,) = spec["serveService"]["spec"]["ports"]
    assert port == {"name": "serve", "port": lab.gateway.port, "targetPort": "serve"}
    on_head, on_worker = (
        {one["name"]: one["containerPort"] for one in template["spec"]["containers"][0]["ports"]}
        for template in pod_templates(name)
    )
    assert on_head["serve"] == lab.gateway.port
    assert "serve" not in on_worker


@pytest.mark.parametrize("name", CONFIGS)
def test_only_host_and_number_of_gateways_are_not_as_in_the_config(name: str) -> None:
    lab = config.load(CHECKOUT / "deploy" / f"{name}.yaml")
    serve = yaml.safe_load(only("RayService", made(name))["spec"]["serveConfigV2"])
    args = serve["applications"][0]["args"]
    assert args["gateway"]["replicas"] == (lab.gateway.replicas or 1), "what the head is sized for"
    args["gateway"] |= {"host": lab.gateway.host, "replicas": lab.gateway.replicas}
    assert config.from_data(args, "args") == lab


@pytest.mark.parametrize("name", CONFIGS)
def test_no_service_of_the_namespace_sets_variables_in_a_pod(name: str) -> None:
    assert [one["spec"]["enableServiceLinks"] for one in pod_templates(name)] == [False, False]


def test_ray_s_metrics_are_scraped_once_and_under_the_lab_s_labels() -> None:
    dropped, job = only("ScrapeConfig", made())["spec"]["relabelings"]
    assert (dropped["action"], dropped["sourceLabels"], dropped["regex"]) == ("drop", ["role"], "ray")
    (endpoint,) = only("PodMonitor", made())["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "role", "replacement": "ray"} in endpoint["relabelings"]
    assert job in endpoint["relabelings"]
    ours = yaml.safe_load((CHECKOUT / "dashboards" / "prometheus" / "prometheus.yml").read_text())
    (scrape,) = [one for one in ours["scrape_configs"] if one["job_name"] == "tandem"]
    rules = scrape["metric_relabel_configs"]
    assert [rule["regex"] for rule in endpoint["metricRelabelings"]] == [rule["regex"] for rule in rules]
    ports = [port["name"] for one in pod_templates("lab") for port in one["spec"]["containers"][0]["ports"]]
    assert ports.count(endpoint["port"]) == 2


def test_every_rule_is_taken_along() -> None:
    groups = only("PrometheusRule", made())["spec"]["groups"]
    folder = CHECKOUT / "dashboards" / "prometheus" / "rules"
    ours = [group for path in folder.iterdir() for group in yaml.safe_load(path.read_text())["groups"]]
    assert sorted(json.dumps(one) for one in groups) == sorted(json.dumps(one) for one in ours)


def test_dashboards_are_found_by_the_sidecar_and_ask_the_given_datasource() -> None:
    maps = [one for one in made() if one["kind"] == "ConfigMap"]
    names = {name for one in maps for name in one["data"]}
    assert names == {path.name for path in (CHECKOUT / "dashboards").glob("*.json")}
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = one["data"].values()
        assert len(text) < 262_144  # kubectl apply keeps a copy in an annotation of that size
        assert "tandem-prometheus" not in text
        assert '"uid": "prometheus"' in text
        assert json.loads(text)["uid"].startswith("tandem-")


def test_ray_s_ports_are_open_to_the_lab_and_its_keepers_only() -> None:
    rules = only("NetworkPolicy", made())["spec"]["ingress"]
    to_all = [port["port"] for rule in rules if "from" not in rule for port in rule["ports"]]
    assert to_all == [8000]
    everywhere = [rule for rule in rules if "ports" not in rule]
    assert [[one["podSelector"]["matchLabels"] for one in rule["from"]] for rule in everywhere] == [
        [LABELS, {"app.kubernetes.io/name": "prometheus"}]
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--namespace", ""),
        ("--namespace", "Upper_Case"),
        ("--namespace", "lab-"),
        ("--namespace", "a" * 64),
        ("--namespace", "x\ny: z"),
        ("--image", ""),
        ("--redis-address", "redis"),
        ("--datasource-uid", "my prometheus"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before_a_file_is_written(
    option: str, value: str, tmp_path: Path
) -> None:
    out = tmp_path / "manifests"
    result = CliRunner().invoke(tandem, ["export", "kuberay", "--out", str(out), option, value])
    assert result.exit_code == 2
    assert f"{option} = {value!r}: must be " in result.stderr
    assert not out.exists()
