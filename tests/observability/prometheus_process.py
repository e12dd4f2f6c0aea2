"""A Prometheus of the test's own: its port, its data, ended with the test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.running_lab import free_port, wait_until

SHIPPED = Path(__file__).parents[2] / "dashboards" / "prometheus"


def installed(name: str) -> str:
    """Path of a program of Debian's package `prometheus`."""
    found = shutil.which(name)
    assert found, f"{name} is not installed: apt-get install --no-install-recommends prometheus"
    return found


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def ask(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer of its API.

        Raises:
            AssertionError: it refuses; the text holds its reason.
        """
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer.get("error")
        return answer["data"]

    def targets(self, job: str) -> list[dict[str, Any]]:
        """Active targets of a job."""
        found = self.ask("targets", state="active")["activeTargets"]
        return [target for target in found if target["labels"]["job"] == job]

    def series(self, expr: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """The result of a range query, one point a second."""
        data = self.ask("query_range", query=expr, start=start_s, end=end_s, step="1s")
        assert data["resultType"] == "matrix"
        result: list[dict[str, Any]] = data["result"]
        return result


def config_for(lab_url: str, load_port: int, directory: Path) -> Path:
    """The shipped configuration, pointed at the lab and the load tool of the test, and quicker."""
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(SHIPPED / pattern) for pattern in config["rule_files"]]
    lab, load = config["scrape_configs"]
    lab["http_sd_configs"] = [{"url": f"{lab_url}/targets", "refresh_interval": "1s"}]
    load["static_configs"] = [{"targets": [f"127.0.0.1:{load_port}"]}]
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running_prometheus(lab_url: str, load_port: int, directory: Path) -> Iterator[Prometheus]:
    """Start it, and end it whatever happens."""
    port = free_port()
    command = [
        installed("prometheus"),
        f"--config.file={config_for(lab_url, load_port, directory)}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = (directory / "prometheus.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (directory / "prometheus.log").read_text()
        try:
            return httpx.get(f"{url}/-/ready", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, "Prometheus is ready", limit_s=30)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()
