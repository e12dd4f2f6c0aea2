"""What the gateway reads of a request body: enough to route it, and no more. The engine checks the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serving.config import LabConfig
from serving.core.errors import MAX_SHOWN_CHARS, Reason, RefusedError
from serving.core.request import BYTES_PER_TOKEN, SchedulingRequest
from serving.core.speculation.text_kind import TextKind
from serving.gateway.prefix import prefix_blocks
from serving.gateway.prompt_kind import prompt_kind
from serving.gateway.scheduling_headers import read_wishes

MAX_INT = 2**63 - 1
_decode = msgspec.json.Decoder().decode
# A number outside 64 bits has 19 digits or more; looking for them costs a hundredth of reading each number.
_DIGITS_AS_0 = bytes.maketrans(
    bytes(range(256)), bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
)
_LONG_NUMBER = b"0" * 19
_ASK_FOR_USAGE = b'"stream_options":{"include_usage":true},'
PROMPT_FIELDS = ("messages", "prompt", "suffix", "tools", "documents")
MAX_COUNTED_VALUES = 10_000  # of a prompt; one of more parts is booked by its bytes
DEFAULT_COMPLETION_TOKENS = 16  # what the API gives `/v1/completions` when the request names no limit
MAX_CHOICES = 128  # of one request, when load is booked; what an engine accepts is its own affair
# Refused when speculation is on: two by vLLM, the last by us, for it ends the engine.
PLAIN_ONLY_OPTIONS = ("min_p", "logit_bias", "logprob_token_ids")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request body made ready for an engine.

    Attributes:
        scheduling: what the scheduler is told.
        body: the bytes for the engine; the client's own unless usage had to be asked for.
        is_stream: whether the client wants events.
        strip_usage: the client did not ask for the usage event, so it does not get the one the gateway asked for.
    """

    scheduling: SchedulingRequest
    body: bytes
    is_stream: bool
    strip_usage: bool


def model_names(config: LabConfig) -> list[str]:
    """Names clients may use: the bare ones, the lab's first, then one that pins each lane."""
    bare = dict.fromkeys(
        [config.model.name, *(lane.unpinned_model for lane in config.lanes if lane.unpinned_model)]
    )
    return [*bare, *(f"{config.model_name(lane)}:{lane.name}" for lane in config.lanes)]


def names_of(config: LabConfig, model: str) -> list[str]:
    """Those of a model, the bare one first: what its engines answer to."""
    return [model] + [name for name in model_names(config) if name.startswith(f"{model}:")]


def unknown_model(model: Any, config: LabConfig) -> RefusedError:
    """What whoever asks for a model that is not served is told."""
    served = ", ".join(model_names(config))
    return RefusedError(Reason.UNKNOWN_MODEL, f"model {_brief(model)} does not exist; served: {served}")


def route(
    raw: bytes, headers: Mapping[str, str], *, request_id: str, is_chat: bool, config: LabConfig
) -> RoutedRequest:
    """Read a body and its headers, and decide what the scheduler and the engine get.

    Raises:
        RefusedError: malformed JSON, a model that is not served, or a scheduling header out of bounds.
    """
    body = _parse(raw)
    wishes = read_wishes(headers, body, config.scheduler)
    model, lane = _choice(body.get("model"), config)
    prompt_tokens = _prompt_tokens(raw, body)
    is_stream = body.get("stream") is True
    strip_usage = False
    if is_stream and isinstance(options := body.get("stream_options") or {}, dict):
        strip_usage = not options.get("include_usage")
        if strip_usage:
            raw = _asking_for_usage(raw, body, options)
    scheduling = SchedulingRequest(
        request_id=request_id,
        lane=lane,
        model=model,
        prompt_tokens=prompt_tokens,
        max_output_tokens=_max_output_tokens(body, prompt_tokens, is_chat, config),
        num_sequences=_num_sequences(body, is_chat, model, lane, config),
        needs_plain_decoding=any(body.get(option) for option in PLAIN_ONLY_OPTIONS),
        tenant=wishes.tenant,
        band=wishes.band,
        ttft_deadline_s=wishes.ttft_deadline_s,
        max_queue_s=wishes.max_queue_s,
        prefix_blocks=prefix_blocks(body) if config.scheduler.placement == "prefix_affinity" else (),
        kind=prompt_kind(body) if config.scheduler.placement == "adaptive" else TextKind.OPEN,
    )
    return RoutedRequest(scheduling, raw, is_stream, strip_usage)


def _asking_for_usage(raw: bytes, body: dict[str, Any], options: dict[str, Any]) -> bytes:
    """The body with usage asked for at the stream's end, and nowhere else: no client gets more than without us."""
    if "stream_options" not in body:
        begin = raw.index(b"{") + 1
        return raw[:begin] + _ASK_FOR_USAGE + raw[begin:]
    asked = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
    return msgspec.json.encode(body | {"stream_options": asked | {"include_usage": True}})


