"""What the gateway reads of a body, and that it changes nothing it need not change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import LabConfig, LaneConfig, LaneModelConfig, SpeculationConfig
from serving.core.errors import Reason, RefusedError
from serving.core.lane import Strategy
from serving.gateway.openai_request import RoutedRequest, model_names, names_of, route

CONFIG = LabConfig(
    lanes=(
        LaneConfig(name="batched", strategy=Strategy.BATCHED),
        LaneConfig(name="speculative", strategy=Strategy.SPECULATIVE, speculation=SpeculationConfig()),
    )
)
MODEL = CONFIG.model.name
TUNED = LaneModelConfig(path="/models/tuned", name="tuned")
MAX_MODEL_LEN = CONFIG.model.max_model_len


def routed(raw: bytes | None = None, *, is_chat: bool = True, **fields: Any) -> RoutedRequest:
    body = json.dumps({"model": MODEL} | fields).encode() if raw is None else raw
    return route(body, {}, request_id="id", is_chat=is_chat, config=CONFIG)


def reason_of(raw: bytes) -> Reason:
    with pytest.raises(RefusedError) as caught:
        routed(raw)
    assert len(str(caught.value)) < 500, "an error text is not as long as the client likes"
    return caught.value.reason


# Lane


def test_the_names_are_the_model_and_one_for_each_lane() -> None:
    assert model_names(CONFIG) == [MODEL, f"{MODEL}:batched", f"{MODEL}:speculative"]


@pytest.mark.parametrize(
    ("model", "lane"),
    [(MODEL, None), (f"{MODEL}:batched", "batched"), (f"{MODEL}:speculative", "speculative")],
)
def test_a_name_pins_its_lane(model: str, lane: str | None) -> None:
    assert routed(model=model).scheduling.lane == lane


@pytest.mark.parametrize(
    "model", ["gpt-4", f"{MODEL}:", f"{MODEL}:nope", ":batched", f"{MODEL}:batched:x", ""]
)
def test_an_unknown_name_is_a_404_that_lists_the_served_ones(model: str) -> None:
    with pytest.raises(RefusedError, match=f"served: {MODEL}, {MODEL}:batched") as caught:
        routed(model=model)
    assert caught.value.reason is Reason.UNKNOWN_MODEL


TWO_MODELS = LabConfig(
    lanes=(
        LaneConfig(name="own", strategy=Strategy.BATCHED, max_num_seqs=1),
        LaneConfig(name="small", strategy=Strategy.BATCHED, max_num_seqs=2, model=TUNED),
        LaneConfig(name="wide", strategy=Strategy.BATCHED, takes_unpinned=False, model=TUNED),
        LaneConfig(name="nameless", strategy=Strategy.BATCHED, model=LaneModelConfig(path="/models/other")),
    )
)


def test_the_names_of_several_models() -> None:
    everything = [MODEL, "tuned", f"{MODEL}:own", "tuned:small", "tuned:wide", f"{MODEL}:nameless"]
    assert model_names(TWO_MODELS) == everything
    assert names_of(TWO_MODELS, "tuned") == ["tuned", "tuned:small", "tuned:wide"]
    assert names_of(TWO_MODELS, MODEL) == [MODEL, f"{MODEL}:own", f"{MODEL}:nameless"]


@pytest.mark.parametrize(
    ("name", "model", "lane"),
    [
        (MODEL, "", None),
        (f"{MODEL}:own", "", "own"),
        ("tuned", "tuned", None),
        ("tuned:small", "", "small"),
        ("tuned:wide", "", "wide"),
        (f"{MODEL}:nameless", "", "nameless"),
    ],
)
def test_a_name_says_the_lane_or_whose_lanes(name: str, model: str, lane: str | None) -> None:
    body = json.dumps({"model": name}).encode()
    scheduling = route(body, {}, request_id="id", is_chat=True, config=TWO_MODELS).scheduling
    assert (scheduling.model, scheduling.lane) == (model, lane)


@pytest.mark.parametrize("name", [f"{MODEL}:small", "tuned:own", "tuned:nameless", "", "small"])
def test_a_lane_is_not_served_under_the_name_of_another_model(name: str) -> None:
    body = json.dumps({"model": name}).encode()
    with pytest.raises(RefusedError, match=f"served: {MODEL}, tuned, {MODEL}:own"):
        route(body, {}, request_id="id", is_chat=True, config=TWO_MODELS)


@pytest.mark.parametrize(("name", "limit"), [(MODEL, 1), ("tuned", 2), ("tuned:wide", 16)])
def test_choices_are_bounded_by_the_lanes_of_the_model(name: str, limit: int) -> None:
    body = json.dumps({"model": name, "n": limit + 1}).encode()
    with pytest.raises(RefusedError, match=f"at most {limit} at once"):
        route(body, {}, request_id="id", is_chat=True, config=TWO_MODELS)


# Malformed


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe",
        b"[1]",
        b'"text"',
        b"null",
        b"[" * 100_000,
        b'{"model": null}',
        b"{}",
        b'{"model": ["x"]}',
        b'{"model": 1' + b"0" * 5000 + b"}",
        b'{"model": "%s", "n": 9223372036854775808}' % MODEL.encode(),
        b'{"model": "%s", "min_p": NaN}' % MODEL.encode(),
        b'{"model": "%s", "prompt": "half a pair \\ud800"}' % MODEL.encode(),
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_malformed_body_is_the_clients_mistake(raw: bytes) -> None:
    assert reason_of(raw) is Reason.BAD_REQUEST


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"seed": 18446744073709551616}', "`seed`"),
        ('{"messages": [{"content": "x"}, {"n": -9223372036854775808}]}', "`messages.1.n`"),
        (json.dumps({"a": {"k" * 500: 10**30}}), "`a.kkk"),
        ('{"seed": 18446744073709551616', "the body"),
        ('{"seed": 18446744073709551616, "x": ' + "[" * 5000, "the body"),
    ],
)
def test_a_number_that_no_engine_takes_is_named_by_its_field(body: str, place: str) -> None:
    with pytest.raises(RefusedError, match="outside 64 bits") as caught:
        routed(body.encode())
    assert str(caught.value).startswith(place)
    assert len(str(caught.value)) < 200


def test_a_huge_value_is_not_repeated_in_full() -> None:
    assert reason_of(json.dumps({"model": ["x" * 10_000]}).encode()) is Reason.BAD_REQUEST
    assert reason_of(json.dumps({"model": "x" * 10_000}).encode()) is Reason.UNKNOWN_MODEL


@pytest.mark.parametrize("depth", [10, 500, 900, 960, 980, 990, 1000, 2000])
def test_deep_nesting_is_read_or_refused_but_never_a_fault(depth: int) -> None:
    raw = b'{"model": "%s", "stream": true, "x": %s%s}' % (MODEL.encode(), b"[" * depth, b"]" * depth)
    reason: Reason | None = None
    try:
        routed(raw)
    except RefusedError as refusal:
        reason = refusal.reason
    assert reason in ((None,) if depth < 800 else (None, Reason.BAD_REQUEST))


# Usage of a stream


def test_a_whole_answer_goes_through_byte_for_byte() -> None:
    raw = b'{ "model":"%s",\n "x": 1.10, "x": 2, "stream_options": null}' % MODEL.encode()
    found = routed(raw)
    assert (found.body, found.is_stream, found.strip_usage) == (raw, False, False)


def test_a_stream_that_asks_for_usage_goes_through_byte_for_byte() -> None:
    raw = b'{ "model":"%s", "stream":true, "stream_options": {"include_usage": true}}' % MODEL.encode()
    found = routed(raw)
    assert (found.body, found.is_stream, found.strip_usage) == (raw, True, False)


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}]
)
def test_usage_is_asked_for_and_hidden_when_the_client_did_not_ask(options: dict[str, Any]) -> None:
    found = routed(stream=True, messages=[{"role": "user", "content": "grüße \U0001f600"}], **options)
    assert found.strip_usage
    sent = json.loads(found.body)
    assert sent.pop("stream_options") == {"include_usage": True}
    assert sent == {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": "grüße \U0001f600"}],
    }


def test_other_stream_options_are_kept() -> None:
    found = routed(stream=True, stream_options={"x": 1})
    assert json.loads(found.body)["stream_options"] == {"x": 1, "include_usage": True}


def test_usage_in_every_chunk_is_only_for_who_asked_for_usage() -> None:
    """An engine gives none to who asks for it continuously and not at all; the gateway's asking changes nothing."""
    found = routed(stream=True, stream_options={"continuous_usage_stats": True})
    assert (found.strip_usage, json.loads(found.body)["stream_options"]) == (True, {"include_usage": True})
    both = {"continuous_usage_stats": True, "include_usage": True}
    found = routed(stream=True, stream_options=both)
    assert (found.strip_usage, json.loads(found.body)["stream_options"]) == (False, both)


