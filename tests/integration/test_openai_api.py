"""The OpenAI API of a running lab, by the openai client and by hand."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

from serving.core import processor_time
from tests.running_lab import RunningLab, wait_until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LONG_TOKENS = 2000  # 20 s at 10 ms a step: never reached


def test_models_lists_the_bare_name_and_a_pin_for_each_lane(lab: RunningLab) -> None:
    names = [model.id for model in lab.client().models.list()]
    assert names == ["sim", "other", "sim:sequential", "sim:batched", "sim:speculative", "other:tuned"]


def test_engines_yield_and_what_routes_does_not(lab: RunningLab) -> None:
    described = httpx.get(f"{lab.url}/lab").json()
    ours = processor_time.niceness()
    assert {replica["niceness"] for replica in described["replicas"]} == {
        max(ours, processor_time.ENGINE_NICENESS)
    }
    assert described["priorities"]["gateway_niceness"] == ours
    # Ray gives it a session, hence a group; this process may be in none, which is as good as one that is 0 nice.
    its_group = described["priorities"]["gateway_group_niceness"]
    assert (its_group or 0) == (processor_time.group_niceness() or 0)
    group = processor_time.GROUP_NICENESS if processor_time.has_groups() else None
    assert {replica["group_niceness"] for replica in described["replicas"]} == {group}


@pytest.mark.parametrize("lane", ["sequential", "batched", "speculative"])
def test_a_pinned_lane_answers(lab: RunningLab, lane: str) -> None:
    raw = lab.client().chat.completions.with_raw_response.create(
        model=f"sim:{lane}", messages=HELLO, max_tokens=7
    )
    assert raw.headers["x-tandem-lane"] == lane
    answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].message.content == "simulated " * 7


def test_an_unpinned_request_goes_to_a_lane_that_takes_unpinned(lab: RunningLab) -> None:
    raw = lab.client().chat.completions.with_raw_response.create(model="sim", messages=HELLO, max_tokens=2)
    assert raw.headers["x-tandem-lane"] == "batched"


def test_a_stream_gives_every_token_and_usage_only_when_asked(lab: RunningLab) -> None:
    create = lab.client().chat.completions.create
    plain = list(create(model="sim", messages=HELLO, max_tokens=9, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in plain)
    assert text == "simulated " * 9
    assert all(chunk.usage is None for chunk in plain)

    asked = list(
        create(model="sim", messages=HELLO, max_tokens=9, stream=True, stream_options={"include_usage": True})
    )
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens == 9


def test_legacy_completions(lab: RunningLab) -> None:
    answer = lab.client().completions.create(model="sim:batched", prompt="once", max_tokens=3)
    assert answer.choices[0].text == "simulated " * 3
    chunks = list(lab.client().completions.create(model="sim", prompt="once", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "simulated " * 3


def test_the_client_s_request_id_comes_back_and_may_be_used_twice_at_once(lab: RunningLab) -> None:
    def ask(_: int) -> httpx.Response:
        body = {"model": "sim:batched", "messages": HELLO, "max_tokens": 20}
        return lab.post("/v1/chat/completions", body, headers={"x-request-id": "same-for-all"})

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert {answer.headers["x-request-id"] for answer in answers} == {"same-for-all"}


@pytest.mark.parametrize(
    ("path", "content", "status", "reason"),
    [
        ("/v1/chat/completions", b'{"model": "sim", "messages": [', 400, "bad_request"),
        ("/v1/chat/completions", b"[1, 2]", 400, "bad_request"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "bad_request"),
        ("/v1/chat/completions", b'{"model": 7, "messages": []}', 400, "bad_request"),
        ("/v1/chat/completions", b'{"model": "gpt-9", "messages": []}', 404, "unknown_model"),
        ("/v1/chat/completions", b'{"model": "sim:warp", "messages": []}', 404, "unknown_model"),
        ("/v1/completions", b'{"model": "sim", "prompt": 5}', 400, None),
        ("/v1/completions", b'{"model": "sim", "prompt": "x", "max_tokens": "many"}', 400, None),
        ("/v1/completions", b'{"model": "sim", "prompt": "x", "max_tokens": 99999}', 400, None),
        (
            "/v1/completions",
            b'{"model": "sim", "prompt": "' + b"x" * 2_000_000 + b'"}',
            413,
            "request_too_large",
        ),
        ("/v1/nothing", b"{}", 404, "not_found"),
    ],
)
def test_a_client_s_mistake_gets_the_openai_error_object(
    lab: RunningLab, path: str, content: bytes, status: int, reason: str | None
) -> None:
    answer = httpx.post(f"{lab.url}{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    if reason is not None:
        assert error["code"] == reason
        assert answer.headers["x-tandem-reason"] == reason
    assert lab.client().completions.create(model="sim", prompt="still there?", max_tokens=1)


def test_the_openai_client_raises_its_own_errors(lab: RunningLab) -> None:
    with pytest.raises(openai.NotFoundError):
        lab.client().chat.completions.create(model="nope", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        lab.client().completions.create(model="sim", prompt="x", max_tokens=99999)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_stops_its_generation_on_the_engine(lab: RunningLab, is_stream: bool) -> None:
    body = {"model": "sim:sequential", "prompt": "x", "max_tokens": LONG_TOKENS, "stream": is_stream}
    with httpx.Client(timeout=1.0) as client:
        if is_stream:
            with client.stream("POST", f"{lab.url}/v1/completions", json=body) as answer:
                chunks = answer.iter_bytes()  # httpx closes the response when this iterator is dropped
                next(chunks)
                assert lab.engine("sequential")["running"] == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{lab.url}/v1/completions", json=body)
    wait_until(lambda: lab.engine("sequential")["running"] == 0, "the engine stops", limit_s=5)


def test_a_client_that_goes_away_while_waiting_leaves_the_queue(lab: RunningLab) -> None:
    body = {"model": "sim:sequential", "prompt": "x", "max_tokens": LONG_TOKENS, "stream": True}
    with (
        httpx.Client(timeout=30) as client,
        client.stream("POST", f"{lab.url}/v1/completions", json=body) as running,
    ):
        chunks = running.iter_bytes()
        next(chunks)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{lab.url}/v1/completions", json=body, timeout=0.5)
        wait_until(lambda: lab.get("/scheduler")["waiting"] == 0, "the waiting request leaves")
        assert lab.get("/scheduler")["leases"] == 1


def test_a_full_queue_answers_429_with_advice(lab: RunningLab) -> None:
    body = {"model": "sim:sequential", "prompt": "x", "max_tokens": 10}

    def ask(_: int) -> httpx.Response:
        return lab.post("/v1/completions", body)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == 40
    assert len(refused) >= 10, "20 may wait, one may run"
    for answer in refused:
        assert answer.headers["x-tandem-reason"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "queue_full"


def test_a_stream_of_events_is_well_formed(lab: RunningLab) -> None:
    body = {"model": "sim:speculative", "messages": HELLO, "max_tokens": 30, "stream": True}
    answer = lab.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    payloads = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all(payload["choices"] for payload in payloads), "the usage event was not asked for"
    assert len(payloads) < 30, "a speculative chunk holds several tokens"
