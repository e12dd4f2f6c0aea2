"""One request as the server is asked it. What may be in a body depends on which API the server speaks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""Role and content: text, or content parts; of a user's own prompts calls of tools, too."""


class Dialect(StrEnum):
    """Which API a server speaks."""

    TANDEM = "tandem"  # our gateway: passes vLLM's additions through
    VLLM = "vllm"
    OPENAI = "openai"  # only what OpenAI's own API has; answers may end before the length asked for


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is asked: a conversation, how long the answer shall be, and what tools are there (keys of the body)."""

    messages: tuple[Message, ...]
    output_tokens: int
    tools: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("a request without messages asks nothing")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens={self.output_tokens} must be at least 1")


def build_body(
    request: ChatRequest,
    *,
    model: str,
    seed: int,
    dialect: Dialect = Dialect.TANDEM,
    salt: str = "",
    salts_text: bool = False,
) -> dict[str, Any]:
    """A streaming chat request, decoded greedily.

    Args:
        salt: names what may share cached prefixes beside the seed; any text.
        salts_text: begin the first message with a salted line, for a server with a prefix cache but without
            `cache_salt`. The line adds about 10 tokens to the prompt.
    """
    cache_salt = hashlib.sha256(f"{seed}/{salt}".encode()).hexdigest()[:16]
    messages = [dict(message) for message in request.messages]
    if salts_text:
        messages[0]["content"] = _salted(f"Run {cache_salt}.", messages[0]["content"])
    body: dict[str, Any] = {
        **request.tools,
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": seed,
    }
    if dialect is Dialect.OPENAI:
        return body | {"max_completion_tokens": request.output_tokens}
    return body | {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "min_tokens": request.output_tokens,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        # A prefix that an earlier run left in the cache does not match under another salt.
        "cache_salt": cache_salt,
    }


def _salted(line: str, content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": line}, *content]
    return line if content is None else f"{line}\n{content}"
