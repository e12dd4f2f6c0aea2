"""A trace survives its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serving.tracing.events import Attempt, Phase, RequestSpan, StepEvent, TracedReplica, TraceHeader
from serving.tracing.trace_file import Trace, TraceFileError, read_trace, write_trace

HEADER = TraceHeader(
    "0.1", "sim", 10, 90, 7, (TracedReplica("b-1", "batched", "batched", "vllm", 2, 0),), ("g",), True
)
SPAN = RequestSpan(
    "g", "mine-1", "mine", 11, (Attempt("mine-1", 12, 13, 20, 40, "batched", "b-1"),), 21, 41, "completed"
)
STEP = StepEvent("b-1", 3, 14, 19, "cmpl-mine-1-0", Phase.DECODE, 5, 4, 2, 3, (1, 2, 3, 4), (1, 2, 9))
TRACE = Trace(
    HEADER, [SPAN, replace(SPAN, ended_ns=None, outcome=None)], [STEP, replace(STEP, drafted_ids=None)]
)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write_trace(TRACE, path)
    assert read_trace(path) == TRACE
    assert [entry.name for entry in tmp_path.iterdir()] == ["steps.jsonl"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"step"', '"stp"', 1),
        lambda text: text.replace('"decode"', '"encode"', 1),
        lambda text: text.split("\n", 1)[1],
        lambda text: text.split("\n", 1)[0] + "\n" + text,
        lambda text: "",
    ],
)
def test_a_spoiled_file_is_an_error_with_its_name(tmp_path: Path, spoil: object) -> None:
    path = tmp_path / "steps.jsonl"
    write_trace(TRACE, path)
    path.write_text(spoil(path.read_text()))  # type: ignore[operator]
    with pytest.raises(TraceFileError, match=r"steps\.jsonl"):
        read_trace(path)
