"""The check itself: it passes what was sent and fails on each way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.client.record import RequestLabel, RequestRecord
from serving.core.request import Outcome
from serving.engines.base import SentStream, SentWrite
from tests.golden.truth import Span, faults, was_starved

MS = 1_000_000


def write(at_ms: float, tokens: int = 2, took_ms: float = 0.1, choice: int = 0) -> SentWrite:
    at_ns = round(at_ms * MS)
    return SentWrite(tokens, at_ns, at_ns, at_ns + round(took_ms * MS), choice)


SENT = SentStream("a", 3, 0, [write(50), write(60), write(260)], write(261, tokens=0))
TRUE = RequestRecord(
    label=RequestLabel("a", "lane", "golden", "golden", 0),
    outcome=Outcome.COMPLETED,
    scheduled_at_s=0.0,
    finished_at_s=0.261,
    chunk_at_s=(0.050, 0.060, 0.260),
    chunk_tokens=(2, 2, 2),
    prompt_tokens=3,
    output_tokens=6,
    stamped_by="kernel",
)


def check(record: RequestRecord) -> list[str]:
    return faults([record], {"a": SENT})


def test_what_was_sent_passes_up_to_the_tolerance() -> None:
    assert check(TRUE) == []
    assert check(replace(TRUE, chunk_at_s=(0.0519, 0.0619, 0.2619), finished_at_s=0.2629)) == []
    # A gap of 200 ms has 2 percent, 4 ms.
    assert check(replace(TRUE, chunk_at_s=(0.0500, 0.0585, 0.2622), finished_at_s=0.2622)) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"chunk_at_s": (0.053, 0.062, 0.260)}, "TTFT"),
        ({"chunk_at_s": (0.047, 0.058, 0.260)}, "TTFT"),
        ({"chunk_at_s": (0.050, 0.063, 0.260)}, "gap 1"),
        ({"chunk_at_s": (0.050, 0.050, 0.260)}, "gap 1"),
        ({"chunk_at_s": (0.050, 0.060, 0.255)}, "gap 2"),
        ({"finished_at_s": 0.267}, "E2E"),
        ({"scheduled_at_s": -0.01}, ""),  # the truth moves along: latency counts from the schedule
        ({"output_tokens": 3}, "output tokens"),
        ({"prompt_tokens": 4}, "prompt tokens"),
        ({"chunk_tokens": (1, 3, 2)}, "tokens by chunk"),
        ({"chunk_tokens": None}, "tokens by chunk"),
        ({"chunk_at_s": (0.050, 0.260)}, "chunks"),
        ({"outcome": Outcome.FAILED}, "failed"),
    ],
)
def test_each_way_to_be_wrong_is_a_fault(changes: dict[str, object], fault: str) -> None:
    found = check(replace(TRUE, **changes))  # type: ignore[arg-type]
    assert any(fault in line for line in found) if fault else found == []


TWO_SENT = replace(
    SENT, chunks=[write(50), write(51, choice=1), write(90), write(150, choice=1)], done=write(151, tokens=0)
)
TWO = replace(
    TRUE,
    chunk_at_s=(0.050, 0.051, 0.090, 0.150),
    chunk_tokens=(2, 2, 2, 2),
    chunk_choice=(0, 1, 0, 1),
    output_tokens=8,
    finished_at_s=0.151,
)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"chunk_at_s": (0.050, 0.051, 0.093, 0.150)}, "gap 1: reported 43.00 ms, sent 39.90 to 40.10 ms"),
        ({"chunk_at_s": (0.050, 0.051, 0.090, 0.154)}, "gap 2: reported 103.00 ms"),
        ({"chunk_at_s": (0.050, 0.0525, 0.090, 0.150), "finished_at_s": 0.149}, "decoding"),
        ({"chunk_choice": (0, 0, 1, 1)}, "choice by chunk"),
        ({"chunk_choice": ()}, "choice by chunk"),
    ],
)
def test_each_choice_is_held_against_its_own_writes(changes: dict[str, object], fault: str) -> None:
    found = faults([replace(TWO, **changes)], {"a": TWO_SENT})  # type: ignore[arg-type]
    assert any(fault in line for line in found) if fault else found == []


def test_nothing_measured_and_nothing_known_of_it_are_faults() -> None:
    assert faults([], {}) == ["no records"]
    assert faults([TRUE], {}) == ["a: the server knows nothing of it"]
    assert faults([TRUE], {"a": replace(SENT, done=None)})


def test_the_truth_is_as_wide_as_the_write_took() -> None:
    slow = replace(SENT, chunks=[write(50), write(60, took_ms=8), write(260)])
    late = replace(TRUE, chunk_at_s=(0.050, 0.069, 0.260))
    assert faults([late], {"a": slow}) == []
    assert check(late) != []


def test_the_tolerance_is_2_ms_or_2_percent() -> None:
    assert Span(0.005, 0.006).tolerance_s == 0.002
    assert Span(0.3, 0.4).tolerance_s == pytest.approx(0.006)
    assert [Span(1, 2).error_s(at) for at in (0.5, 1, 1.5, 2, 2.5)] == [0.5, 0, 0, 0, 0.5]


def test_a_starved_client_is_known_by_its_own_record() -> None:
    assert not was_starved(TRUE)
    assert not was_starved(replace(TRUE, read_lag_s=0.002))
    assert was_starved(replace(TRUE, read_lag_s=0.0021))
    assert was_starved(replace(TRUE, chunk_at_s=(0.05, 0.05, 0.26)))
