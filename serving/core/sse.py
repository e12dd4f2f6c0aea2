"""Server-sent events as OpenAI servers send them: framing, and what one event says.

Used by the gateway and by the load client, so that both call the same instant the first token.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# An event that never ends must not eat the memory of the process that waits for its end.
MAX_EVENT_BYTES = 4 * 1024 * 1024

# The inside of a JSON string that holds no escape.
_PLAIN_TEXT = re.compile(rb"[ !#-\[\]-\xff]+")
_BLANK_LINE = re.compile(rb"\n\r?\n")


class EventTooLargeError(ValueError):
    """One event grew over `MAX_EVENT_BYTES` without ending."""


class EventSplitter:
    """Cuts a byte stream into whole events, wherever the network cut it.

    An event ends at a blank line, with LF or CRLF line ends. Bytes are kept as they came.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    @property
    def rest(self) -> bytes:
        """Bytes after the last whole event: empty when a stream ended cleanly."""
        return bytes(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by `data`, each with the blank line that ends it.

        Raises:
            EventTooLargeError: an unfinished event is longer than the bound.
        """
        rest = self._rest
        # Most receives hold exactly one event; they are spared the copies below.
        if not rest and 0 < data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            return [data]
        search_from = max(0, len(rest) - 2)  # the blank line may be cut, but what is before it was searched
        rest += data
        events: list[bytes] = []
        start = 0
        while (blank := _BLANK_LINE.search(rest, search_from)) is not None:
            events.append(bytes(rest[start : blank.end()]))
            start = search_from = blank.end()
        if start:
            del rest[:start]
        if len(rest) > self._max_event_bytes:
            raise EventTooLargeError(
                f"an event of {len(rest)} bytes has not ended (max_event_bytes={self._max_event_bytes})"
            )
        return events


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """What one event of a completion stream says.

    Attributes:
        parts: each choice of the answer that it is of, by its index, with the characters it brings of it.
        finished: of them those that say why they end.
        is_usage_only: it carries usage and no choice, as `include_usage` asks for.
        is_done: it is the closing `[DONE]`.
        error: the server's error message when the event reports one.
        prompt_tokens, output_tokens: the server's usage, when it is there. Beside text it is usage so far.
    """

    parts: tuple[tuple[int, str], ...] = ()
    finished: tuple[int, ...] = ()
    is_usage_only: bool = False
    is_done: bool = False
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def text(self) -> str:
        """The answer's characters in it, of all choices."""
        return "".join([text for _, text in self.parts])

    @property
    def has_text(self) -> bool:
        """It carries at least one character of the answer: the one condition for a token's arrival."""
        return bool(self.text)


class _Function(msgspec.Struct, gc=False):
    arguments: Any = None


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Part(msgspec.Struct, gc=False):
    """Where text can be. Types that servers disagree on are left open, and only strings are text."""

    text: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(_Part, gc=False):
    index: Any = 0
    finish_reason: Any = None
    delta: _Part | None = None
    message: _Part | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, gc=False):
    """What is read of a completion object; all else is skipped."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_NOTHING = StreamEvent()
_DONE = StreamEvent(is_done=True)
_decode_answer = msgspec.json.Decoder(_Answer).decode


def parse_event(event: bytes) -> StreamEvent:
    """Read one whole event. Comments and keep-alives say nothing."""
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:
        data = event[5:-2]  # one line with LF: what servers send; white space around it means nothing
    else:
        lines = event.replace(b"\r\n", b"\n").split(b"\n")
        data = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
    if data.startswith(b" {"):
        return parse_answer(data)
    data = data.strip()
    if not data:
        return _NOTHING
    return _DONE if data == b"[DONE]" else parse_answer(data)


def parse_answer(data: bytes) -> StreamEvent:
    """Read a whole answer, or the data of one event; what is no completion object reports an error."""
    try:
        answer = _decode_answer(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return StreamEvent(error=f"not a completion object: {data[:80]!r} ({str(error)[:200]})")
    if answer.error:
        return StreamEvent(error=_error_text(answer.error))
    usage = answer.usage
    choices = answer.choices or ()
    return StreamEvent(
        parts=tuple([_choice_part(choice) for choice in choices]),
        finished=tuple([_index(choice) for choice in choices if choice.finish_reason]),
        is_usage_only=usage is not None and not answer.choices,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
    )


def _error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _choice_part(choice: _Choice) -> tuple[int, str]:
    """Its index, 0 where the server gives none, and its text."""
    part = choice.delta or choice.message or choice
    # Text a reader sees later still counts: reasoning and tool arguments are generated tokens too.
    pieces = [part.text, part.content, part.reasoning, part.reasoning_content]
    if part.tool_calls:
        pieces += [call.function.arguments for call in part.tool_calls if call.function]
    text = "".join([piece for piece in pieces if piece and isinstance(piece, str)])
    return _index(choice), text


def _index(choice: _Choice) -> int:
    return choice.index if isinstance(choice.index, int) else 0


class EventShape:
    """What the token events of one stream have in common: all but the text of one choice.

    Attributes:
        choice: the one whose text it brings.
    """

    __slots__ = ("_head", "_num_head_bytes", "_num_tail_bytes", "_tail", "choice")

    def __init__(self, choice: int, head: bytes, tail: bytes) -> None:
        self.choice = choice
        self._head, self._num_head_bytes = head, len(head)
        self._tail, self._num_tail_bytes = tail, len(tail)

    @classmethod
    def learn(cls, event: bytes, said: StreamEvent) -> EventShape | None:
        """The shape of an event, of which `said` was read; None where its text does not stand there for itself.

        That is so only where the text of one choice, and nothing else, is in it, and once.
        """
        if len(said.parts) != 1 or said.finished or said.output_tokens is not None or event.count(b"\n") != 2:
            return None
        choice, text = said.parts[0]
        quoted = b'"%b"' % text.encode()
        # Without an escape in it, each of its strings stands there as it is.
        if not text or b"\\" in event or event.count(quoted) != 1:
            return None
        if not (event.startswith(b"data:") and event.endswith(b"\n\n")):
            return None
        begin = event.index(quoted) + 1
        return cls(choice, event[:begin], event[begin + len(quoted) - 2 :])

    def is_of(self, event: bytes) -> bool:
        """Whether an event is of this shape, and so brings text of its choice and says nothing else."""
        if not (event.startswith(self._head) and event.endswith(self._tail)):
            return False
        text = event[self._num_head_bytes : len(event) - self._num_tail_bytes]
        return _PLAIN_TEXT.fullmatch(text) is not None and (text.isascii() or _is_utf8(text))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class UsageNotes:
    """The server's count of an answer's tokens, as its events tell it.

    While several choices are written, a server counts those of each by itself (vLLM does); what stands beside no
    choice, or beside several, is of all.

    Attributes:
        prompt_tokens: as last told.
    """

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self._total: int | None = None
        self._by_choice: dict[int, int] = {}

    def take(self, event: StreamEvent) -> None:
        """Note what one event says."""
        if event.output_tokens is None:
            return
        self.prompt_tokens = event.prompt_tokens
        if len(event.parts) == 1:
            self._by_choice[event.parts[0][0]] = event.output_tokens
        else:
            self._total = event.output_tokens

    @property
    def output_tokens(self) -> int | None:
        """Those of the answer; of one that goes on or was cut off, those so far; None where nothing was told."""
        if self._total is None and self._by_choice:
            return sum(self._by_choice.values())
        return self._total
