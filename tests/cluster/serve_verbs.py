"""What others do with Serve on a cluster: `serve_verbs ADDRESS start|shutdown|run NAME|show`.

`show` prints the names of the applications as JSON, or null when no Serve is there.
"""

from __future__ import annotations

import json
import sys

from serving import ray_environment  # noqa: F401  # isort: skip - must come before Ray

import ray
from ray import serve
from ray.serve.config import ProxyLocation


class Other:
    """Somebody's application."""


def main(address: str, verb: str, *names: str) -> None:
    ray.init(address=address, log_to_driver=False)
    if verb == "start":
        serve.start(proxy_location=ProxyLocation.Disabled)
    elif verb == "shutdown":
        serve.shutdown()
    elif verb == "run":
        serve.start(proxy_location=ProxyLocation.Disabled)
        other = serve.deployment(Other, ray_actor_options={"num_cpus": 0})
        for name in names:
            serve.run(other.bind(), name=name, route_prefix=None)
    else:
        actors = ray.util.list_named_actors(all_namespaces=True)
        is_there = any(actor["namespace"] == "serve" for actor in actors)
        sys.stdout.write(json.dumps(sorted(serve.status().applications) if is_there else None))


if __name__ == "__main__":
    main(*sys.argv[1:])
