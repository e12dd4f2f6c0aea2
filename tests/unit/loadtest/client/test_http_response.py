"""Responses, cut anywhere."""

from __future__ import annotations

import pytest

from loadtest.client.http_response import BadResponseError, HttpResponse

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Lane: a\r\n\r\n"
    b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nx-trailer: b\r\n\r\n"
)
WITH_LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\nx-lane: a\r\n\r\nhello world"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nx-lane: a\r\n\r\nhello world"
AFTER_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + WITH_LENGTH


@pytest.mark.parametrize(
    ("data", "is_complete"),
    [(CHUNKED, True), (WITH_LENGTH, True), (UNTIL_CLOSED, False), (AFTER_CONTINUE, True)],
    ids=["chunked", "content-length", "until closed", "100 before it"],
)
def test_a_response_cut_at_every_byte(data: bytes, is_complete: bool) -> None:
    for cut in range(len(data) + 1):
        response = HttpResponse()
        body = response.feed(data[:cut]) + response.feed(data[cut:])
        response.raise_fault()
        assert (body, response.status, response.headers["x-lane"]) == (b"hello world", 200, "a"), cut
        assert (response.is_complete, response.can_reuse) == (is_complete, is_complete), cut


@pytest.mark.parametrize("rest", [b"H", b"\x00", WITH_LENGTH])
def test_a_connection_with_a_rest_on_it_is_not_used_again(rest: bytes) -> None:
    response = HttpResponse()
    assert response.feed(WITH_LENGTH + rest) == b"hello world"
    assert response.is_complete
    assert not response.can_reuse
    response.raise_fault()


def test_what_came_before_a_fault_is_given_first() -> None:
    response = HttpResponse()
    assert response.feed(CHUNKED[: CHUNKED.index(b"6\r\n")] + b"not a size\r\n") == b"hello"
    with pytest.raises(BadResponseError, match="chunk size"):
        response.raise_fault()
