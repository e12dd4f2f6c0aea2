"""Sends one streaming request and stamps what happens to it.

The standard library's HTTP client is read one receive at a time (`read1`). Readers that ask for a fixed
number of bytes hold small events back until the buffer is full, and then time to first token and gaps
come out wrong. Under Locust the sockets are gevent's, so waiting here lets other users run.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtest.record import ClientReason, RequestLabel, RequestRecord
from serving.core.request import Outcome
from serving.core.sse import EventSplitter, EventTooLargeError, StreamEvent, parse_event

MAX_RECEIVE_BYTES = 65_536
MAX_ERROR_BODY_BYTES = 65_536
MAX_ERROR_CHARS = 500
CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where to send, and how long to wait.

    Attributes:
        base_url: `http://host:port`, with an optional path before `/v1`.
        connect_timeout_s: for the connection to open.
        idle_timeout_s: between two receives, and for the first byte. It must outlast the longest queue.
    """

    base_url: str
    connect_timeout_s: float = 5
    idle_timeout_s: float = 300

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"base_url {self.base_url!r} is not of the form http://host:port")
        for name, value in (
            ("connect_timeout_s", self.connect_timeout_s),
            ("idle_timeout_s", self.idle_timeout_s),
        ):
            if value <= 0:
                raise ValueError(f"{name}={value} must be above 0")


