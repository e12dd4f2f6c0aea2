"""Sends one streaming request and stamps what happens to it.

Every receive is looked at by itself. Readers that ask for a fixed number of bytes hold small events back
until the buffer is full, and then time to first token and gaps come out wrong. Under Locust the sockets are
gevent's, so waiting here lets other users run.
"""

from __future__ import annotations

import email.utils
import json
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtest.client.connection import StampedConnection
from loadtest.client.http_response import BadResponseError, HttpResponse
from loadtest.client.record import ClientReason, RequestLabel, RequestRecord
from serving.core.latency import choices_of
from serving.core.request import Outcome
from serving.core.sse import EventSplitter, EventTooLargeError, UsageNotes, parse_event

MAX_ERROR_BODY_BYTES = 65_536
MAX_ERROR_CHARS = 500
DRAIN_TIMEOUT_S = 1.0
MAX_OUTPUT_TOKENS = 10_000_000  # of one answer; more is no count
CHAT_PATH = "/v1/chat/completions"
# A choice's last chunk says why it ended. Within a string of the answer the quotes would be escaped.
FINISH = re.compile(rb'(?<!\\)"finish_reason"\s*:\s*"')
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where to send, and how long to wait.

    Attributes:
        base_url: `http://host:port` or `https://host:port`, with an optional path before `/v1`.
        connect_timeout_s: for the connection to open, TLS included.
        idle_timeout_s: between two receives, and for the first byte. It must outlast the longest queue.
        request_timeout_s: from the sending of a request to the end of its answer; None: as long as it takes.
        needs_done: an answer without `[DONE]` is cut off, even if it is whole by all other signs.
        api_key: sent as bearer token; never in a record, a message or this object's text.
    """

    base_url: str
    connect_timeout_s: float = 5
    idle_timeout_s: float = 300
    request_timeout_s: float | None = None
    api_key: str | None = field(default=None, repr=False)
    needs_done: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "base_url holds a user name or a password, which would end up in reports (api_key)"
            )
        has_more = bool(parts.query or parts.fragment)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.port == 0 or has_more:
            raise ValueError(
                f"base_url {self.base_url!r} is not of the form http://host:port or https://host:port"
            )
        for name, value in (
            ("connect_timeout_s", self.connect_timeout_s),
            ("idle_timeout_s", self.idle_timeout_s),
            ("request_timeout_s", self.request_timeout_s),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key must be printable ASCII: it goes into a header")


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
    choice_of_chunk: list[int] = field(default_factory=list)
    tokens_so_far: list[int | None] = field(default_factory=list)  # the server's count at each chunk
    pieces: list[str] = field(default_factory=list)
    num_finished: int = 0  # choices that said why they ended
    response: HttpResponse = field(default_factory=HttpResponse)
    usage: UsageNotes = field(default_factory=UsageNotes)
    num_reconnects: int = 0
    has_kernel_stamps: bool = False
    read_lag_s: float | None = None

    def header(self, name: str) -> str | None:
        return self.response.headers.get(name)

    def take(self, raw: bytes, at_s: float) -> None:
        """Note one event that arrived at `at_s`."""
        event = parse_event(raw)
        if event.error is not None:
            reason = self.header("x-tandem-reason") or ClientReason.ERROR_EVENT
            raise _RequestEnded(Outcome.FAILED, reason, event.error)
        for choice, text in event.parts:
            if text:
                self.chunk_at_s.append(at_s)
                self.choice_of_chunk.append(choice)
                # Beside several choices it is not told how many of the tokens are whose.
                self.tokens_so_far.append(event.output_tokens if len(event.parts) == 1 else None)
                self.pieces.append(text)
        self.num_finished += len(FINISH.findall(raw))
        self.usage.take(event)
        if event.is_done:
            self.done_at_s = at_s

    @property
    def chunk_tokens(self) -> tuple[int, ...] | None:
        """Tokens of each chunk with text, those of its choice's chunks without text before it included.

        None if not told, or if the server counts several choices as one: then the parts are more than the whole.
        """
        so_far_of: dict[int, int] = {}
        tokens = []
        for choice, so_far in zip(self.choice_of_chunk, self.tokens_so_far, strict=True):
            before = so_far_of.get(choice, 0)
            if so_far is None or so_far < before:
                return None
            tokens.append(so_far - before)
            so_far_of[choice] = so_far
        if len(so_far_of) > 1 and sum(so_far_of.values()) > (self.usage.output_tokens or 0):
            return None
        return tuple(tokens)

    @property
    def text(self) -> str:
        """The answer; of several, one after another in the order of their indexes."""
        whole: dict[int, list[str]] = {}
        for choice, piece in zip(self.choice_of_chunk, self.pieces, strict=True):
            whole.setdefault(choice, []).append(piece)
        return "".join("".join(whole[choice]) for choice in sorted(whole))


class StreamingClient:
    """One user's keep-alive connection. Not for use by two users at once.

    `clock` gives seconds on a monotonic clock; every instant of a record is on it.
    """

    def __init__(self, settings: ClientSettings, clock: Callable[[], float] = time.perf_counter) -> None:
        parts = urlsplit(settings.base_url)
        self._settings = settings
        self._clock = clock
        self._host = parts.hostname or ""
        self._port = parts.port or DEFAULT_PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = (
            f"POST {parts.path.rstrip('/')}{CHAT_PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            "content-type: application/json\r\naccept: text/event-stream\r\n"
        )
        if settings.api_key is not None:
            self._head += f"authorization: Bearer {settings.api_key}\r\n"
        self._connection: StampedConnection | None = None
        self._cancel_reason: ClientReason | None = None
        self._attempt = _Attempt()  # the request in flight, or the last one

    def send(self, label: RequestLabel, body: dict[str, Any], scheduled_at_s: float) -> RequestRecord:
        """Send `body`, read the answer to its end, say how it went. Faults end in the record, not here."""
        dispatched_at_s = self._clock()
        attempt = self._attempt = _Attempt()
        outcome, reason, error = Outcome.COMPLETED, None, None
        try:
            self._exchange(label.request_id, body, attempt)
        except _RequestEnded as ended:
            outcome, reason, error = ended.outcome, ended.reason, ended.error
        if self._cancel_reason is not None and outcome is not Outcome.COMPLETED:
            outcome, reason = Outcome.CANCELLED, self._cancel_reason
            error = "cancelled by the load tool"
        if error is not None and self._settings.api_key:
            error = error.replace(self._settings.api_key, "[api_key]")  # some servers quote a refused key
        if outcome is not Outcome.COMPLETED:
            # Rests of this answer must not be taken for the next one's.
            self.close()
        return RequestRecord(
            label=label,
            outcome=outcome,
            scheduled_at_s=scheduled_at_s,
            dispatched_at_s=dispatched_at_s,
            sent_at_s=attempt.sent_at_s,
            first_byte_at_s=attempt.first_byte_at_s,
            chunk_at_s=tuple(attempt.chunk_at_s),
            chunk_choice=choices_of(attempt.choice_of_chunk),
            chunk_tokens=attempt.chunk_tokens,
            finished_at_s=self._clock() if attempt.done_at_s is None else attempt.done_at_s,
            status=attempt.response.status,
            reason=None if reason is None else str(reason),
            error=None if error is None else error[:MAX_ERROR_CHARS],
            served_by_lane=attempt.header("x-tandem-lane"),
            served_by_replica=attempt.header("x-tandem-replica"),
            prompt_tokens=attempt.usage.prompt_tokens,
            output_tokens=attempt.usage.output_tokens,
            asked_output_tokens=_asked_output_tokens(body),
            num_reconnects=attempt.num_reconnects,
            retry_after_s=_retry_after_s(attempt.header("retry-after")),
            stamped_by="kernel" if attempt.has_kernel_stamps else "process",
            read_lag_s=attempt.read_lag_s,
            text=attempt.text,
        )

    def cancel(self, reason: ClientReason) -> None:
        """End the request in flight, and every later one, from another thread or greenlet."""
        self._cancel_reason = reason
        if self._connection is not None:
            self._connection.shut_down()

    def withdraw(self, reason: ClientReason) -> None:
        """The same, unless the answer has begun: then it runs to its end."""
        if self._attempt.first_byte_at_s is None:
            self.cancel(reason)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, request_id: str, body: dict[str, Any], attempt: _Attempt) -> None:
        payload = json.dumps(body).encode()
        head = f"{self._head}x-request-id: {request_id}\r\ncontent-length: {len(payload)}\r\n\r\n"
        connection = self._write(head.encode("latin-1") + payload, attempt)
        try:
            self._read_answer(connection, attempt, _num_choices(body))
        except TimeoutError:
            limit_s = self._settings.idle_timeout_s
            raise _RequestEnded(
                Outcome.FAILED, ClientReason.IDLE_TIMEOUT, f"no byte for {limit_s:g} s (idle_timeout_s)"
            ) from None
        except ConnectionError as error:
            raise _RequestEnded(Outcome.FAILED, ClientReason.CUT_OFF, f"connection cut: {error!r}") from None
        except (BadResponseError, EventTooLargeError, OSError) as error:
            raise _RequestEnded(Outcome.FAILED, ClientReason.BAD_STREAM, str(error)) from None
        finally:
            attempt.has_kernel_stamps = connection.has_kernel_stamps
            attempt.read_lag_s = connection.max_read_lag_s

    def _write(self, request: bytes, attempt: _Attempt) -> StampedConnection:
        """Send the request. Only a reused connection that turns out dead is replaced, once, and counted."""
        if self._connection is not None and not self._connection.is_stale():
            try:
                return self._write_once(self._connection, request, attempt)
            except ConnectionError:
                pass  # the server closed it just now: as below
        if self._connection is not None:
            attempt.num_reconnects += 1
            self.close()
        connection = self._connection = self._connect()
        if self._cancel_reason is not None:
            raise _RequestEnded(Outcome.CANCELLED, self._cancel_reason, "cancelled by the load tool")
        try:
            return self._write_once(connection, request, attempt)
        except ConnectionError as error:
            raise _RequestEnded(Outcome.FAILED, ClientReason.CUT_OFF, f"send failed: {error!r}") from None

    def _write_once(
        self, connection: StampedConnection, request: bytes, attempt: _Attempt
    ) -> StampedConnection:
        attempt.sent_at_s = self._clock()
        connection.start(attempt.sent_at_s)
        try:
            connection.socket.sendall(request)
        except TimeoutError:
            limit_s = self._settings.idle_timeout_s
            raise _RequestEnded(
                Outcome.FAILED,
                ClientReason.IDLE_TIMEOUT,
                f"nothing could be sent for {limit_s:g} s (idle_timeout_s)",
            ) from None
        return connection

    def _connect(self) -> StampedConnection:
        settings = self._settings
        try:
            sock = socket.create_connection((self._host, self._port), settings.connect_timeout_s)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    sock = self._tls.wrap_socket(sock, server_hostname=self._host)
                sock.settimeout(settings.idle_timeout_s)
                return StampedConnection(sock, self._clock)
            except BaseException:
                sock.close()
                raise
        except TimeoutError:
            limit_s = settings.connect_timeout_s
            text = f"{settings.base_url}: no connection within {limit_s:g} s (connect_timeout_s)"
            raise _RequestEnded(Outcome.FAILED, ClientReason.CONNECT_TIMEOUT, text) from None
        except (
            OSError,
            UnicodeError,
        ) as error:  # UnicodeError: a host name that no name server can be asked for
            text = f"{settings.base_url}: {getattr(error, 'strerror', None) or error}"
            raise _RequestEnded(Outcome.FAILED, ClientReason.CONNECT, text) from None

    def _receive(self, connection: StampedConnection, attempt: _Attempt) -> bytes:
        """The next bytes, within what is left of the request's time where that is limited."""
        limit_s, idle_s = self._settings.request_timeout_s, self._settings.idle_timeout_s
        if limit_s is None or attempt.sent_at_s is None:
            return connection.receive()
        left_s = attempt.sent_at_s + limit_s - self._clock()
        try:
            if left_s <= 0:
                raise TimeoutError
            connection.socket.settimeout(min(left_s, idle_s))
            return connection.receive()
        except TimeoutError:
            if left_s > idle_s:
                raise
            text = f"not whole after {limit_s:g} s (request_timeout_s)"
            raise _RequestEnded(Outcome.FAILED, ClientReason.REQUEST_TIMEOUT, text) from None

    def _read_answer(self, connection: StampedConnection, attempt: _Attempt, num_choices: int) -> None:
        response = attempt.response
        data = b""
        while response.status is None:
            if not (received := self._receive(connection, attempt)):
                raise _RequestEnded(
                    Outcome.FAILED, ClientReason.CUT_OFF, "the connection ended before an answer"
                )
            data = response.feed(received)
            if response.status is None:
                response.raise_fault()
        attempt.first_byte_at_s = connection.arrived_at_s
        if response.status != 200:
            raise self._refusal(connection, data, attempt)
        self._read_stream(connection, data, attempt, num_choices)

    def _refusal(self, connection: StampedConnection, body: bytes, attempt: _Attempt) -> _RequestEnded:
        response = attempt.response
        while not response.is_complete and len(body) < MAX_ERROR_BODY_BYTES:
            if not (received := self._receive(connection, attempt)):
                break  # a body without a length ends so
            body += response.feed(received)
            response.raise_fault()
        status = response.status or 0
        reason = attempt.header("x-tandem-reason") or f"http_{status}"
        outcome = Outcome.REJECTED if 400 <= status < 500 else Outcome.FAILED
        return _RequestEnded(outcome, reason, _error_message(body))

    def _read_stream(
        self, connection: StampedConnection, data: bytes, attempt: _Attempt, num_choices: int
    ) -> None:
        response = attempt.response
        splitter = EventSplitter()
        while True:
            for event in splitter.feed(data):
                attempt.take(event, connection.arrived_at_s)
            if attempt.done_at_s is not None:
                break
            response.raise_fault()
            if response.is_complete and not splitter.rest and self._is_whole(attempt, num_choices):
                attempt.done_at_s = connection.arrived_at_s
                break
            received = b"" if response.is_complete else self._receive(connection, attempt)
            if not received:
                text = f"the stream ended before [DONE], after {len(attempt.chunk_at_s)} chunks"
                raise _RequestEnded(Outcome.FAILED, ClientReason.CUT_OFF, text)
            data = response.feed(received)
        output_tokens = attempt.usage.output_tokens
        if output_tokens is None:
            raise _RequestEnded(Outcome.FAILED, ClientReason.NO_USAGE, "the stream ended without usage")
        # A model may end at once; but then the answer says so, and its tokens are none or have no text.
        is_empty = not attempt.chunk_at_s
        least = 0 if is_empty else 1
        if not least <= output_tokens <= MAX_OUTPUT_TOKENS:
            text = f"the server counts {output_tokens} output tokens, outside {least}..{MAX_OUTPUT_TOKENS}"
            raise _RequestEnded(Outcome.FAILED, ClientReason.BAD_STREAM, text)
        if is_empty and attempt.num_finished < num_choices:
            text = "the stream ended without any text and without a finish_reason"
            raise _RequestEnded(Outcome.FAILED, ClientReason.NO_TEXT, text)
        self._drain(connection, response)

    def _is_whole(self, attempt: _Attempt, num_choices: int) -> bool:
        """Whether an answer that ends without `[DONE]` is one all the same: not every server sends it."""
        return (
            not self._settings.needs_done
            and attempt.num_finished >= num_choices
            and attempt.usage.output_tokens is not None
        )

    def _drain(self, connection: StampedConnection, response: HttpResponse) -> None:
        """Read up to the end of the body, so that the connection can be used again; else close it."""
        # The answer was complete: what breaks after [DONE] costs the connection, not the request.
        try:
            connection.socket.settimeout(DRAIN_TIMEOUT_S)
            while response.can_reuse and not response.is_complete:
                if not (received := connection.receive()):
                    break
                response.feed(received)
                response.raise_fault()
            connection.socket.settimeout(self._settings.idle_timeout_s)
        except (BadResponseError, OSError):
            self.close()
            return
        if not (response.can_reuse and response.is_complete):
            self.close()


def _asked_output_tokens(body: dict[str, Any]) -> int | None:
    """The exact length asked for, of all choices, where the answer may be no shorter than its longest."""
    longest: int | None = body.get("max_tokens")
    if longest is None or body.get("min_tokens") != longest:
        return None
    return longest * _num_choices(body)


def _num_choices(body: dict[str, Any]) -> int:
    num_choices: int = body.get("n") or 1
    return num_choices


def _retry_after_s(value: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for, given as a number or as a date; None without a readable one."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if seconds < float("inf") else None


def _error_message(body: bytes) -> str:
    """The message of an OpenAI error object, or the body as text."""
    try:
        payload = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()
    error = payload.get("error", payload) if isinstance(payload, dict) else payload
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
