"""A lab in front of servers that are not ours: they answer, leave, come back, and what they lack is said."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.certificate import write_certificate
from tests.running_lab import RunningLab, free_port, running_lab, tandem, wait_until
from tests.stand_in_server import StandInServer, serving_in_thread

KEY = "a-key-of-theirs-1"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GOOD = StandInServer(key=KEY)
BARE = StandInServer(gives_usage=False, health_status=404, refused=("stream_options",), metrics=None)
SECURE = StandInServer(key=KEY)


@pytest.fixture(scope="module")
def ray_dir() -> Iterator[Path]:
    """Where Ray keeps its logs; sockets lie there too, so that its path must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def attached(ray_dir: Path) -> Iterator[RunningLab]:
    SECURE.certificate = write_certificate(ray_dir / "certificate.pem")
    with serving_in_thread(GOOD), serving_in_thread(BARE), serving_in_thread(SECURE):
        lanes: list[dict[str, Any]] = [
            {"name": "good", "urls": [f"{GOOD.url}/v1", f"http://127.0.0.1:{free_port()}"]},
            {"name": "bare", "urls": [BARE.url], "takes_unpinned": False},
            {"name": "secure", "urls": [SECURE.url], "takes_unpinned": False},
        ]
        lanes[0]["api_key_env"] = lanes[2]["api_key_env"] = "THEIR_KEY"
        config = {
            "model": {"name": "ours", "max_model_len": 512},
            "scheduler": {"breaker_cooldown_s": 0.5},
            "lanes": [lane | {"strategy": "batched", "engine": "openai"} for lane in lanes],
        }
        known = {"THEIR_KEY": KEY, "SSL_CERT_FILE": str(SECURE.certificate), "RAY_TMPDIR": str(ray_dir)}
        with running_lab(config, environment=os.environ | known) as started:
            yield started


@pytest.fixture(autouse=True)
def at_rest() -> None:
    """The folder's other lab is not used here."""


@pytest.fixture
def client(attached: RunningLab) -> Iterator[openai.OpenAI]:
    with attached.client() as opened:
        yield opened


def is_there(lab: RunningLab, lane: str) -> bool:
    return len(lab.replicas(lane)) == 1


def away(lab: RunningLab, lane: str) -> list[str]:
    (found,) = [entry for entry in lab.get("/scheduler")["lanes"] if entry["lane"] == lane]
    return [absent["why"] for absent in found["absent"]]


def test_it_answers_and_streams_under_the_lab_s_name(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    answer = create(model="ours:good", messages=HELLO, max_tokens=7, extra_body={"min_tokens": 7})
    assert answer.choices[0].message.content == "word " * 7
    raw = client.chat.completions.with_raw_response.create(model="ours", messages=HELLO)
    assert raw.headers["x-tandem-lane"] == "good"
    chunks = list(create(model="ours:good", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 3
    assert all(chunk.usage is None for chunk in chunks), "the usage that the gateway asked for is its own"
    body, headers = GOOD.asked[-1]
    assert body["model"] == "theirs/model-1"
    assert headers["authorization"] == f"Bearer {KEY}"


def test_a_stream_without_usage_is_whole(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="ours:bare", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 3
    assert "stream_options" not in BARE.asked[-1][0]


def test_what_was_found_out_is_said_and_the_key_is_not(attached: RunningLab) -> None:
    described = attached.get("/lab")
    lacks = {replica["lane"]: " ".join(replica["lacks"]) for replica in described["replicas"]}
    assert lacks["good"] == ""
    assert "streams that ask for usage are refused" in lacks["bare"]
    assert "/v1/models is asked instead" in lacks["bare"]
    (why,) = away(attached, "good")
    assert "cannot be reached" in why
    shown = tandem("status", environment=attached.environment).stdout
    assert "away: lane good" in shown
    pages = [httpx.get(f"{attached.url}{path}").text for path in ("/lab", "/scheduler", "/targets")]
    for target in attached.get("/targets"):
        pages += [httpx.get(f"http://{address}/metrics").text for address in target["targets"]]
    assert any("vllm:num_requests_running 7" in page for page in pages)
    assert not any(KEY in page for page in [*pages, shown])


def test_it_leaves_when_its_health_fails_and_comes_back(attached: RunningLab, client: openai.OpenAI) -> None:
    wait_until(lambda: is_there(attached, "good"), "it is there")
    GOOD.health_status = 500
    wait_until(lambda: not attached.replicas("good"), "it leaves")
    assert any("/health answered 500" in why for why in away(attached, "good"))
    with pytest.raises(openai.InternalServerError, match="no ready replica"):
        client.chat.completions.create(model="ours:good", messages=HELLO)
    GOOD.health_status = 200
    wait_until(lambda: is_there(attached, "good"), "it comes back")
    assert client.chat.completions.create(model="ours:good", messages=HELLO).choices


def test_a_key_that_is_refused_is_the_lab_s_fault_and_not_the_client_s(
    attached: RunningLab, client: openai.OpenAI
) -> None:
    wait_until(lambda: is_there(attached, "good"), "it is there")
    GOOD.key = "another-key-than-ours"
    try:
        with pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(model="ours:good", messages=HELLO)
        assert raised.value.code == "upstream_broke"
        assert KEY not in str(raised.value)
        wait_until(
            lambda: any("refuses the API key" in why for why in away(attached, "good")), "it leaves", 40
        )
    finally:
        GOOD.key = KEY
    wait_until(lambda: is_there(attached, "good"), "it comes back")


def test_https_carries_the_request_and_the_key(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="ours:secure", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "word " * 3
    body, headers = SECURE.asked[-1]
    assert body["model"] == "theirs/model-1"
    assert headers["authorization"] == f"Bearer {KEY}"


def test_a_key_is_in_no_log_whatever_became_of_it(attached: RunningLab, ray_dir: Path) -> None:
    # Of all the tests above: taken, refused, of servers that were well and that were not.
    logs = [file for file in (ray_dir / "ray").rglob("logs/**/*") if file.is_file()]
    assert any(b"takes no requests" in file.read_bytes() for file in logs), "the agents' log is among them"
    kept = [file for file in Path(attached.environment["TANDEM_STATE"]).iterdir() if file.is_file()]
    assert {"lab.json", "lab.log"} <= {file.name for file in kept}
    assert [file for file in [*logs, *kept] if KEY.encode() in file.read_bytes()] == []


def test_up_refuses_a_lane_without_a_server_and_a_key_that_is_not_set(tmp_path: Any) -> None:
    environment = {**os.environ, "TANDEM_STATE": str(tmp_path)}
    environment.pop("THEIR_KEY", None)
    url = f"http://127.0.0.1:{free_port()}"
    refused = tandem("up", "--attach", url, environment=environment)
    assert refused.returncode == 2
    assert f"{url}: cannot be reached" in refused.stderr
    assert "lanes[attached].urls" in refused.stderr
    refused = tandem("up", "--attach", url, "--api-key-env", "THEIR_KEY", environment=environment)
    assert refused.returncode == 2
    assert "'THEIR_KEY': this environment variable is not set" in refused.stderr
