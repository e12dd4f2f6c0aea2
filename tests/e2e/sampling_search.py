"""Sampling options against a speculating engine, alone and in pairs: what is asked, and what comes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

# One harmless value of each option that both endpoints know; `NAME/VARIANT` is another value of it.
COMMON: dict[str, dict[str, Any]] = {
    "temperature/greedy": {"temperature": 0},
    "temperature/low": {"temperature": 0.3},
    "temperature/high": {"temperature": 1.9},
    "top_k/1": {"top_k": 1},
    "top_k/50": {"top_k": 50},
    "top_k/off": {"top_k": -1},
    "top_p": {"top_p": 0.8},
    "top_p/tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -2.0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "seed": {"seed": 7},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "prompt_logprobs/0": {"prompt_logprobs": 0},
    "logit_bias": {"logit_bias": {"42": 3.0}},
    "min_tokens": {"min_tokens": 1},
    "bad_words": {"bad_words": ["ferry", "leaves at nine"]},
    "stop": {"stop": ["nine", "\n"]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [28, 30]},
    "ignore_eos": {"ignore_eos": True},
    "allowed_token_ids": {"allowed_token_ids": list(range(20, 400))},
    "allowed_token_ids/1": {"allowed_token_ids": [42]},
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "use_beam_search": {"use_beam_search": True},
    "length_penalty": {"length_penalty": 0.5},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "truncation_side": {"truncation_side": "left"},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "add_special_tokens": {"add_special_tokens": False},
    "return_token_ids": {"return_token_ids": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
    "thinking_token_budget": {"thinking_token_budget": 2},
    "watermarking": {"watermarking": False},
    "vllm_xargs": {"vllm_xargs": {"a": 1}},
    "logits_processors": {"logits_processors": ["x"]},
    "priority": {"priority": 1},
    "cache_salt": {"cache_salt": "salt"},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "stream_interval": {"stream_interval": 2},
    "response_format/json_object": {"response_format": {"type": "json_object"}},
    "response_format/json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    },
    "structured_outputs/json": {"structured_outputs": {"json": SCHEMA}},
    "structured_outputs/regex": {"structured_outputs": {"regex": "[a-z]{1,9}"}},
    "structured_outputs/choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "structured_outputs/grammar": {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}},
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/completions": COMMON
    | {
        "logprobs": {"logprobs": 3},
        "logprobs/0": {"logprobs": 0},
        "logprob_token_ids": {"logprobs": 3, "logprob_token_ids": [1, 2, 3]},
        "echo": {"echo": True},
        "suffix": {"suffix": "."},
        "prompt/ids": {"prompt": [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]},
        "prompt/two": {"prompt": ["a b a b a b a", "one two"]},
    },
    "/v1/chat/completions": COMMON
    | {
        "logprobs": {"logprobs": True, "top_logprobs": 3},
        "logprobs/0": {"logprobs": True, "top_logprobs": 0},
        "logprob_token_ids": {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [1, 2, 3]},
        "echo": {"echo": True},
        "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
        "max_completion_tokens": {"max_completion_tokens": 3},
        "tools": {"tools": [TOOL]},
        "tools/required": {"tools": [TOOL], "tool_choice": "required"},
        "reasoning_effort": {"reasoning_effort": "low"},
    },
}
# These are done with before or after an engine's step, or refused.
OUTSIDE_A_STEP = {
    "include_stop_str_in_output", "best_of", "length_penalty", "truncate_prompt_tokens", "truncation_side",
    "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "return_token_ids",
    "return_tokens_as_token_ids", "watermarking", "vllm_xargs", "logits_processors", "priority", "cache_salt",
    "stream", "stream_interval", "min_p", "logit_bias", "logprob_token_ids", "suffix", "prompt/ids", "prompt/two",
}  # fmt: skip
TIMEOUT_S = 600  # a busy machine is no fault of the engine
COPIES_ITSELF = "The ferry leaves at nine. The ferry leaves at nine. The ferry leaves at"
IS_NEW = "Once upon a time"


@dataclass(frozen=True)
class Case:
    """One request: some options at one endpoint, with a prompt that gives n-gram drafts or for one step without."""

    path: str
    names: tuple[str, ...]
    has_drafts: bool

    @property
    def body(self) -> dict[str, Any]:
        """The request without its model."""
        text = COPIES_ITSELF if self.has_drafts else IS_NEW
        body: dict[str, Any] = {"max_tokens": 5 if self.has_drafts else 1}
        if self.path == "/v1/completions":
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        for name in self.names:
            body |= OPTIONS[self.path][name]
        return body


@dataclass(frozen=True)
class Outcome:
    """What came of a case: the HTTP status, 0 when the connection broke, and what was said of an error."""

    case: Case
    batch: int
    status: int
    message: str

    @property
    def is_fault(self) -> bool:
        """True for all but an answer and a refusal."""
        return not (200 <= self.status < 300 or 400 <= self.status < 500)


def cases(num_options: int) -> list[Case]:
    """Every set of that many options whose keys do not overlap, at both endpoints, with and without drafts."""
    return [
        Case(path, names, has_drafts)
        for path, options in OPTIONS.items()
        for has_drafts in (False, True)
        for names in itertools.combinations(options, num_options)
        if len({key for name in names for key in options[name]}) == sum(len(options[name]) for name in names)
    ]


def batches(some: Sequence[Case], size: int, seed: int) -> Iterator[tuple[Case, ...]]:
    """The cases in batches; those of more than one mix options, endpoints and prompts."""
    order = list(some)
    if size > 1:
        random.Random(seed).shuffle(order)
    for start in range(0, len(order), size):
        yield tuple(order[start : start + size])


async def _send(client: httpx.AsyncClient, model: str, case: Case, batch: int) -> Outcome:
    try:
        answer = await client.post(case.path, json={"model": model} | case.body)
    except httpx.HTTPError as error:
        return Outcome(case, batch, 0, repr(error))
    status, text = answer.status_code, answer.text
    if status == 200 and (
        event := next((e for e in text.split("\n\n") if e.startswith('data: {"error"')), None)
    ):
        return Outcome(case, batch, int(json.loads(event[6:])["error"]["code"]), event)  # in a stream
    return Outcome(case, batch, status, "" if status == 200 else text)


async def _is_alive(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


async def ask(url: str, model: str, asked: Iterable[tuple[Case, ...]]) -> list[Outcome]:
    """Send batch after batch, the requests of each at once; stop when the engine has died."""
    outcomes: list[Outcome] = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        for batch in asked:
            found = await asyncio.gather(*(_send(client, model, case, len(batch)) for case in batch))
            outcomes += found
            if any(outcome.is_fault for outcome in found) and not await _is_alive(client):
                break
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Counts by endpoint, drafts, number of options and batch: answered, refused, faults."""
    counts: dict[tuple[str, str, int, int], Counter[str]] = {}
    for one in outcomes:
        row = (one.case.path, "drafts" if one.case.has_drafts else "none", len(one.case.names), one.batch)
        kind = "faults" if one.is_fault else "answered" if one.status < 300 else "refused"
        counts.setdefault(row, Counter())[kind] += 1
    lines = [
        "| endpoint | drafts | options | batch | answered | refused | 5xx or death |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, count in sorted(counts.items()):
        cells = (*row, count["answered"], count["refused"], count["faults"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
