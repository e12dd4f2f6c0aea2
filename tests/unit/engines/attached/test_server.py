"""What is found out of a server that is not ours, and what is said of one that cannot serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serving.config import LaneConfig
from serving.core.errors import MAX_SHOWN_CHARS, ConfigError
from serving.engines.attached import server as server_module
from serving.engines.attached.server import (
    Examined,
    Looked,
    ServerClient,
    ServerError,
    look_at,
    served_models,
)
from tests.certificate import write_certificate
from tests.stand_in_server import StandInServer, serving

pytestmark = pytest.mark.anyio
KEY = "a-key-of-theirs-1"


def lane(*urls: str, **settings: Any) -> LaneConfig:
    return LaneConfig.model_validate(
        {"name": "theirs", "strategy": "batched", "engine": "openai", "urls": list(urls)} | settings
    )


async def examined(settings: dict[str, Any] | None = None, /, **kind: Any) -> Examined:
    async with serving(StandInServer(**kind)) as server, client(server, **settings or {}) as asked:
        return await asked.examine()


def client(server: StandInServer, **settings: Any) -> ServerClient:
    return ServerClient(lane(server.url, **settings), server.url)


async def test_a_server_that_can_all_of_it_lacks_nothing() -> None:
    found = await examined()
    assert (found.server.model, found.server.takes_stream_options) == ("theirs/model-1", True)
    assert (found.facts.name, found.facts.version, found.facts.lacks) == ("openai", "them", ())


@pytest.mark.parametrize(
    ("kind", "takes_stream_options", "said"),
    [
        ({"gives_usage": False}, True, "no usage in streams"),
        ({"keeps_min_tokens": False}, True, "min_tokens is not kept without ignore_eos"),
        ({"keeps_min_tokens": False, "keeps_ignore_eos": False}, True, "neither min_tokens nor ignore_eos"),
        ({"keeps_cache_salt": False}, True, "cache_salt is not kept"),
        ({"refused": ("cache_salt",)}, True, "min_tokens, ignore_eos, cache_salt are refused"),
        ({"refused": ("stream_options",)}, False, "streams that ask for usage are refused"),
        ({"paths": ("/v1/chat/completions",)}, True, "POST /v1/completions answered 404"),
        ({"paths": ("/v1/completions",)}, True, "POST /v1/chat/completions answered 404"),
        ({"metrics": None}, True, "GET /metrics answered 404"),
        ({"metrics": "llamacpp:n_decode_total 7"}, True, "GET /metrics has none of vLLM's names"),
        ({"health_status": 404}, True, "/v1/models is asked instead"),
    ],
)
async def test_what_a_server_cannot_do_is_said_and_nothing_else(
    kind: dict[str, Any], takes_stream_options: bool, said: str
) -> None:
    found = await examined(**kind)
    (lack,) = found.facts.lacks
    assert said in lack
    assert found.server.takes_stream_options == takes_stream_options


@pytest.mark.parametrize(
    ("settings", "kind", "why"),
    [
        ({}, {"models": ["a", "b"]}, r"it serves a, b: say which, with lanes\[theirs\].served_model"),
        (
            {"served_model": "c"},
            {"models": ["a"]},
            r"it serves a, and not lanes\[theirs\].served_model = 'c'",
        ),
        ({}, {"models": []}, "it serves no model"),
        ({}, {"key": KEY}, r"answered 401: it asks for an API key \(lanes\[theirs\].api_key_env\)"),
        ({"api_key_env": "THEIR_KEY"}, {"key": "another-key"}, "refuses the API key .*'THEIR_KEY'"),
        ({}, {"health_status": 503}, "/health answered 503"),
        ({"health": "/ping"}, {}, "/ping answered 404"),
        ({}, {"paths": ()}, "POST /v1/chat/completions answered 404.*; POST /v1/completions answered 404"),
    ],
)
async def test_a_server_that_cannot_serve_says_why_and_names_the_setting(
    settings: dict[str, Any], kind: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    with pytest.raises(ServerError, match=why) as raised:
        await examined(settings, **kind)
    assert KEY not in str(raised.value)


async def test_a_model_of_several_is_the_one_that_is_set() -> None:
    found = await examined({"served_model": "b"}, models=["a", "b"])
    assert found.server.model == "b"


async def test_a_key_is_shown_and_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    server = StandInServer(key=KEY, refused=(KEY,))
    async with serving(server), client(server, api_key_env="THEIR_KEY") as asked:
        assert (await asked.examine()).facts.lacks == ()
        server.models = [KEY]  # whatever it answers with may quote the key
        assert KEY not in asked._quoted(f"you said {KEY}".encode())  # noqa: SLF001


@contextlib.asynccontextmanager
async def saying(raw: bytes) -> AsyncIterator[str]:
    """URL of a server that answers anything with these bytes, and in them what it was shown as `KEY`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        shown = head.partition(b"uthorization: Bearer ")[2].partition(b"\r\n")[0]
        writer.write(raw.replace(b"KEY", shown))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nnot a header: KEY\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nKEY\r\n",
        b"HTTP/1.1 503 Busy\r\n\r\n" + b" " * 4090 + b"KEY",
    ],
)
async def test_no_answer_however_broken_puts_a_part_of_the_key_into_an_error(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    async with saying(raw) as url, ServerClient(lane(url, api_key_env="THEIR_KEY"), url) as asked:
        fault = await asked.fault("/health")
    assert fault is not None
    assert KEY[:5] not in fault


async def test_what_a_server_wants_kept_is_not_kept() -> None:
    async with saying(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\n\r\n") as url:
        by_name = url.replace("127.0.0.1", "localhost")  # cookies of addresses are never kept
        async with ServerClient(lane(by_name), by_name) as asked:
            assert await asked.fault("/health") is None
            assert len(asked._session.cookie_jar) == 0  # noqa: SLF001


async def test_an_error_is_one_line_that_no_terminal_obeys() -> None:
    async with (
        saying(b"HTTP/1.1 503 Busy\r\n\r\n\x1b[31mred\n\x07") as url,
        ServerClient(lane(url), url) as asked,
    ):
        assert await asked.fault("/health") == "/health answered 503: ?[31mred ?"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("[" * 100_000, "/v1/models is no list of models"),
        (json.dumps({"data": [{"id": "m" * 1025}]}), "names a model of 1025 characters"),
        (json.dumps({"data": [{"id": "\ud800"}]}), "must be printable"),
        (json.dumps({"data": [{"id": "m\x1b[31m"}]}), "must be printable"),
    ],
)
def test_a_list_of_models_that_no_request_could_name_is_refused(page: str, why: str) -> None:
    with pytest.raises(ServerError, match=why):
        served_models(page.encode())


