"""What the gateway does for adaptive placement: tells the kind of text and the steps, and shows why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serving.core.speculation.text_kind import PromptFeatures, TextKind, features_of
from serving.gateway import prompt_kind as module
from serving.gateway.prompt_kind import MAX_CHARS, prompt_kind
from serving.metrics.registry import exposition
from tests.unit.gateway.fake_engine import DONE, USAGE, answers, plays, text
from tests.unit.gateway.gateway_lab import MODEL, GatewayLab, gateway_lab
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio

MATERIAL = " ".join(f"word{number}" for number in range(40))
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"Copy this text word for word. {MATERIAL}"}],
    "max_tokens": 5,
}
STREAM = CHAT | {"stream": True}
ADAPTIVE = {"placement": "adaptive", "profile": "none is read"}


def sample(lab: GatewayLab, name: str) -> list[str]:
    page = exposition(lab.plane.service.metrics.registry).decode()
    return [line for line in page.splitlines() if line.startswith(name)]


async def test_the_answer_says_why_it_came_from_there_and_a_stream_says_what_its_drafts_gave() -> None:
    async with gateway_lab(scheduler=ADAPTIVE) as lab:
        lab.engine.script = plays(text("a") + text("b") + USAGE + DONE)
        caller = await lab.post(STREAM)
        header = caller.answer_headers["x-tandem-placement"]
        assert header.startswith("lane=batched score=")
        assert header.endswith("kind=copy why=only_choice")
        (span,), _ = lab.spans.since(0)
        assert span.attempts[-1].placement == header
        await until(lambda: lab.plane.counts == (0, 0))
        # Two chunks: a step after the first gave 4 of 5 tokens, so its draft of 3 was accepted.
        status = lab.plane.status["adaptive"]
        assert status["accepted_tokens"][0]["observed"] == 3
        assert status["choices"] == [{"lane": "batched", "kind": "copy", "why": "only_choice", "requests": 1}]
        assert status["last_choices"][0]["header"] == header
        assert sample(lab, "tandem_placement_choices_total") == [
            'tandem_placement_choices_total{kind="copy",lane="batched",why="only_choice"} 1.0'
        ]
        assert sample(lab, "tandem_observed_accepted_tokens_total") == [
            'tandem_observed_accepted_tokens_total{kind="copy",lane="batched"} 3.0'
        ]
        (in_bin,) = sample(lab, "tandem_reliability_accepted_tokens_total")
        # Guessed at 0.8 for each token: (0.8 + 0.64 + 0.512) / 3.
        assert in_bin == 'tandem_reliability_accepted_tokens_total{bin="0.6",lane="batched"} 3.0'


async def test_an_answer_that_is_not_streamed_says_nothing_of_drafts() -> None:
    async with gateway_lab(scheduler=ADAPTIVE) as lab:
        lab.engine.script = answers(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}')
        await lab.post(CHAT)
        await until(lambda: lab.plane.counts == (0, 0))
        assert lab.plane.status["adaptive"]["accepted_tokens"] == []


async def test_a_pin_has_no_choice_to_show() -> None:
    async with gateway_lab(scheduler=ADAPTIVE) as lab:
        lab.engine.script = plays(text("a") + USAGE + DONE)
        caller = await lab.post(STREAM | {"model": f"{MODEL}:batched"})
        assert "x-tandem-placement" not in caller.answer_headers


async def test_under_another_placement_nobody_looks_at_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: str) -> None:
        raise AssertionError("looked at")

    monkeypatch.setattr(module, "features_of", never)
    async with gateway_lab() as lab:
        lab.engine.script = plays(text("a") + USAGE + DONE)
        caller = await lab.post(STREAM)
        assert caller.status == 200
        assert "x-tandem-placement" not in caller.answer_headers
        assert lab.plane.status["adaptive"] is None
        assert sample(lab, "tandem_placement_choices_total") == []


# The kind of a body

FILLER = "word and word again "


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": f"Copy this. {MATERIAL}"}, TextKind.COPY),
        ({"messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]}, TextKind.COPY),
        ({"messages": [{"content": [{"type": "text", "text": f"Copy this. {MATERIAL}"}]}]}, TextKind.COPY),
        ({"messages": [{"content": [{"type": "image_url"}, 3, None]}]}, TextKind.OPEN),
        ({"messages": [{"content": MATERIAL * 400}, {"content": "Now fix it."}]}, TextKind.COPY),
        ({"prompt": f"{MATERIAL * 400} Now fix it."}, TextKind.COPY),
        ({"prompt": ["```\ncode\n```", "more"]}, TextKind.CODE),
        ({"prompt": [1, 2, 3]}, TextKind.OPEN),
        ({"prompt": "Tell me a story."}, TextKind.OPEN),
        ({"messages": "wrong"}, TextKind.OPEN),
        ({"messages": None}, TextKind.OPEN),
        ({}, TextKind.OPEN),
    ],
)
def test_the_kind_of_a_body(body: dict[str, Any], kind: TextKind) -> None:
    assert prompt_kind(body) is kind


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x " * 1_000_000},
        {"messages": [{"content": "x " * 10_000}] * 500},
        {"messages": [{"content": [{"text": "x"}] * 100_000}] * 100},
        {"messages": [{"content": ""}] * 100_000},
    ],
)
def test_a_bounded_part_of_any_body_is_looked_at(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    read = 0

    def noting(given: str) -> PromptFeatures:
        seen.append(len(given))
        return features_of("")

    monkeypatch.setattr(module, "features_of", noting)

    def counting(parts: Any) -> Iterator[str]:
        nonlocal read
        for one in texts(parts):
            read += 1
            yield one

    texts = module.texts_of
    monkeypatch.setattr(module, "texts_of", counting)
    prompt_kind(body)
    assert seen[0] <= MAX_CHARS + 1
    assert read <= MAX_CHARS
