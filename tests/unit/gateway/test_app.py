"""Routes, and what the gateway turns away by itself."""

from __future__ import annotations

from typing import Any

import pytest

from serving.gateway.api_keys import ApiKeys
from tests.unit.gateway.fake_engine import DONE, USAGE, answers, plays, text
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


@pytest.mark.parametrize("path", [f"/v1/models/{MODEL}", f"/v1/models/{MODEL}:batched"])
async def test_one_model(path: str) -> None:
    async with gateway_lab() as lab:
        caller = await lab.get(path)
        assert (caller.status, caller.json["object"]) == (200, "model")
        assert f"/v1/models/{caller.json['id']}" == path


@pytest.mark.parametrize("name", ["gpt-4", f"{MODEL}:warp", "a/b", "x" * 500])
async def test_one_model_that_is_not_served(name: str) -> None:
    async with gateway_lab() as lab:
        caller = await lab.get(f"/v1/models/{name}")
        assert (caller.status, caller.error_code) == (404, "unknown_model")
        assert len(caller.got) < 500


@pytest.mark.parametrize("path", ["/health", "/v1/models", f"/v1/models/{MODEL}", "/scheduler", "/lab"])
async def test_whatever_is_read_may_be_asked_for_its_head(path: str) -> None:
    async with gateway_lab(ask=lambda path: [path]) as lab:
        caller = await lab.get(path, "HEAD")
        assert caller.status == 200


REPLICA = {"replica": "b-1"}


@pytest.mark.parametrize(
    ("draining", "replicas", "status", "code"),
    [
        (False, [[], [REPLICA]], 200, None),
        (False, [[], []], 503, "no_replica_ready"),
        (True, [[REPLICA]], 503, "draining"),
    ],
)
async def test_ready_says_whether_anything_can_be_served(
    draining: bool, replicas: list[list[dict[str, str]]], status: int, code: str | None
) -> None:
    said = {"draining": draining, "lanes": [{"replicas": each} for each in replicas]}
    async with gateway_lab(ask=lambda _: said, keys=ApiKeys(["k" * 16])) as lab:
        caller = await lab.get("/ready")  # without a key, as a probe comes
        assert caller.status == status
        assert caller.json == {"status": "ready"} if code is None else caller.error_code == code


async def test_a_gateway_without_a_scheduler_is_not_ready() -> None:
    def gone(_: str) -> Any:
        raise ConnectionRefusedError

    async with gateway_lab(ask=gone) as lab:
        caller = await lab.get("/ready")
        assert (caller.status, caller.error_code) == (503, "scheduler_unreachable")


STREAM = plays(text("a"), USAGE, DONE)
PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


async def test_a_browser_asks_for_leave_without_a_key() -> None:
    async with gateway_lab(keys=ApiKeys(["k" * 16]), cors_allowed_origins=(PAGE,)) as lab:
        asked = await lab.get("/v1/chat/completions", "OPTIONS", headers=PREFLIGHT)
        assert (asked.status, asked.answer_headers["access-control-allow-origin"]) == (200, PAGE)
        stranger = await lab.get(
            "/v1/chat/completions", "OPTIONS", headers=PREFLIGHT | {"origin": "https://other.example"}
        )
        assert stranger.status == 400
        assert "access-control-allow-origin" not in stranger.answer_headers


async def test_a_page_that_may_reads_answers_and_refusals() -> None:
    async with gateway_lab(keys=ApiKeys(["k" * 16]), cors_allowed_origins=(PAGE,)) as lab:
        lab.engine.script = STREAM
        refused = await lab.post({"model": MODEL}, headers={"origin": PAGE})
        answered = await lab.post(
            {"model": MODEL, "stream": True}, headers={"origin": PAGE, "authorization": f"Bearer {'k' * 16}"}
        )
        assert (refused.status, answered.status) == (401, 200)
        for caller in (refused, answered):
            assert caller.answer_headers["access-control-allow-origin"] == PAGE
            assert "x-tandem-lane" in caller.answer_headers["access-control-expose-headers"]


async def test_without_origins_no_page_is_let_in() -> None:
    async with gateway_lab() as lab:
        assert (await lab.get("/v1/chat/completions", "OPTIONS", headers=PREFLIGHT)).status == 405
        lab.engine.script = STREAM
        answered = await lab.post({"model": MODEL}, headers={"origin": PAGE})
        assert not any(name.startswith("access-control") for name in answered.answer_headers)


async def test_a_stream_tells_caches_and_nginx_to_keep_nothing_back() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = STREAM
        stream = (await lab.post({"model": MODEL, "stream": True})).answer_headers
        assert (stream["cache-control"], stream["x-accel-buffering"]) == ("no-cache", "no")
        lab.engine.script = answers(b"{}")
        assert "cache-control" not in (await lab.post({"model": MODEL})).answer_headers


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