def test_who_serves_a_model_is_said_in_a_few_words() -> None:
    page = json.dumps({"data": [{"id": "m", "owned_by": "x" * 100_000}, {"id": "n", "owned_by": "\x1b"}]})
    assert [len(one.owner) for one in served_models(page.encode())] == [MAX_SHOWN_CHARS, len("unknown")]


def test_a_count_of_thousands_of_digits_is_no_fault() -> None:
    event = b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": ' + b"9" * 5000 + b"}}}"
    assert server_module._cached_tokens(event) > 0  # noqa: SLF001


async def test_metrics_that_do_not_come_are_a_lack_and_no_reason_to_stay_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "MAX_PAGE_BYTES", 5000)
    found = await examined(metrics="x" * 5001)
    (lack,) = found.facts.lacks
    assert lack.startswith("GET /metrics: an answer is longer than 5000 bytes")


async def test_a_server_that_hangs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOOK_TIMEOUT_S", 0.05)
    async with serving(StandInServer(hangs=True)) as server, client(server) as asked:
        fault = await asked.fault("/health")
    assert fault == "/health was not answered within 0.05 s (lanes[theirs].urls)"


async def test_a_certificate_that_nobody_vouches_for_is_not_trusted(tmp_path: Path) -> None:
    secure = StandInServer(certificate=write_certificate(tmp_path / "certificate.pem"))
    async with serving(secure) as server, client(server) as asked:
        fault = await asked.fault("/health")
    assert fault is not None
    assert "certificate verify failed" in fault


async def test_each_server_of_a_lane_is_looked_at() -> None:
    async with serving(StandInServer()) as there:
        found = await look_at(lane(there.url, "http://127.0.0.1:1"))
    well, away = found[there.url], found["http://127.0.0.1:1"]
    assert isinstance(well, Looked)
    assert (well.served.model, well.served.max_model_len) == ("theirs/model-1", 512)
    assert isinstance(away, str)
    assert "cannot be reached" in away
    assert "lanes[theirs].urls" in away


async def test_a_key_that_is_not_set_is_a_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"lanes\[theirs\].api_key_env = 'THEIR_KEY'.* is not set"):
        await look_at(lane("http://127.0.0.1:1", api_key_env="THEIR_KEY"))
