"""Routes, and what the gateway turns away by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.gateway_lab import MODEL, Caller, gateway_lab

pytestmark = pytest.mark.anyio


async def test_models() -> None:
    async with gateway_lab() as lab:
        caller = await lab.get("/v1/models")
        assert caller.status == 200
        assert [model["id"] for model in caller.json["data"]] == [
            MODEL,
            f"{MODEL}:sequential",
            f"{MODEL}:batched",
        ]


async def test_pages_that_the_scheduler_fills() -> None:
    async with gateway_lab(ask=lambda path: [path]) as lab:
        for path in ("/scheduler", "/targets"):
            assert (await lab.get(path)).json == [path]
        described = (await lab.get("/lab")).json
        assert described["replicas"] == ["/replicas"]
        assert described["config"]["model"]["name"] == MODEL


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "bad_request"),
        (b"[]", 400, "bad_request"),
        ({"messages": []}, 400, "bad_request"),
        ({"model": 5}, 400, "bad_request"),
        ({"model": "gpt-4"}, 404, "unknown_model"),
        ({"model": MODEL, "prompt": "x" * 2000}, 413, "request_too_large"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_never_reaches_the_scheduler(body: Any, status: int, code: str, path: str) -> None:
    async with gateway_lab(max_body_bytes=1024) as lab:
        caller = await lab.post(body, path)
        assert (caller.status, caller.error_code) == (status, code)
        assert caller.answer_headers["x-tandem-reason"] == code
        assert lab.ended == {("", "rejected", code): 1}
        assert lab.engine.requests == []


async def test_an_upload_is_refused_at_the_limit_not_at_its_end() -> None:
    async with gateway_lab(max_body_bytes=1024) as lab:
        caller = await lab.post(b"", body_parts=[b"x" * 1000, b"x" * 25])
        assert caller.status == 413


async def test_a_client_that_leaves_its_upload_is_no_fault() -> None:
    async with gateway_lab() as lab:
        caller = Caller("/v1/completions", b"", body_parts=[b'{"model":'])
        caller.gone.set()
        await caller.call(lab.app)
        assert lab.ended == {("", "cancelled", "client_closed"): 1}


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb"])
async def test_a_request_id_that_logs_could_not_hold_is_refused(given: str) -> None:
    async with gateway_lab() as lab:
        caller = await lab.post({"model": MODEL}, headers={"x-request-id": given})
        assert (caller.status, caller.error_code) == (400, "bad_request")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_paths_that_are_not_there(method: str, path: str, status: int, code: str) -> None:
    async with gateway_lab() as lab:
        caller = await lab.get(path, method)
        assert (caller.status, caller.error_code) == (status, code)