def _prompt_tokens(raw: bytes, body: Mapping[str, Any]) -> int:
    """About how many tokens the prompt has: its text in UTF-8, however the client wrote it, and its token ids."""
    num_bytes = num_values = 0
    left = [body[name] for name in PROMPT_FIELDS if name in body]
    while left:
        value = left.pop()
        num_values += 1
        if num_values > MAX_COUNTED_VALUES:
            return len(raw) // BYTES_PER_TOKEN
        if isinstance(value, str):
            num_bytes += len(value) if value.isascii() else len(value.encode())
        elif isinstance(value, list) and value and isinstance(value[0], int):
            num_bytes += len(value) * BYTES_PER_TOKEN
        elif isinstance(value, list):
            left += value[: MAX_COUNTED_VALUES + 1]
        elif isinstance(value, dict):
            left += value.values()
    return num_bytes // BYTES_PER_TOKEN


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        if _LONG_NUMBER in raw.translate(_DIGITS_AS_0):
            json.loads(raw, parse_int=_int)  # slower, and it sees each number before it is one
        body = _decode(raw)
    except _NumberError as error:
        raise RefusedError(Reason.BAD_REQUEST, f"{_place_of_number(raw)}: {error}") from None
    except (ValueError, RecursionError) as error:  # what msgspec raises is a ValueError
        raise RefusedError(Reason.BAD_REQUEST, f"the body is not valid JSON: {error!s:.300}") from None
    if not isinstance(body, dict):
        raise RefusedError(Reason.BAD_REQUEST, f"the body must be a JSON object, got {type(body).__name__}")
    return body


class _NumberError(ValueError):
    """A whole number that no engine's field can hold."""


def _int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MAX_INT:
        raise _NumberError(f"the number {digits:.30} is outside 64 bits")
    return int(digits)


def _place_of_number(raw: bytes) -> str:
    """Where in a body the first number is that `_int` does not take, as `messages.0.seed`."""

    def marked(digits: str) -> int | _NumberError:
        try:
            return _int(digits)
        except _NumberError as error:
            return error

    def place(value: Any) -> list[str] | None:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            if isinstance(inner, _NumberError):
                return [str(key)]
            if isinstance(inner, dict | list) and (rest := place(inner)) is not None:
                return [str(key), *rest]
        return None

    try:
        body = json.loads(raw, parse_int=marked)
        found = place(body) if isinstance(body, dict | list) else None
    except (ValueError, RecursionError):  # it has another fault, further on
        found = None
    return f"`{'.'.join(found):.{MAX_SHOWN_CHARS}}`" if found else "the body"


def _choice(model: Any, config: LabConfig) -> tuple[str, str | None]:
    """The lane that a model's name pins; else whose lanes the scheduler may choose from, "" for the lab's own."""
    if not isinstance(model, str):
        raise RefusedError(Reason.BAD_REQUEST, f"`model` must be a string, got {_brief(model)}")
    if model == config.model.name:
        return "", None
    name, _, pinned = model.partition(":")
    for lane in config.lanes:
        if lane.name == pinned and config.model_name(lane) == name:
            return "", pinned
        if model and lane.unpinned_model == model:
            return model, None
    raise unknown_model(model, config)


def _max_output_tokens(body: dict[str, Any], prompt_tokens: int, is_chat: bool, config: LabConfig) -> int:
    """The most tokens the answer may hold, at least 1. A wrong type counts as not given: the engine refuses it."""
    num_prompts = 1 if is_chat else _num_prompts(body.get("prompt"))
    room = max(1, config.model.max_model_len - prompt_tokens // num_prompts)
    default = room if is_chat else DEFAULT_COMPLETION_TOKENS
    asked = _count(body.get("max_completion_tokens") or body.get("max_tokens")) or default
    return min(asked, room) * min(num_prompts * (_count(body.get("n")) or 1), MAX_CHOICES)


def _num_sequences(
    body: dict[str, Any], is_chat: bool, model: str, lane: str | None, config: LabConfig
) -> int:
    """Slots that the request takes of its replica: one for each choice of each prompt."""
    num_prompts = 1 if is_chat else _num_prompts(body.get("prompt"))
    num_choices = _count(body.get("n")) or 1
    num_sequences = num_prompts * num_choices
    lanes = [
        one for one in config.lanes if one.name == lane or (lane is None and one.unpinned_model == model)
    ]
    widest = max(lanes or config.lanes, key=lambda one: one.max_num_seqs)
    if num_sequences > widest.max_num_seqs:
        raise RefusedError(
            Reason.BAD_REQUEST,
            f"`n` = {num_choices} choices of each of {num_prompts} prompts: {num_sequences} sequences; "
            f"a replica runs at most {widest.max_num_seqs} at once (lanes[{widest.name}].max_num_seqs)",
        )
    return num_sequences


def _num_prompts(prompt: Any) -> int:
    """Each of a list of texts, or of lists of token ids, is answered by itself; a list of token ids is one."""
    is_several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
    return len(prompt) if is_several else 1


def _brief(value: Any) -> str:
    """A client's value for an error text, which must not be as long as the client likes."""
    return f"{value!r:.100}"


def _count(value: Any) -> int | None:
    """The value when it is a positive integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
