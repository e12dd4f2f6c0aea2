"""What a request looks like when it goes to a server that is not ours, and whose words its answers are."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from serving.config import GatewayConfig, LabConfig, LaneConfig
from serving.core.errors import ConfigError, UpstreamError
from serving.core.lane import AttachedServer
from serving.gateway.attached import ServerKeys, check_status
from serving.gateway.client_response import ClientResponse
from serving.gateway.openai_request import RoutedRequest, route
from serving.gateway.relay import relay
from serving.gateway.stream import StreamNotes
from serving.gateway.upstream import UpstreamClient
from serving.scheduler.protocol import Granted
from tests.unit.gateway.fake_engine import answers, fake_engine
from tests.unit.gateway.gateway_lab import MODEL, gateway_lab

LANE = LaneConfig.model_validate(
    {
        "name": "theirs",
        "strategy": "batched",
        "engine": "openai",
        "urls": ["http://a/v1"],
        "api_key_env": "THEIR_KEY",
    }
)
KEYS = ServerKeys.of([LANE], {"THEIR_KEY": "secret-1"})


def granted(url: str = "http://a", *, takes_stream_options: bool = True) -> Granted:
    server = AttachedServer(url, "theirs/model-1", takes_stream_options)
    return Granted("r", "theirs-1", "theirs", "http://127.0.0.1:9", server)


def routed(**fields: Any) -> RoutedRequest:
    raw = json.dumps({"model": "smollm2-135m:theirs", "messages": [], **fields}).encode()
    config = LabConfig(lanes=(LANE,))
    return route(raw, {}, request_id="r", is_chat=True, config=config)


def test_it_gets_its_own_name_of_the_model_and_the_key() -> None:
    post = KEYS.post(granted(), routed(seed=2**60, temperature=0.10, stream=True))
    assert post.url == "http://a"
    assert post.headers == {"authorization": "Bearer secret-1", "connection": "close"}
    sent = json.loads(post.body)
    assert sent["model"] == "theirs/model-1"
    assert sent["stream_options"] == {"include_usage": True}
    assert b"1152921504606846976" in post.body, "values are sent as they came"
    assert b"0.1" in post.body


def test_a_server_that_the_config_does_not_name_is_shown_no_key() -> None:
    assert KEYS.post(granted("http://b"), routed()).headers == {"connection": "close"}


@pytest.mark.anyio
@pytest.mark.parametrize(("is_well", "breaker"), [(True, "closed"), (False, "open")])
async def test_a_path_that_a_well_server_lacks_takes_it_from_nobody_else(is_well: bool, breaker: str) -> None:
    async with gateway_lab(scheduler={"breaker_failures": 1}) as lab, fake_engine() as agent:
        lab.engine.script = answers(b"{}", 404)
        agent.is_healthy = is_well
        server = AttachedServer(lab.engine.url, "theirs/model-1")
        async with lab.plane.replica("t", "batched", url=agent.url, server=server):
            while not any(b"theirs/model-1" in exchange.body for exchange in lab.engine.requests):
                await lab.post({"model": f"{MODEL}:batched", "prompt": "hi"}, "/v1/completions")
            replicas = {one["replica"]: one["breaker"] for one in lab.plane.lane("batched")["replicas"]}
            assert replicas == {"t": breaker, "b": "closed"}


def test_usage_is_not_asked_of_a_server_that_refuses_the_wish() -> None:
    refusing = granted(takes_stream_options=False)
    assert b"stream_options" not in KEYS.post(refusing, routed(stream=True)).body
    asked = routed(stream=True, stream_options={"include_usage": True})
    assert b"stream_options" in KEYS.post(refusing, asked).body, "the client's own wish is the client's"


def test_an_engine_of_ours_gets_the_very_bytes_and_no_key() -> None:
    ours, request = Granted("r", "b-1", "theirs", "http://127.0.0.1:9"), routed()
    post = KEYS.post(ours, request)
    assert (post.url, post.body, post.headers) == ("http://127.0.0.1:9", request.body, {})


@pytest.mark.anyio
@pytest.mark.parametrize(("server", "num_connections"), [(granted().server, 2), (None, 1)])
async def test_its_requests_have_a_connection_each_and_those_of_our_engines_share_one(
    server: AttachedServer | None, num_connections: int
) -> None:
    upstream = UpstreamClient(GatewayConfig())
    async with fake_engine() as engine:
        engine.script = answers(b"{}")
        headers = KEYS.post(Granted("r", "theirs-1", "theirs", engine.url, server), routed()).headers
        for _ in range(2):
            async with upstream.post(engine.url, b"{}", "r", headers, is_stream=False) as answer:
                while await answer.block() is not None:
                    pass
        await upstream.close()
        assert len({exchange.writer for exchange in engine.requests}) == num_connections


@pytest.mark.parametrize("status", [401, 403, 404, 307])
def test_what_the_lab_got_wrong_is_no_answer_to_the_client(status: int) -> None:
    with pytest.raises(UpstreamError, match=rf"answered the lab {status} .*api_key_env") as raised:
        check_status(granted(), status)
    assert (raised.value.is_answer, raised.value.was_begun) == (True, False), "its health check is asked"
    check_status(Granted("r", "b-1", "theirs", "http://127.0.0.1:9"), status)


def test_a_server_that_takes_no_requests_now_has_not_begun_with_one() -> None:
    with pytest.raises(UpstreamError, match="the server of lane theirs answered the lab 503") as raised:
        check_status(granted(), 503)
    assert (raised.value.was_begun, raised.value.is_answer) == (False, False), "it is run elsewhere"
    check_status(
        Granted("r", "b-1", "theirs", "http://127.0.0.1:9"), 503
    )  # `x-tandem-not-begun` says it of ours


@pytest.mark.parametrize("status", [200, 400, 422, 429, 500])
def test_all_else_is(status: int) -> None:
    check_status(granted(), status)


class Client:
    """What the gateway answers."""

    async def answer(self, status: int, content_type: str, body: bytes, headers: dict[str, str]) -> None:
        self.answered = (status, body)


async def relayed(
    body: bytes, status: int, key: str, content_type: str = "application/json"
) -> tuple[int, bytes]:
    """What becomes of a server's answer."""
    upstream, client = UpstreamClient(GatewayConfig()), Client()
    async with fake_engine() as engine:
        engine.script = answers(body, status, content_type)
        async with upstream.post(engine.url, b"{}", "r", {}, is_stream=False) as answer:
            await relay(answer, cast(ClientResponse, client), StreamNotes(strip_usage=False), key=key)
        await upstream.close()
    return client.answered


