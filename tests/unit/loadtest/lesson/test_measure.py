from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from loadtest.client.traced_lab import find_lab
from loadtest.lesson import measure
from loadtest.lesson.measure import LeftOutError, by_size, operating_point, timeline_steps
from loadtest.lesson.text import TokenText
from serving.core.lane import Strategy
from serving.tracing.events import Phase, StepEvent
from tests.unit.loadtest.lesson.scripted_lab import PROMPT_IDS, ScriptedLab, scripted_lab

MS = 1_000_000
# Byte-level pieces: Ġ stands for a space, and the last two are halves of one é.
PIECES = ("The", "Ġtall", "Ġwave", ".", "Ã", "©")


@pytest.fixture
def lab() -> Iterator[ScriptedLab]:
    with scripted_lab(ScriptedLab()) as served:
        yield served


@pytest.fixture
def text(tmp_path: Path) -> TokenText:
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="The"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TokenText(tmp_path / "tokenizer.json")


def event(
    step: int,
    *,
    lasted_ms: int = 50,
    phase: Phase = Phase.DECODE,
    scheduled: int = 1,
    request: str = "a",
    drafted: Sequence[int] = (),
    accepted: int = 0,
    emitted: Sequence[int] = (0,),
) -> StepEvent:
    started_ns = 1000 * MS * step
    return StepEvent(
        "one", step, started_ns, started_ns + lasted_ms * MS, request, phase, scheduled, len(drafted),
        accepted, len(emitted), tuple(drafted) or None, tuple(emitted),
    )  # fmt: skip


def test_a_step_counts_once_however_many_requests_share_it() -> None:
    steps = [event(step, request=name, lasted_ms=40 + step) for step in (1, 2, 9) for name in "abcd"]
    (size,) = by_size(steps)
    assert (size.phase, size.tokens, size.num_steps) == (Phase.DECODE, 4, 3)
    assert size.step_s == pytest.approx(0.042)
    assert size.tokens_per_s == pytest.approx(4 / 0.042)


