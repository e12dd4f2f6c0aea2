"""One HTTP/1.1 response, parsed as its bytes come in."""

from __future__ import annotations

import httptools

# A head that never ends must not eat the memory of the process that waits for its end.
MAX_HEAD_BYTES = 65_536


class BadResponseError(ValueError):
    """What came is not an HTTP response."""


class HttpResponse:
    """Takes bytes, gives the body's bytes; chunked, with a length, or up to the end of the connection.

    Attributes:
        status: None until the head is whole.
        headers: by lower-case name; of a name that comes twice, the last.
        is_complete: the whole body is there. Never True of a body that only the connection's end can end.
        can_reuse: the connection may serve another request when this response is complete.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.can_reuse = False
        self._parser = httptools.HttpResponseParser(self)
        self._fault: str | None = None
        self._head_bytes = 0
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`; with a fault after it, see `raise_fault`."""
        if self.status is None:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fault = f"the head has over {MAX_HEAD_BYTES} bytes (MAX_HEAD_BYTES)"
                return b""
            self._head_bytes += len(data)
        self._body.clear()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fault = "the server wants to change the protocol"
        except httptools.HttpParserError as error:
            if self.is_complete:
                self.can_reuse = False  # bytes that belong to no response
            else:
                self._fault = f"not an HTTP response: {error}"
        body = self._body
        return body[0] if len(body) == 1 else b"".join(body)

    def raise_fault(self) -> None:
        """Call it when what `feed` gave has been used: what came before a fault is part of the answer.

        Raises:
            BadResponseError: this is not HTTP, or the head is longer than `MAX_HEAD_BYTES`.
        """
        if self._fault is not None:
            raise BadResponseError(self._fault)

    # The parser calls these.

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.can_reuse = False  # nobody asked for a second response

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_complete:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self.is_complete and status >= 200:  # 100 Continue and the like come before the response
            self.status = status
            self.can_reuse = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.is_complete = True
