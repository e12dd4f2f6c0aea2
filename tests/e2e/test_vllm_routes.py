"""Which of vLLM's routes can be reached: at a replica's port those of the lab, at the gateway its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from serving.engines.route_filter import LAB_ROUTES, only_lab_routes
from tests.unit.gateway.gateway_lab import Caller, gateway_lab

pytestmark = [pytest.mark.model, pytest.mark.anyio]

# In a process of its own: vLLM changes what others find in the interpreter.
LIST_ROUTES = """
import json
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m"])
app = build_app(args, ("generate",))
found = [(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ["GET"]]
print(json.dumps(found))
"""
# Its routes that the gateway serves too, by itself.
GATEWAY_ROUTES = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
}


@pytest.fixture(scope="module")
def vllm_routes() -> set[tuple[str, str]]:
    """Method and path of each, those of vLLM's development mode included."""
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    listing = subprocess.run(
        [sys.executable, "-c", LIST_ROUTES], env=environment, capture_output=True, text=True, check=False
    )
    assert listing.returncode == 0, listing.stderr
    found = {(method, path) for method, path in json.loads(listing.stdout.splitlines()[-1])}
    assert {("POST", "/sleep"), ("POST", "/collective_rpc"), ("POST", "/tokenize"), ("GET", "/docs")} <= found
    return found


async def everything(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("the engine answered")(scope, receive, send)


async def test_of_vllms_routes_a_replica_serves_those_of_the_lab(vllm_routes: set[tuple[str, str]]) -> None:
    assert vllm_routes >= LAB_ROUTES, "the names are vLLM's"
    app = only_lab_routes(everything)
    served = set()
    for method, path in vllm_routes:
        caller = Caller(path, b"", method)
        await caller.call(app)
        assert caller.status in (200, 404)
        if caller.status == 200:
            served.add((method, path))
    assert served == LAB_ROUTES


async def test_none_of_vllms_other_routes_answers_at_the_gateway(vllm_routes: set[tuple[str, str]]) -> None:
    async with gateway_lab(ask=lambda path: [path]) as lab:
        for method, path in sorted(vllm_routes):
            caller = await lab.get(path.replace("{response_id}", "resp_1"), method, headers={})
            if (method, path) in GATEWAY_ROUTES:
                assert caller.status not in (404, 405), path
            else:
                assert caller.status in (404, 405), f"{method} {path} answered {caller.status}"
                assert lab.engine.requests == []
