"""Deploys a config on a Ray cluster over what runs there, as `serve deploy` does: `deploy_again ADDRESS FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import yaml
from ray import serve

from serving.core.ray_application import APP_NAME
from serving.deployments import build


def main(address: str, path: str) -> None:
    ray.init(address=address, namespace=APP_NAME, log_to_driver=False)
    application = build(yaml.safe_load(Path(path).read_text()))
    serve.run_many(
        [serve.RunTarget(application, name=APP_NAME, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