@pytest.mark.parametrize("options", ["yes", [1], 5])
def test_wrong_stream_options_are_left_for_the_engine_to_refuse(options: Any) -> None:
    found = routed(stream=True, stream_options=options)
    assert not found.strip_usage
    assert json.loads(found.body)["stream_options"] == options


# What is booked


@pytest.mark.parametrize(
    ("fields", "is_chat", "tokens"),
    [
        ({"max_tokens": 5}, True, 5),
        ({"max_completion_tokens": 7}, True, 7),
        ({"max_completion_tokens": 7, "max_tokens": 5}, True, 7),
        ({"max_tokens": 5, "n": 3}, True, 15),
        ({"prompt": "x"}, False, 16),
        ({"prompt": "x", "max_tokens": "many"}, False, 16),
        ({"max_tokens": True, "prompt": "x"}, False, 16),
        ({"max_tokens": -3, "prompt": "x"}, False, 16),
        ({"prompt": ["x", "y", "z"], "max_tokens": 5}, False, 15),
        ({"prompt": ["x", "y"], "max_tokens": 5, "n": 3}, False, 30),
        ({"prompt": [[1, 2], [3]], "max_tokens": 5}, False, 10),
        ({"prompt": [1, 2, 3], "max_tokens": 5}, False, 5),
        ({"prompt": [], "max_tokens": 5}, False, 5),
        ({"max_tokens": 5, "n": "two"}, True, 5),
    ],
)
def test_the_most_an_answer_may_hold(fields: dict[str, Any], is_chat: bool, tokens: int) -> None:
    assert routed(is_chat=is_chat, **fields).scheduling.max_output_tokens == tokens


