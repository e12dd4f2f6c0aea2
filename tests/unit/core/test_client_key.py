"""The key that our own clients show: what a header can carry, and to which address it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from serving.core.client_key import client_key, key_headers
from serving.core.errors import ConfigError
from serving.core.http_get import get
from serving.lab import control

KEY = "alice-0123456789abcdef"


def test_none_is_shown_where_none_is_set() -> None:
    for environment in ({}, {"TANDEM_API_KEY": ""}, {"OPENAI_API_KEY": KEY}):
        assert client_key(environment) is None
        assert key_headers(environment) == {}


def test_it_is_shown_as_openai_s_clients_do() -> None:
    assert key_headers({"TANDEM_API_KEY": KEY}) == {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("key", ["with space", "new\nline", "schlüssel"])
def test_what_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="TANDEM_API_KEY must be printable ASCII") as caught:
        client_key({"TANDEM_API_KEY": key})
    assert key not in str(caught.value)


class Noting(BaseHTTPRequestHandler):
    """Notes what is shown to it; `/away` leads to the other server."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, NotingServer)
        server.shown.append(self.headers.get("authorization"))
        self.send_response(302 if self.path == "/away" else 200)
        if self.path == "/away":
            self.send_header("location", server.elsewhere)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


class NotingServer(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Noting)
        self.shown: list[str | None] = []
        self.elsewhere = ""
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[NotingServer]:
    with NotingServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def read_as_cluster(base_url: str) -> Callable[[str], bytes]:
    return control.reader(base_url)


def read_as_load_client(_: str) -> Callable[[str], bytes]:
    return lambda url: get(url, key_headers())


@pytest.mark.parametrize("reader", [read_as_cluster, read_as_load_client])
def test_a_redirect_does_not_take_the_key_along(
    reader: Callable[[str], Callable[[str], bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", KEY)
    with serving() as lab, serving() as other:
        lab.elsewhere = other.url
        reader(lab.url)(f"{lab.url}/away")
        assert (lab.shown, other.shown) == ([f"Bearer {KEY}"], [None])


def test_the_lab_s_other_processes_are_not_shown_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", KEY)
    with serving() as lab, serving() as replica:
        fetch = control.reader(lab.url)
        fetch(f"{lab.url}/targets")
        fetch(f"{replica.url}/metrics")
        assert (lab.shown, replica.shown) == ([f"Bearer {KEY}"], [None])
