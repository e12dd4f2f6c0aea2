"""Keys that the head has not: the lab must not start open."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.nodes import ray_cluster
from tests.running_lab import free_port, tandem
from tests.security.conftest import CONFIG, ENVIRONMENT_KEY


def test_a_lab_whose_keys_do_not_reach_the_gateway_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "lab.yaml"
    config.write_text(json.dumps(CONFIG | {"gateway": {"port": free_port()}}))
    with ray_cluster() as cluster:
        cluster.start_worker(1)
        environment = cluster.environment | {
            "TANDEM_API_KEYS": ENVIRONMENT_KEY,
            "TANDEM_STATE": str(tmp_path),
        }
        try:
            started = tandem(
                "up",
                "--config",
                str(config),
                "--address",
                cluster.address,
                "--detach",
                environment=environment,
            )
        finally:
            tandem("down", environment=environment)
    assert started.returncode == 1, started.stdout + started.stderr
    assert (
        "TANDEM_API_KEYS is set where the lab was started, and not where this gateway runs" in started.stderr
    )
    assert ENVIRONMENT_KEY not in started.stdout + started.stderr
