"""What is read of an address, and what is said of one that gives nothing good."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serving.core import http_get
from serving.core.http_get import GetError, get, post, post_lines


class Pages(BaseHTTPRequestHandler):
    """Each path is an answer of its own; HTTP/1.0, so one without a length ends with its connection."""

    def do_GET(self) -> None:
        self._answer(self.path.removeprefix("/"))

    def do_POST(self) -> None:
        assert self.rfile.read(int(self.headers["content-length"])) == b""
        self._answer(self.path.removeprefix("/"))

    def _answer(self, page: str) -> None:
        self.send_response(409 if page == "refused" else 200)
        if page == "cut":
            self.send_header("content-length", "10")
        self.end_headers()
        if page == "trickle":
            with suppress(ConnectionError):  # the client goes first
                for _ in range(20):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            return
        self.wfile.write({"refused": b'{"error": "no"}', "lines": b"one\ntwo\n\nlast"}.get(page, b"half"))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_comes_whole_and_in_lines(url: str) -> None:
    assert get(f"{url}/lines") == post(f"{url}/lines") == b"one\ntwo\n\nlast"
    assert list(post_lines(f"{url}/lines")) == [b"one", b"two", b"", b"last"]


def test_a_refusal_says_what_the_server_said(url: str) -> None:
    with pytest.raises(GetError) as got:
        get(f"{url}/refused")
    assert str(got.value) == f"{url}/refused: answered 409 Conflict"
    with pytest.raises(GetError) as posted:
        list(post_lines(f"{url}/refused"))
    assert str(posted.value) == f'{url}/refused: answered 409: {{"error": "no"}}'
    assert (posted.value.status, posted.value.said) == (409, '{"error": "no"}')


def test_an_answer_that_breaks_off_is_none(url: str) -> None:
    with pytest.raises(GetError, match="cannot be read: IncompleteRead"):
        get(f"{url}/cut")


def test_an_answer_that_trickles_has_the_time_it_was_given(url: str) -> None:
    began_at_s = time.monotonic()
    with pytest.raises(GetError, match=r"trickle: cannot be read: .*not whole within 0\.2 s"):
        get(f"{url}/trickle", timeout_s=0.2)
    assert time.monotonic() - began_at_s < 0.8


def test_a_line_without_an_end_is_not_collected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_get, "MAX_LINE_BYTES", 3)
    with pytest.raises(GetError, match="a line has more than 3 bytes"):
        list(post_lines(f"{url}/lines"))


def test_nobody_there_is_named_with_the_address() -> None:
    with pytest.raises(GetError) as caught:
        get("http://127.0.0.1:9/x")
    assert str(caught.value) == "http://127.0.0.1:9/x: cannot be reached: Connection refused"
    assert caught.value.why == "cannot be reached: Connection refused"
    assert caught.value.status is None


def test_errors_show_no_password_of_the_address() -> None:
    for ask in (get, post):
        with pytest.raises(GetError) as refused:
            ask("http://user:secret@127.0.0.1:1/lab?key=secret")
        assert str(refused.value).startswith("http://127.0.0.1:1/lab: ")
        assert "secret" not in str(refused.value)
