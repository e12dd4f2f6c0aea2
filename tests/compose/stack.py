"""The services of docker-compose.yml, as a project of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.running_lab import RunningLab, free_port

ROOT = Path(__file__).parents[2]
PROJECT = "tandem-compose-test"
# Grafana is left out: its data source and dashboards have tests of their own.
SERVICES = ("head", "worker", "prometheus", "locust", "locust-worker")
NUM_WORKERS = 2
ENGINES_PER_WORKER = 2
BUILD_LIMIT_S = 1200
START_LIMIT_S = 420
PORT_VARIABLES = ("TANDEM_API_PORT", "TANDEM_PROMETHEUS_PORT", "TANDEM_GRAFANA_PORT", "TANDEM_LOCUST_PORT")


def why_no_compose() -> str | None:
    """Why Compose cannot even read files here, in words; None when it can."""
    return _why_not("compose", "version")


def why_no_engine() -> str | None:
    """Why no containers can be started here, in words; None when they can."""
    return why_no_compose() or _why_not("info")


def _why_not(*arguments: str) -> str | None:
    if shutil.which("docker") is None:
        return "there is no `docker` command"
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    return f"docker {' '.join(arguments)}: {done.stderr.strip()}" if done.returncode else None


def clean_environment() -> dict[str, str]:
    """This process's environment without settings for docker-compose.yml."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TANDEM_", "COMPOSE_", "GRAFANA_"))
    }


def docker(*arguments: str, limit_s: float = 120) -> str:
    """Output of a docker command.

    Raises:
        AssertionError: it failed; the text holds its output.
    """
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Worker:
    """A container with engines.

    Attributes:
        address: its IP address in the project's network.
    """

    container: str
    address: str


@dataclass(frozen=True)
class Stack:
    """The running services, by their ports on this machine."""

    environment: dict[str, str]

    @property
    def lab(self) -> RunningLab:
        """The lab as its clients know it."""
        return RunningLab(self._url("TANDEM_API_PORT"), "smollm2-135m", self.environment)

    @property
    def prometheus_url(self) -> str:
        return self._url("TANDEM_PROMETHEUS_PORT")

    @property
    def locust_url(self) -> str:
        return self._url("TANDEM_LOCUST_PORT")

    @property
    def network(self) -> str:
        return f"{PROJECT}_default"

    def compose(self, *arguments: str, limit_s: float = 120) -> str:
        """Output of a command of Compose for this project.

        Raises:
            AssertionError: it failed; the text holds its output.
        """
        # No .env of the user's: the test brings its own settings.
        command = ["docker", "compose", "--project-name", PROJECT, "--env-file", os.devnull, *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-8000:]}{done.stderr[-8000:]}"
        return done.stdout

    def is_whole(self) -> bool:
        """Whether every replica that the config asks for is ready."""
        try:
            self.compose("exec", "-T", "head", "tandem", "status")
        except AssertionError:
            return False
        return True

    def logs(self) -> str:
        """The last lines of every container."""
        return self.compose("logs", "--no-color", "--tail", "80")

    def workers(self) -> list[Worker]:
        """The workers that are in the network now."""
        containers = json.loads(docker("inspect", *self.compose("ps", "-q", "worker").split()))
        found = [
            Worker(one["Name"].lstrip("/"), one["NetworkSettings"]["Networks"][self.network]["IPAddress"])
            for one in containers
            if self.network in one["NetworkSettings"]["Networks"]
        ]
        return [worker for worker in found if worker.address]

    def lanes_on(self, worker: Worker) -> list[str]:
        """The lanes that have a replica there."""
        return [
            lane["lane"]
            for lane in self.lab.get("/scheduler")["lanes"]
            for replica in lane["replicas"]
            if replica["url"].split("//")[-1].split(":")[0] == worker.address
        ]

    def _url(self, port_variable: str) -> str:
        return f"http://127.0.0.1:{self.environment[port_variable]}"


@contextmanager
def running_stack(log: Callable[[str], Any]) -> Iterator[Stack]:
    """Build the image, start the services, and take everything down whatever happens.

    Args:
        log: receives the containers' logs when the start failed.

    Raises:
        AssertionError: the services did not become healthy, or something is left of them.
    """
    ports = {name: str(free_port()) for name in PORT_VARIABLES}
    stack = Stack(clean_environment() | ports | {"TANDEM_ENGINES": str(ENGINES_PER_WORKER)})
    try:
        stack.compose("build", "--quiet", "head", limit_s=BUILD_LIMIT_S)
        scale = f"worker={NUM_WORKERS}"
        limit = ("--wait", "--wait-timeout", str(START_LIMIT_S))
        stack.compose("up", "--detach", *limit, "--scale", scale, *SERVICES, limit_s=START_LIMIT_S + 60)
        yield stack
    except BaseException:
        log(stack.logs())
        raise
    finally:
        stack.compose("down", "--volumes", limit_s=180)
    assert leftovers() == []


def leftovers() -> list[str]:
    """Names of the project's containers, volumes and networks."""
    mine = ("--filter", f"label=com.docker.compose.project={PROJECT}")
    containers = docker("ps", "--all", "--format", "{{.Names}}", *mine)
    volumes = docker("volume", "ls", "--format", "{{.Name}}", *mine)
    networks = docker("network", "ls", "--format", "{{.Name}}", *mine)
    return (containers + volumes + networks).split()
