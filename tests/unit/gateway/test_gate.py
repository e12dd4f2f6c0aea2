"""Who comes in: keys on every path but those of probes, and headers within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from serving.gateway.api_keys import ApiKeys
from tests.unit.gateway.fake_engine import answers
from tests.unit.gateway.gateway_lab import MODEL, gateway_lab

pytestmark = pytest.mark.anyio

KEY = "alice-0123456789abcdef"
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
SHOWN = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    "path", ["/v1/models", "/scheduler", "/targets", "/lab", "/nothing", "/health/", "//health", "/-/routes"]
)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong-0123456789"}, {"api-key": KEY}])
async def test_without_a_key_every_page_is_401(path: str, headers: dict[str, str]) -> None:
    async with gateway_lab(keys=ApiKeys([KEY]), ask=lambda path: [path]) as lab:
        caller = await lab.get(path, headers=headers)
        assert (caller.status, caller.error_code) == (401, "invalid_api_key")
        assert caller.json["error"]["type"] == "authentication_error"
        assert caller.answer_headers["x-tandem-reason"] == "invalid_api_key"
        assert caller.answer_headers["www-authenticate"] == "Bearer"
        assert caller.answer_headers["connection"] == "close"
        assert b"wrong-" not in caller.got, "a key with a slip in it is still nearly a key"
        assert lab.ended == {("", "rejected", "invalid_api_key"): 1}


@pytest.mark.parametrize("path", ["/v1/models", "/scheduler", "/targets", "/lab", "/health"])
async def test_with_a_key_every_page_answers(path: str) -> None:
    async with gateway_lab(keys=ApiKeys([KEY]), ask=lambda path: [path]) as lab:
        assert (await lab.get(path, headers=SHOWN)).status == 200


async def test_health_needs_no_key() -> None:
    async with gateway_lab(keys=ApiKeys([KEY])) as lab:
        assert (await lab.get("/health")).json == {"status": "ok"}


async def test_kuberay_asks_without_a_key_whether_a_gateway_serves() -> None:
    async with gateway_lab(keys=ApiKeys([KEY])) as lab:
        caller = await lab.get("/-/healthz")
        assert (caller.status, caller.got) == (200, b"success")


async def test_without_a_key_no_body_is_read_and_no_scheduler_asked() -> None:
    async with gateway_lab(keys=ApiKeys([KEY])) as lab:
        caller = lab.caller(b"", body_parts=[b"{"])  # an upload that never ends
        await caller.call(lab.app)
        assert caller.status == 401
        assert lab.engine.requests == []


async def test_the_key_goes_no_further_than_the_gateway() -> None:
    async with gateway_lab(keys=ApiKeys([KEY])) as lab:
        lab.engine.script = answers(b"{}", 200)
        assert (await lab.post(ASKED, headers=SHOWN)).status == 200
        (exchange,) = lab.engine.requests
        assert KEY not in repr(exchange.headers)
        assert KEY not in repr(lab.spans.since(0))


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({f"x-{n}": "" for n in range(100)}, "/v1/models", 200),
        ({f"x-{n}": "" for n in range(101)}, "/v1/models", 431),
        ({"x-long": "x" * 32_000}, "/v1/models", 200),
        ({"x-long": "x" * 32_768}, "/v1/models", 431),
        ({"x" * 32_768: ""}, "/v1/models", 431),
        ({}, "/v1/models?" + "q" * 32_768, 431),
        ({}, "/" + "p" * 32_768, 431),
        ({"x-long": "x" * 32_768}, "/health", 431),
    ],
)
async def test_headers_are_bounded_in_number_and_size(
    headers: dict[str, str], path: str, status: int
) -> None:
    async with gateway_lab() as lab:
        caller = await lab.get(path, headers=headers)
        assert caller.status == status
        if status == 431:
            assert caller.error_code == "headers_too_large"
            assert lab.ended == {("", "rejected", "headers_too_large"): 1}
            assert len(caller.got) < 500


async def test_an_error_does_not_repeat_a_long_path() -> None:
    async with gateway_lab() as lab:
        for method, path in (("GET", "/" + "p" * 5000), ("GET", "/v1/completions")):
            assert len((await lab.get(path, method)).got) < 500


@pytest.mark.parametrize(
    "path", ["/docs", "/redoc", "/openapi.json", "/v1/models/", "/v1//models", "/v1/../lab"]
)
async def test_no_page_beside_the_named_ones_and_no_redirect(path: str) -> None:
    async with gateway_lab() as lab:
        assert (await lab.get(path, headers={"host": "elsewhere"})).status == 404


@pytest.mark.parametrize("host", ["x/pause?a=", "[", "x#"])
async def test_the_host_header_chooses_no_path(host: str) -> None:
    async with gateway_lab() as lab:
        lab.engine.script = answers(b"{}", 200)
        assert (await lab.post(ASKED, "/v1/completions", headers={"host": host})).status == 200
        assert [exchange.path for exchange in lab.engine.requests] == ["/v1/completions"]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model":' * 100_000,
        b'{"model": "m", "n": ' + b"9" * 100_000 + b"}",
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "\\ud800"}',
        b"\xff",
        b"",
    ],
)
async def test_json_made_to_hurt_is_400(body: bytes) -> None:
    async with gateway_lab() as lab:
        caller = await lab.post(body)
        assert (caller.status, caller.error_code) == (400, "bad_request")
        assert len(caller.got) < 600