def test_mixed_steps_and_rare_sizes_are_left_out() -> None:
    prompts = [event(step, phase=Phase.PREFILL, scheduled=64) for step in (1, 2, 3)]
    mixed = [
        event(step, phase=phase, request=phase)
        for step in (4, 5, 6)
        for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    rare = [event(step, scheduled=7) for step in (7, 8)]
    assert [(size.phase, size.tokens) for size in by_size(prompts + mixed + rare)] == [(Phase.PREFILL, 64)]


def test_rejected_drafts_are_positions_and_no_tokens() -> None:
    checking = event(1, lasted_ms=100, scheduled=5, drafted=(1, 2, 3, 4), accepted=1, emitted=(1, 9))
    other = event(1, lasted_ms=100, scheduled=5, request="b", drafted=(1, 2, 3, 4), emitted=(9,))
    prompt = event(2, phase=Phase.PREFILL, scheduled=500, lasted_ms=900)
    point = operating_point("speculative", [checking, other, prompt])
    assert point is not None
    assert (point.tokens, point.emitted) == (10, 3)
    assert point.tokens_per_s == pytest.approx(30)


def test_a_lane_that_always_read_prompts_has_no_point() -> None:
    assert operating_point("batched", [event(1), event(1, phase=Phase.PREFILL, request="b")]) is None


def test_the_texts_of_a_step_stand_where_they_were_in_the_answer(text: TokenText) -> None:
    steps = [
        event(1, phase=Phase.PREFILL, scheduled=9, emitted=(0,)),
        event(2, drafted=(1, 1, 2), accepted=1, emitted=(1, 3)),
        event(3, drafted=(1, 2), accepted=0, emitted=(4,)),
        event(4, emitted=(5,)),
    ]
    found = list(timeline_steps(steps, text))
    assert [step.kept_text for step in found] == ["", " tall", "", ""]
    assert [step.own_text for step in found][:2] == ["The", "."]
    assert [step.dropped_text for step in found] == ["", " tall wave", " tall wave", ""]
    assert found[3].started_s == pytest.approx(3.0)


def test_half_a_character_makes_no_other_text_longer(text: TokenText) -> None:
    steps = [event(1, emitted=(0,)), event(2, emitted=(4,)), event(3, emitted=(5,)), event(4, emitted=(3,))]
    assert [step.own_text for step in timeline_steps(steps, text)] == [
        "The",
        "\N{REPLACEMENT CHARACTER}",
        "",
        ".",
    ]


def test_a_last_step_that_is_cut_keeps_no_more_than_it_gave(text: TokenText) -> None:
    (step,) = timeline_steps([event(1, drafted=(1, 2, 3), accepted=3, emitted=(1, 2))], text)
    assert (step.kept, step.kept_text, step.own_text, step.dropped_text) == (2, " tall wave", "", "")


def test_drafts_that_stay_in_the_worker_leave_the_text_unknown(text: TokenText) -> None:
    hidden = StepEvent("one", 1, 0, 5, "a", Phase.DECODE, 3, 2, 1, 2, None, (1, 2))
    timeline = measure.Timeline("speculative", tuple(timeline_steps([hidden], text)))
    assert timeline.text is None


def test_the_very_tokens_that_were_generated_are_scored(lab: ScriptedLab) -> None:
    found = measure.scoring(find_lab(lab.url))
    generation, *passes = lab.asked
    assert generation["prompt"] == measure.OPENING
    tokens = PROMPT_IDS + list(range(100, 100 + measure.SERIAL_TOKENS + 1))
    assert [body["prompt"] for body in passes] == [tokens] * measure.NUM_PASSES
    assert {body["max_tokens"] for body in passes} == {1}
    assert found.scored_tokens == len(tokens)
    assert len(found.generated_at_s) == measure.SERIAL_TOKENS
    assert list(found.generated_at_s) == sorted(found.generated_at_s)
    assert found.median_difference == found.largest_difference == pytest.approx(0.25)
    assert found.serial_tokens_per_s == pytest.approx(measure.SERIAL_TOKENS / found.generated_at_s[-1])


def test_differences_are_those_of_the_same_token() -> None:
    choice = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
    prompt = [
        None,
        {"9": {"logprob": -9.0}},
        {"5": {"logprob": -1.5}, "1": {"logprob": 0.0}},
        {"6": {"logprob": -2.0}},
    ]
    assert measure.differences(choice, prompt) == [0.5, 0.0]


def test_batches_stay_within_what_the_lane_decodes_at_once(lab: ScriptedLab) -> None:
    served = find_lab(lab.url)
    served.description["config"]["lanes"][1]["max_num_seqs"] = 4
    said: list[str] = []
    measure.step_sizes(served, said.append)
    assert [text for text in said if "at once" in text] == [
        f"the memory wall: {batch} requests at once" for batch in (1, 2, 4)
    ]


def test_both_lanes_get_the_same_twelve_requests(lab: ScriptedLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "QUEUE_GAP_S", 0.0)
    served = find_lab(lab.url)
    asked = []
    for strategy in (Strategy.SEQUENTIAL, Strategy.BATCHED):
        lab.asked.clear()
        queue = measure.queue(served, strategy)
        assert [wait.number for wait in queue.waits] == list(range(1, 13))
        for wait in queue.waits:
            assert wait.sent_s < wait.started_s < wait.first_token_s < wait.ended_s
        asked.append(sorted((body["max_tokens"], str(body["messages"])) for body in lab.asked))
    assert asked[0] == asked[1]
    assert len({text for _, text in asked[0]}) == 12


def test_a_timeline_is_of_one_request(lab: ScriptedLab) -> None:
    timeline = measure.timeline(find_lab(lab.url), Strategy.SPECULATIVE, None)
    assert sum(step.emitted for step in timeline.steps) == measure.DRAFT_TOKENS
    # 47 tokens behind the first, 3 a step: two drafts that were right, and the model's own.
    assert len(timeline.decode_steps) == 16
    assert timeline.text is None


def test_a_lab_without_the_lane_leaves_the_picture_out(lab: ScriptedLab) -> None:
    lab.strategies = ("batched",)
    with pytest.raises(LeftOutError, match="needs a sequential lane"):
        measure.queue(find_lab(lab.url), Strategy.SEQUENTIAL)