def test_a_chat_without_a_limit_may_fill_the_context() -> None:
    for found in (routed().scheduling, routed(max_tokens=10**9).scheduling):
        assert found.prompt_tokens + found.max_output_tokens == MAX_MODEL_LEN


def test_an_over_long_prompt_still_reserves_something() -> None:
    found = routed(prompt="x" * 100_000, is_chat=False).scheduling
    assert found.prompt_tokens > MAX_MODEL_LEN
    assert found.max_output_tokens == 1


def test_a_stream_is_booked_like_the_same_request_without() -> None:
    """The prompt is judged by the client's bytes, not by those that the gateway escaped."""
    content = "日本語" * 100
    raw = '{"model": "%s", "prompt": "%s"%s}'
    whole = routed((raw % (MODEL, content, "")).encode(), is_chat=False).scheduling
    stream = routed((raw % (MODEL, content, ', "stream": true')).encode(), is_chat=False).scheduling
    assert stream.prompt_tokens - whole.prompt_tokens in range(6)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        ({"min_p": 0.1}, True),
        ({"logit_bias": {"5": 1}}, True),
        ({"logprob_token_ids": [5]}, True),
        ({"min_p": 0, "logit_bias": {}}, False),
        ({"min_p": None}, False),
    ],
)
def test_options_that_speculation_refuses(fields: dict[str, Any], needed: bool) -> None:
    assert routed(**fields).scheduling.needs_plain_decoding is needed


@given(
    st.dictionaries(
        st.sampled_from(["max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "min_p"]),
        st.none()
        | st.booleans()
        | st.integers(-(2**63) + 1, 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=3)
        | st.just({})
        | st.just([]),
    )
)
def test_any_value_of_any_field_is_routed(fields: dict[str, Any]) -> None:
    try:
        found = routed(**fields)
    except RefusedError as refusal:
        assert "`n` = " in str(refusal)  # noqa: PT017 - most are routed
        return
    assert found.scheduling.prompt_tokens >= 0
    assert 1 <= found.scheduling.max_output_tokens <= MAX_MODEL_LEN * 128
    assert json.loads(found.body)["model"] == MODEL


# Slots

SLOTS = CONFIG.lanes[0].max_num_seqs


@pytest.mark.parametrize(
    ("fields", "is_chat", "num_sequences"),
    [
        ({}, True, 1),
        ({"n": 3}, True, 3),
        ({"prompt": ["x", "y"], "n": 2}, False, 4),
        ({"prompt": [1, 2, 3]}, False, 1),
        ({"prompt": ["x"] * SLOTS}, False, SLOTS),
        ({"n": "two"}, True, 1),
    ],
)
def test_a_request_takes_a_slot_for_each_choice_of_each_prompt(
    fields: dict[str, Any], is_chat: bool, num_sequences: int
) -> None:
    assert routed(is_chat=is_chat, **fields).scheduling.num_sequences == num_sequences


@pytest.mark.parametrize(
    ("fields", "is_chat", "said"),
    [
        ({"n": SLOTS + 1}, True, f"`n` = {SLOTS + 1} choices of each of 1 prompts"),
        ({"prompt": ["x"] * (SLOTS + 1)}, False, f"of each of {SLOTS + 1} prompts"),
        ({"prompt": ["x"] * SLOTS, "n": 2}, False, f"{2 * SLOTS} sequences"),
        ({"n": 2**63 - 1}, True, "`n` = "),
    ],
)
@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:batched"])
def test_more_sequences_than_a_replica_has_slots_are_refused(
    model: str, fields: dict[str, Any], is_chat: bool, said: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        routed(model=model, is_chat=is_chat, **fields)
    assert caught.value.reason is Reason.BAD_REQUEST
    assert said in str(caught.value)
    assert f"at most {SLOTS} at once (lanes[batched].max_num_seqs)" in str(caught.value)
