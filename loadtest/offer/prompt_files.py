"""Reads people's own prompts: JSON lines or a JSON array, gzipped or not. Each row is in one of these layouts:

{"prompt": ...} or {"messages": [...]}      our own; messages may have parts and calls of tools, the row `tools`
{"custom_id": ..., "body": {...}}           OpenAI's batch files: what the body has of the layout above
{"conversations": [{"from", "value"}]}      ShareGPT: the first question of each conversation
{"conversation": [{"role", "content"}]}     WildChat, LMSYS-Chat: likewise
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.offer.request_body import Message
from loadtest.offer.user_files import MAX_ROWS, json_rows

MAX_OUTPUT_TOKENS = 1_000_000
MAX_NAMED_KEYS = 12
ROLES = ("system", "developer", "user", "assistant", "tool")
OUTPUT_KEYS = ("output_tokens", "max_tokens", "max_completion_tokens")
TOOL_KEYS = ("tools", "tool_choice")
MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id")  # beside role and content
LABELS = ("custom_id", "id", "method", "url")  # of a row; nothing that a server would be told
# Who asks in ShareGPT's files, and in those made like them.
ASKERS = ("human", "user")
ITEMS = 'if type == "array" then .[] else . end | .body // .'  # of a JSON array and of JSON lines
FOREIGN_LAYOUTS = (
    ("Alpaca", ("instruction", "output"), '{prompt: ([.instruction, .input // ""] | join("\\n"))}'),
    ("Dolly", ("instruction", "response"), '{prompt: ([.instruction, .context // ""] | join("\\n"))}'),
    ("OpenAI's Responses API", ("input", "model"), "{prompt: .input}"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Attributes: output_tokens: length of the answer, where the row has one; tools: keys of the body beside it."""

    messages: tuple[Message, ...]
    output_tokens: int | None = None
    tools: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Attributes: notes: what of the file is not sent, a line each."""

    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...]


def read_prompt_file(path: Path) -> PromptFile:
    """Read all prompts of a file.

    Raises:
        ValueError: with file, line and value; or the file holds no prompts, or is in a layout that is not known.
    """
    prompts: list[Prompt] = []
    ignored: set[str] = set()
    num_conversations = num_without_question = 0
    not_json = f"; a text file with a prompt a line: {_command(path, '{prompt: .}', '-Rc')}"
    with closing(json_rows(path, not_json)) as placed_rows:
        for place, row in placed_rows:
            where = f"{path}, {place}"
            if (turns := _turns(row)) is not None:
                num_conversations += 1
                question = next((text for asks, text in turns if asks and text.strip()), None)
                if question is None:
                    num_without_question += 1
                    continue
                prompts.append(Prompt(_user(question)))
            else:
                body = row["body"] if isinstance(row.get("body"), dict) else row
                prompts.append(_prompt(path, where, body))
                ignored |= _unheard(row, body)
            if len(prompts) > MAX_ROWS:
                raise ValueError(f"{path}: more than {MAX_ROWS} rows; cut the file")
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    notes = []
    if num_conversations:
        notes.append(f"{path}: of each of {num_conversations} conversations the first question is sent")
    if num_without_question:
        notes.append(
            f"{path}: {num_without_question} conversations are left out: nobody asks anything in them"
        )
    if ignored:
        names = sorted(ignored)
        more = ", ..." if len(names) > MAX_NAMED_KEYS else ""
        notes.append(f"{path}: keys that are not sent: {', '.join(names[:MAX_NAMED_KEYS])}{more}")
    return PromptFile(tuple(prompts), tuple(notes))


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _turns(row: Mapping[str, Any]) -> Iterator[tuple[bool, str]] | None:
    """Of each turn of a recorded conversation whether the user speaks, and what; None for a row that is none."""
    for key, speaker, text in (("conversations", "from", "value"), ("conversation", "role", "content")):
        if isinstance(turns := row.get(key), list):
            return (
                (turn.get(speaker) in ASKERS, turn[text])
                for turn in turns
                if isinstance(turn, dict) and isinstance(turn.get(text), str)
            )
    return None


def _prompt(path: Path, where: str, body: Mapping[str, Any]) -> Prompt:
    if ("messages" in body) == ("prompt" in body):
        raise ValueError(f"{where}: {_what_to_do(path, body)}")
    output_tokens = _output_tokens(where, body)
    tools = {key: body[key] for key in TOOL_KEYS if body.get(key) is not None}
    if "tools" in tools and not (
        isinstance(tools["tools"], list) and all(isinstance(tool, dict) for tool in tools["tools"])
    ):
        raise ValueError(f"{where}: tools={tools['tools']!r:.40} must be a list of objects")
    if "prompt" in body:
        return Prompt(_user(_text(where, "prompt", body["prompt"])), output_tokens, tools)
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: messages={messages!r:.40} must be a list of at least one message")
    return Prompt(tuple(_message(where, message) for message in messages), output_tokens, tools)


def _what_to_do(path: Path, body: Mapping[str, Any]) -> str:
    for name, keys, wanted in FOREIGN_LAYOUTS:
        if all(key in body for key in keys) and not {"messages", "prompt"} & body.keys():
            return f"has the keys of {name}; make prompts of it: {_command(path, f'{ITEMS} | {wanted}')}"
    keys_shown = ", ".join(map(str, body)) or "nothing"
    return (
        f"needs either messages or prompt, and has {keys_shown:.200}; "
        f"name yours: {_command(path, f'{ITEMS} | {{prompt: .YOURS}}')}"
    )


def _command(path: Path, program: str, options: str = "-c") -> str:
    """A line for the shell that makes prompts of a file."""
    source = shlex.quote(os.fspath(path))
    made = path.with_name(f"{path.name.partition('.')[0]}.prompts.jsonl") if path.name else path
    jq = f"jq {options} {shlex.quote(program)}"
    read = f"gzip -dc {source} | {jq}" if path.suffix == ".gz" else f"{jq} {source}"
    return f"{read} > {shlex.quote(os.fspath(made))}"


def _output_tokens(where: str, body: Mapping[str, Any]) -> int | None:
    given = {key: body[key] for key in OUTPUT_KEYS if body.get(key) is not None}
    for key, tokens in given.items():
        if not (type(tokens) is int and 1 <= tokens <= MAX_OUTPUT_TOKENS):
            raise ValueError(
                f"{where}: {key}={tokens!r:.40} must be a whole number in 1..{MAX_OUTPUT_TOKENS}"
            )
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{key}={tokens}" for key, tokens in given.items())
        raise ValueError(f"{where}: {shown} contradict each other")
    return next(iter(given.values()), None)


def _unheard(row: Mapping[str, Any], body: Mapping[str, Any]) -> set[str]:
    heard = {"prompt", "messages", "body", *OUTPUT_KEYS, *TOOL_KEYS, *LABELS}
    unheard = (set(row) | set(body)) - heard
    for message in body.get("messages", ()):
        unheard |= {f"messages.{key}" for key in set(message) - {"role", "content", *MESSAGE_KEYS}}
    return unheard


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"{where}: {message!r:.80} must be a message with a role of {', '.join(ROLES)}")
    kept = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
    content = message.get("content")
    if content is None and "tool_calls" in kept:
        return {"role": message["role"], "content": None, **kept}
    if isinstance(content, list) and content and all(_is_part(part) for part in content):
        return {"role": message["role"], "content": content, **kept}
    if message["role"] == "tool" and content == "":  # a tool may have nothing to say
        return {"role": "tool", "content": "", **kept}
    return {"role": message["role"], "content": _text(where, "content", content), **kept}


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        parts = ", or a list of content parts" if name == "content" else ""
        raise ValueError(f"{where}: {name}={value!r:.40} must be text{parts}")
    return value
