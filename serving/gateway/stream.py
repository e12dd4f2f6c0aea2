"""What passes through a stream, noted on the way: instants, usage, and whether it ended as it should."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.core.sse import EventShape, EventSplitter, UsageNotes, parse_event

WORTH_LEARNING = 3  # chunks with text; a shorter answer ends before it pays


@dataclass
class StreamNotes:
    """Feeds on an engine's bytes and gives back the client's.

    An engine's token events differ in their text alone: once one has been read, those of its shape are known by
    their first and last bytes, and all others are read as before.

    Args:
        strip_usage: drop the usage event that the client did not ask for.

    Attributes:
        chunk_at_s: when each chunk with text was whole; an event with text of several choices is a chunk of each.
        chunk_choice: which choice each of them belongs to.
        usage: the engine's count of tokens.
    """

    strip_usage: bool
    chunk_at_s: list[float] = field(default_factory=list)
    chunk_choice: list[int] = field(default_factory=list)
    usage: UsageNotes = field(default_factory=UsageNotes)
    error: str | None = None
    _is_done: bool = False
    _choices: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _splitter: EventSplitter = field(default_factory=EventSplitter)
    _shape: EventShape | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the answer is whole: it said `[DONE]`, or why each of its choices ended, with its usage.

        Not every server says `[DONE]`; vLLM does.
        """
        is_finished = bool(self._finished) and self._finished >= self._choices
        return self._is_done or (is_finished and self.usage.output_tokens is not None)

    def feed(self, data: bytes, now_s: float) -> bytes:
        """The whole events completed by `data`, for the client.

        Raises:
            EventTooLargeError: an event does not end.
        """
        events = self._splitter.feed(data)
        return b"".join([event for event in events if self._keep(event, now_s)])

    def _keep(self, event: bytes, now_s: float) -> bool:
        shape = self._shape
        if shape is not None and shape.is_of(event):
            self.chunk_at_s.append(now_s)
            self.chunk_choice.append(shape.choice)
            return self.error is None
        said = parse_event(event)
        for choice, text in said.parts:
            self._choices.add(choice)
            if text:
                self.chunk_at_s.append(now_s)
                self.chunk_choice.append(choice)
        if said.output_tokens is not None:
            self.usage.take(said)
        self._finished.update(said.finished)
        self._is_done = self._is_done or said.is_done
        self.error = self.error or said.error
        if self.error is not None:
            return False  # what the engine says of its fault, and its [DONE] after it, are not the client's answer
        if len(self.chunk_at_s) >= WORTH_LEARNING:
            self._shape = EventShape.learn(event, said) or shape
        return not (said.is_usage_only and self.strip_usage)
