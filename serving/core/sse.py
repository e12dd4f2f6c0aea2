"""Server-sent events as OpenAI servers send them: framing, and what one event says.

Used by the gateway and by the load client, so that both call the same instant the first token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# An event that never ends must not eat the memory of the process that waits for its end.
MAX_EVENT_BYTES = 4 * 1024 * 1024


class EventTooLargeError(ValueError):
    """One event grew over `MAX_EVENT_BYTES` without ending."""


class EventSplitter:
    """Cuts a byte stream into whole events, wherever the network cut it.

    An event ends at a blank line, with LF or CRLF line ends. Bytes are kept as they came.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""

    @property
    def rest(self) -> bytes:
        """Bytes after the last whole event: empty when a stream ended cleanly."""
        return self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, each with the blank line that ends it.

        Raises:
            EventTooLargeError: an unfinished event is longer than the bound.
        """
        buffer = self._rest + data
        events: list[bytes] = []
        while (end := _event_end(buffer, len(self._rest) if not events else 0)) > 0:
            events.append(buffer[:end])
            buffer = buffer[end:]
        if len(buffer) > self._max_event_bytes:
            raise EventTooLargeError(
                f"an event of {len(buffer)} bytes has not ended (max_event_bytes={self._max_event_bytes})"
            )
        self._rest = buffer
        return events


def _event_end(buffer: bytes, already_searched: int) -> int:
    """Index just past the first blank line, or 0; the first `already_searched` bytes hold none."""
    start = max(0, already_searched - 3)
    lf = buffer.find(b"\n\n", start)
    crlf = buffer.find(b"\r\n\r\n", start)
    if crlf != -1 and (lf == -1 or crlf < lf):
        return crlf + 4
    return lf + 2 if lf != -1 else 0


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one event of a completion stream says.

    Attributes:
        has_text: it carries at least one character of the answer.
        is_usage_only: it carries usage and no choice, as `include_usage` asks for.
        is_done: it is the closing `[DONE]`.
        error: the server's error message when the event reports one.
        prompt_tokens, output_tokens: the server's usage, when it is there.
        text: the answer's characters in it.
    """

    has_text: bool = False
    is_usage_only: bool = False
    is_done: bool = False
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    text: str = ""


_NOTHING = StreamEvent()


def parse_event(event: bytes) -> StreamEvent:
    """Read one whole event. Comments and keep-alives say nothing."""
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
    if not data:
        return _NOTHING
    if data.strip() == b"[DONE]":
        return StreamEvent(is_done=True)
    return parse_answer(data)


def parse_answer(data: bytes) -> StreamEvent:
    """Read a whole answer, or the data of one event; what is no completion object reports an error."""
    try:
        return _parse_payload(json.loads(data))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return StreamEvent(error=f"not a completion object: {data[:80]!r}")


def _parse_payload(payload: dict[str, Any]) -> StreamEvent:
    if error := payload.get("error"):
        return StreamEvent(error=str(error.get("message", error)) if isinstance(error, dict) else str(error))
    choices = payload.get("choices") or []
    text = "".join(_choice_text(choice) for choice in choices)
    usage = payload.get("usage") or {}
    return StreamEvent(
        has_text=bool(text),
        is_usage_only=bool(usage) and not choices,
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        text=text,
    )


def _choice_text(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    # Text a reader sees later still counts: reasoning and tool arguments are generated tokens too.
    found = [part.get("text"), part.get("content"), part.get("reasoning"), part.get("reasoning_content")]
    found += [(call.get("function") or {}).get("arguments") for call in part.get("tool_calls") or []]
    return "".join(piece for piece in found if isinstance(piece, str))
