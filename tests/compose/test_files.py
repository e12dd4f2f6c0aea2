"""docker-compose.yml, its overlay and what they mount, without starting anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.run.exporter import ADDRESS_VARIABLE, DEFAULT_PORT
from tests.compose.stack import ROOT, clean_environment, why_no_compose
from tests.observability.prometheus_process import SHIPPED

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
GPU = ("-f", "docker-compose.yml", "-f", "compose.gpu.yml")
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)")
PUBLISHED = re.compile(r"\$\{TANDEM_[A-Z]+_BIND:-127\.0\.0\.1\}:\$\{TANDEM_[A-Z]+_PORT:-\d+\}:\d+")


def config(*files: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """What Compose makes of the files."""
    return subprocess.run(
        ["docker", "compose", "--env-file", "/dev/null", *files, "config"],
        cwd=ROOT,
        env=clean_environment() | settings,
        capture_output=True,
        text=True,
        check=False,
    )


needs_compose = pytest.mark.skipif(why_no_compose() is not None, reason=f"no Compose: {why_no_compose()}")


def test_every_published_port_is_on_the_loopback_unless_set() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert [port for port in published if not PUBLISHED.fullmatch(port)] == []
    assert len(published) == 4


@needs_compose
@pytest.mark.parametrize("files", [(), GPU], ids=["cpu", "gpu"])
def test_compose_accepts_the_files_and_publishes_on_the_loopback(files: tuple[str, ...]) -> None:
    done = config(*files)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert services.keys() == SERVICES.keys()
    addresses = [port["host_ip"] for service in services.values() for port in service.get("ports", ())]
    assert addresses == ["127.0.0.1"] * 4


@needs_compose
def test_the_gpu_overlay_reserves_a_device_for_workers_only() -> None:
    services = yaml.safe_load(config(*GPU).stdout)["services"]
    with_device = [
        name
        for name, service in services.items()
        if service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    ]
    assert with_device == ["worker"]
    assert {one["build"]["args"]["ENGINE"] for one in services.values() if "build" in one} == {"gpu"}


def test_the_image_s_model_stage_has_every_module_that_it_imports(tmp_path: Path) -> None:
    copied = re.findall(
        r"^COPY (serving/.*) /build/", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE
    )
    for name in " ".join(copied).split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import serving.model_store as m; print(m.__file__)"],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_every_setting_is_explained_in_the_example_and_no_other() -> None:
    files = ("docker-compose.yml", "compose.gpu.yml")
    used = {name for file in files for name in VARIABLE.findall((ROOT / file).read_text())}
    explained = set(re.findall(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert explained == used


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "locust-worker"])
def test_a_service_says_when_it_is_ready_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"
    assert service["mem_limit"]


def test_what_is_mounted_exists() -> None:
    sources = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())]
    bound = [source for source in sources if source.startswith(".")]
    assert bound
    assert [source for source in bound if not (ROOT / source).exists()] == []


def grafana_entry(*, bind: str, password: str, run: Path) -> subprocess.CompletedProcess[str]:
    """Grafana's entry point, with another program in the place of the image's own."""
    shell, option, script = SERVICES["grafana"]["entrypoint"]
    script = script.replace("$$", "$").replace("/run.sh", str(run))
    environment = {"TANDEM_GRAFANA_BIND": bind, "GF_SECURITY_ADMIN_PASSWORD": password}
    return subprocess.run(
        [shell, option, script], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("bind", "password", "starts"),
    [("", "", True), ("", "secret", True), ("0.0.0.0", "", False), ("0.0.0.0", "secret", True)],
)
def test_grafana_beyond_the_loopback_needs_a_password(
    bind: str, password: str, starts: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run.sh"
    run.write_text("#!/bin/sh\necho started\n")
    run.chmod(0o755)
    done = grafana_entry(bind=bind, password=password, run=run)
    assert (done.returncode == 0) == starts == (done.stdout == "started\n")
    assert ("GRAFANA_ADMIN_PASSWORD" in done.stderr) != starts


def test_prometheus_in_a_container_is_the_shipped_one_with_other_addresses_and_a_key() -> None:
    shipped = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    here = yaml.safe_load((SHIPPED / "compose.yml").read_text())
    lab, load = here["scrape_configs"]
    (discovery,) = lab["http_sd_configs"]
    assert discovery.pop("url") == "http://head:8000/targets"
    key_file = discovery.pop("authorization")["credentials_file"]
    assert {"source": "api_key", "target": key_file} in SERVICES["prometheus"]["configs"]
    assert load.pop("static_configs") == [{"targets": [f"locust:{DEFAULT_PORT}"]}]
    assert SERVICES["locust"]["environment"][ADDRESS_VARIABLE] == "0.0.0.0"
    shipped_lab, shipped_load = shipped["scrape_configs"]
    del shipped_lab["http_sd_configs"][0]["url"], shipped_load["static_configs"]
    assert here == shipped


def test_who_measures_and_routes_gets_the_processors_before_the_engines() -> None:
    shares = {
        name: SERVICES[name].get("cpu_shares", 1024) for name in ("head", "locust", "locust-worker", "worker")
    }
    assert shares["worker"] < 1024 < min(share for name, share in shares.items() if name != "worker")
