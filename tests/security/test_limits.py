"""What a client may send to the gateway, byte by byte."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx
import pytest

from tests.security.conftest import FILE_KEY, HEADER_TIMEOUT_S, ORIGIN, UPLOAD_TIMEOUT_S, LockedLab

KEY_LINE = f"host: lab\r\nauthorization: Bearer {FILE_KEY}\r\n".encode()
END = b"connection: close\r\n\r\n"


def exchange(lab: LockedLab, parts: Sequence[bytes], *, limit_s: float = 20) -> bytes:
    """What comes back until the server closes."""
    where = urlsplit(lab.url)
    got = b""
    with socket.create_connection((where.hostname, where.port or 0), timeout=limit_s) as connection:
        # What is too large is answered before its end, and what still comes is answered with a reset.
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(65_536):
                got += received
    return got


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_plain_request_by_hand(lab: LockedLab) -> None:
    assert status(exchange(lab, [b"GET /v1/models HTTP/1.1\r\n" + KEY_LINE + END])) == 200


@pytest.mark.parametrize(
    "headers",
    [b"x-long: " + b"a" * 1_000_000 + b"\r\n", b"".join(b"x-%d: a\r\n" % number for number in range(1000))],
    ids=["one of 1 MB", "1,000 of them"],
)
def test_headers_out_of_bounds_are_431(lab: LockedLab, headers: bytes) -> None:
    answer = exchange(lab, [b"GET /v1/models HTTP/1.1\r\n" + KEY_LINE + headers + END])
    assert status(answer) == 431
    assert b"headers_too_large" in answer
    assert len(answer) < 2000


def test_a_query_out_of_bounds_is_refused(lab: LockedLab) -> None:
    for size, wanted in ((1000, 200), (33_000, 431), (200_000, 431)):
        line = b"GET /v1/models?" + b"q" * size + b" HTTP/1.1\r\n"
        assert status(exchange(lab, [line + KEY_LINE + END])) == wanted


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS", "PUT", "DELETE", "PATCH", "PROPFIND", "CONNECT"])
def test_other_methods_are_405_and_echo_nothing(lab: LockedLab, method: str) -> None:
    answer = exchange(lab, [method.encode() + b" /v1/models HTTP/1.1\r\nx-mine: 4711\r\n" + KEY_LINE + END])
    assert status(answer) == 405
    assert b"4711" not in answer
    assert FILE_KEY.encode() not in answer


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"NONSENSE /v1/models HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n",
    ],
    ids=["two lengths", "length and chunks", "no method", "not HTTP"],
)
def test_what_two_servers_could_read_differently_is_400(lab: LockedLab, head: bytes) -> None:
    assert status(exchange(lab, [head + KEY_LINE + END + b"0\r\n\r\n"])) == 400


@pytest.mark.parametrize("key_line", [KEY_LINE, b"host: lab\r\n"], ids=["with a key", "without"])
def test_an_upload_that_does_not_end_is_cut_off(lab: LockedLab, key_line: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n"
    answer = exchange(lab, [head + key_line + b"\r\n", b'{"model":'], limit_s=UPLOAD_TIMEOUT_S + 10)
    assert status(answer) == (408 if key_line is KEY_LINE else 401)
    assert b"connection: close" in answer.lower()


def test_without_a_key_a_probe_learns_only_that_somebody_answers(lab: LockedLab) -> None:
    assert httpx.get(f"{lab.url}/-/healthz").text == "success"
    assert httpx.get(f"{lab.url}/-/routes").status_code == 401


def test_a_head_that_does_not_end_is_a_408(lab: LockedLab) -> None:
    answer = exchange(lab, [b"POST /v1/completions HTTP/1.1\r\nhost:"], limit_s=HEADER_TIMEOUT_S + 10)
    assert status(answer) == 408
    assert b"gateway.header_timeout_s=1" in answer


ASKED = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 2}).encode()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_not_made_and_loses_nothing(lab: LockedLab, protocol: bytes) -> None:
    """As a stock Java client and `curl --http2` ask."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + KEY_LINE + b"content-length: %d\r\n" % len(ASKED)
    head += (
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAMAAABk\r\n\r\n" % protocol
    )
    where = urlsplit(lab.url)
    with socket.create_connection((where.hostname, where.port or 0), timeout=20) as connection:
        connection.sendall(head + ASKED)
        answer = connection.recv(65_536)
    assert status(answer) == 200
    assert b"simulated simulated" in answer


def test_a_page_of_an_allowed_origin_may_ask_and_read(lab: LockedLab) -> None:
    asks = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    leave = httpx.options(f"{lab.url}/v1/chat/completions", headers=asks)
    assert (leave.status_code, leave.headers["access-control-allow-origin"]) == (200, ORIGIN)
    key = {"authorization": f"Bearer {FILE_KEY}"}
    body = {"model": "sim", "prompt": "x", "max_tokens": 2, "stream": True}
    for headers, wanted in ((key, 200), ({}, 401)):
        answer = httpx.post(f"{lab.url}/v1/completions", json=body, headers={"origin": ORIGIN, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (wanted, ORIGIN)
        exposed = answer.headers["access-control-expose-headers"]
        assert "x-request-id" in exposed
        assert "x-tandem-lane" in exposed
        assert answer.headers["x-request-id"]
    refused = httpx.options(
        f"{lab.url}/v1/chat/completions", headers=asks | {"origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in refused.headers


def test_a_replicas_port_serves_what_the_lab_uses(lab: LockedLab) -> None:
    shown = httpx.get(f"{lab.url}/lab", headers={"authorization": f"Bearer {FILE_KEY}"}).json()
    (replica,) = shown["replicas"]
    for path in ("/health", "/metrics", "/tandem/engine"):
        assert httpx.get(replica["url"] + path).status_code == 200, path
    for path in ("/docs", "/openapi.json", "/server_info", "/tokenize", "/sleep"):
        assert httpx.get(replica["url"] + path).status_code == 404, path
        assert httpx.post(replica["url"] + path).status_code == 404, path