class _RequestEnded(Exception):
    """The request is over without a complete answer; how, and why."""

    def __init__(self, outcome: Outcome, reason: str, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome
        self.reason = reason
        self.error = error


@dataclass(slots=True)
class _Attempt:
    """What is known of a request so far."""

    sent_at_s: float | None = None
    first_byte_at_s: float | None = None
    done_at_s: float | None = None
    chunk_at_s: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    status: int | None = None
    tandem_reason: str | None = None
    served_by_lane: str | None = None
    served_by_replica: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    num_reconnects: int = 0

    def take(self, event: StreamEvent, now_s: float) -> None:
        """Note one event that arrived at `now_s`."""
        if event.error is not None:
            reason = self.tandem_reason or ClientReason.ERROR_EVENT
            raise _RequestEnded(Outcome.FAILED, reason, event.error)
        if event.has_text:
            self.chunk_at_s.append(now_s)
            self.pieces.append(event.text)
        if event.output_tokens is not None:
            self.prompt_tokens, self.output_tokens = event.prompt_tokens, event.output_tokens
        if event.is_done:
            self.done_at_s = now_s


class StreamingClient:
    """One user's keep-alive connection. Not for use by two users at once.

    `clock` gives seconds on a monotonic clock; every instant of a record is taken from it.
    """

    def __init__(self, settings: ClientSettings, clock: Callable[[], float] = time.perf_counter) -> None:
        parts = urlsplit(settings.base_url)
        self._settings = settings
        self._clock = clock
        self._path = parts.path.rstrip("/") + CHAT_PATH
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        # The connection forgets its socket when the server means to close it after the answer.
        self._socket: socket.socket | None = None
        self._cancel_reason: ClientReason | None = None

    def send(self, label: RequestLabel, body: dict[str, Any], scheduled_at_s: float) -> RequestRecord:
        """Send `body`, read the answer to its end, say how it went. Faults end in the record, not here."""
        attempt = _Attempt()
        outcome, reason, error = Outcome.COMPLETED, None, None
        try:
            self._exchange(label.request_id, body, attempt)
        except _RequestEnded as ended:
            outcome, reason, error = ended.outcome, ended.reason, ended.error
        if self._cancel_reason is not None and outcome is not Outcome.COMPLETED:
            outcome, reason = Outcome.CANCELLED, self._cancel_reason
            error = "cancelled by the load tool"
        if outcome is not Outcome.COMPLETED:
            # Rests of this answer must not be taken for the next one's.
            self.close()
        return RequestRecord(
            label=label,
            outcome=outcome,
            scheduled_at_s=scheduled_at_s,
            sent_at_s=attempt.sent_at_s,
            first_byte_at_s=attempt.first_byte_at_s,
            chunk_at_s=tuple(attempt.chunk_at_s),
            finished_at_s=self._clock() if attempt.done_at_s is None else attempt.done_at_s,
            status=attempt.status,
            reason=None if reason is None else str(reason),
            error=None if error is None else error[:MAX_ERROR_CHARS],
            served_by_lane=attempt.served_by_lane,
            served_by_replica=attempt.served_by_replica,
            prompt_tokens=attempt.prompt_tokens,
            output_tokens=attempt.output_tokens,
            num_reconnects=attempt.num_reconnects,
            text="".join(attempt.pieces),
        )

    def cancel(self, reason: ClientReason) -> None:
        """End the request in flight, and every later one, from another thread or greenlet."""
        self._cancel_reason = reason
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, which sees the end of the stream
            except OSError:
                return  # the connection ended by itself first

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._connection.close()
        self._socket = None

    def _exchange(self, request_id: str, body: dict[str, Any], attempt: _Attempt) -> None:
        payload = json.dumps(body).encode()
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "x-request-id": request_id,
        }
        self._write(payload, headers, attempt)
        try:
            response = self._connection.getresponse()
            self._read_head(response, attempt)
            if response.status != http.client.OK:
                raise self._refusal(response, attempt)
            self._read_stream(response, attempt)
        except TimeoutError:
            limit_s = self._settings.idle_timeout_s
            raise _RequestEnded(
                Outcome.FAILED, ClientReason.IDLE_TIMEOUT, f"no byte for {limit_s:g} s (idle_timeout_s)"
            ) from None
        except (http.client.IncompleteRead, ConnectionError) as error:
            raise _RequestEnded(Outcome.FAILED, ClientReason.CUT_OFF, f"connection cut: {error!r}") from None
        except (http.client.HTTPException, OSError, EventTooLargeError) as error:
            raise _RequestEnded(Outcome.FAILED, ClientReason.BAD_STREAM, repr(error)) from None

    def _write(self, payload: bytes, headers: dict[str, str], attempt: _Attempt) -> None:
        """Send the request. Only a reused connection that turns out dead is replaced, once, and counted."""
        if self._connection.sock is not None and _is_stale(self._connection.sock):
            attempt.num_reconnects += 1
            self.close()
        is_reused = self._connection.sock is not None
        try:
            self._write_once(payload, headers, attempt)
        except ConnectionError as error:
            self.close()
            if not is_reused:
                raise _RequestEnded(Outcome.FAILED, ClientReason.CUT_OFF, f"send failed: {error!r}") from None
            attempt.num_reconnects += 1
            self._write(payload, headers, attempt)

    def _write_once(self, payload: bytes, headers: dict[str, str], attempt: _Attempt) -> None:
        if self._connection.sock is None:
            self._connect()
        attempt.sent_at_s = self._clock()
        try:
            self._connection.request("POST", self._path, payload, headers)
        except TimeoutError:
            limit_s = self._settings.idle_timeout_s
            raise _RequestEnded(
                Outcome.FAILED,
                ClientReason.IDLE_TIMEOUT,
                f"nothing could be sent for {limit_s:g} s (idle_timeout_s)",
            ) from None

    def _connect(self) -> None:
        settings = self._settings
        self._connection.timeout = settings.connect_timeout_s
        try:
            self._connection.connect()
        except TimeoutError:
            limit_s = settings.connect_timeout_s
            text = f"{settings.base_url}: no connection within {limit_s:g} s (connect_timeout_s)"
            raise _RequestEnded(Outcome.FAILED, ClientReason.CONNECT_TIMEOUT, text) from None
        except OSError as error:
            text = f"{settings.base_url}: {error.strerror or error}"
            raise _RequestEnded(Outcome.FAILED, ClientReason.CONNECT, text) from None
        self._socket = self._connection.sock
        self._socket.settimeout(settings.idle_timeout_s)
        if self._cancel_reason is not None:
            raise _RequestEnded(Outcome.CANCELLED, self._cancel_reason, "cancelled by the load tool")

    def _read_head(self, response: http.client.HTTPResponse, attempt: _Attempt) -> None:
        attempt.first_byte_at_s = self._clock()
        attempt.status = response.status
        attempt.tandem_reason = response.getheader("x-tandem-reason")
        attempt.served_by_lane = response.getheader("x-tandem-lane")
        attempt.served_by_replica = response.getheader("x-tandem-replica")

    def _refusal(self, response: http.client.HTTPResponse, attempt: _Attempt) -> _RequestEnded:
        is_refused = 400 <= response.status < 500
        reason = attempt.tandem_reason or f"http_{response.status}"
        message = _error_message(response.read(MAX_ERROR_BODY_BYTES))
        return _RequestEnded(Outcome.REJECTED if is_refused else Outcome.FAILED, reason, message)

    def _read_stream(self, response: http.client.HTTPResponse, attempt: _Attempt) -> None:
        splitter = EventSplitter()
        while attempt.done_at_s is None:
            data = response.read1(MAX_RECEIVE_BYTES)
            now_s = self._clock()
            if not data:
                text = f"the stream ended before [DONE], after {len(attempt.chunk_at_s)} chunks"
                raise _RequestEnded(Outcome.FAILED, ClientReason.CUT_OFF, text)
            for event in splitter.feed(data):
                attempt.take(parse_event(event), now_s)
        if attempt.output_tokens is None:
            raise _RequestEnded(Outcome.FAILED, ClientReason.NO_USAGE, "the stream ended without usage")
        if not attempt.chunk_at_s:
            raise _RequestEnded(Outcome.FAILED, ClientReason.NO_TEXT, "the stream ended without any text")
        self._drain(response)

    def _drain(self, response: http.client.HTTPResponse) -> None:
        """Read up to the end of the body, so that the connection can be used again; else close it."""
        try:
            while response.read1(MAX_RECEIVE_BYTES):
                pass
        except (http.client.HTTPException, OSError):
            # The answer was complete: what breaks after [DONE] costs the connection, not the request.
            self.close()


def _is_stale(sock: socket.socket) -> bool:
    """Whether an idle connection has something to read: its end, or what nobody asked for."""
    timeout_s = sock.gettimeout()
    sock.settimeout(0)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        sock.settimeout(timeout_s)
    return True


def _error_message(body: bytes) -> str:
    """The message of an OpenAI error object, or the body as text."""
    try:
        payload = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