@pytest.mark.anyio
async def test_a_refusal_keeps_the_server_s_words_but_not_the_lab_s_key() -> None:
    post = KEYS.post(granted(), routed())
    said = b'{"error": {"message": "temperature: %s; Bearer %s may not", "input": "my words"}}'
    refused = await relayed(said % (b"9", b"secret-1"), 400, post.key)
    assert refused == (400, said % (b"9", b"[key]"))
    answer = b'{"text": "secret-1"}'
    assert await relayed(answer, 200, post.key) == (200, answer), "it is passed as it is"
    quoting = 'qu"ot'
    assert await relayed(json.dumps([quoting]).encode(), 422, quoting) == (422, b'["[key]"]')
    assert await relayed(b"plain", 422, "") == (422, b"plain")
    for status, words in ((500, b"%s"), (200, b'{"error": {"message": "%s"}}')):
        with pytest.raises(UpstreamError) as raised:
            await relayed(words % b"broken by secret-1", status, post.key)
        assert raised.value.quoted == "broken by [key]"
    event = b'data: {"error": {"message": "no secret-1"}}\n\n'
    with pytest.raises(UpstreamError) as raised:
        await relayed(event, 200, post.key, "text/event-stream")
    assert raised.value.quoted == "no [key]"


def test_a_key_that_no_header_can_carry_is_not_shown_in_the_error() -> None:
    with pytest.raises(ConfigError, match="printable ASCII without spaces") as raised:
        ServerKeys.of([LANE], {"THEIR_KEY": "secret 2"})
    assert "secret 2" not in str(raised.value)
