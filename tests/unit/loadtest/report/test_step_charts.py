"""Pictures of a run's steps, from traces made by hand: what they must show is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.offer.load import ClosedLoop
from loadtest.report.build import build
from loadtest.report.step_charts import NOT_TRACED, StepPictures, answers, draw_steps
from loadtest.run.directory import RunFile, StageTrace
from loadtest.run.plan import StagePlan
from serving.core.request import Outcome
from serving.roofline import Roofline
from serving.tracing.events import Attempt, Phase, RequestSpan, StepEvent, TracedReplica, TraceHeader
from serving.tracing.trace_file import Trace, write_trace
from tests.unit.loadtest.lesson.browser import CHROMIUM, browser
from tests.unit.loadtest.runs import record, run_file, stage_run, write_whole_run

MS = 1_000_000
RUN = "20260102-030405-test"
STEP_MS = {"sequential": 40, "batched": 50, "speculative": 80}


def request_id(number: int, lane: str = "batched") -> str:
    return f"{RUN}-{lane}-copy-8-users-{number}-{number:012x}"


def span(number: int, lane: str, arrived_ms: int, tokens: int, **changes: Any) -> RequestSpan:
    found = RequestSpan(
        "g",
        request_id(number, lane),
        request_id(number, lane).rpartition("-")[0],
        arrived_ms * MS,
        (Attempt(request_id(number, lane), arrived_ms * MS, lane=lane),),
        outcome=Outcome.COMPLETED,
        output_tokens=tokens,
    )
    return replace(found, **changes)


def event(number: int, lane: str, step: int, **changes: Any) -> StepEvent:
    lasted_ms = STEP_MS[lane]
    found = StepEvent(
        f"{lane}-1", step, step * lasted_ms * MS, (step + 1) * lasted_ms * MS,
        f"chatcmpl-{request_id(number, lane)}-0a1b2c3d", Phase.DECODE, 1, 0, 0, 1,
    )  # fmt: skip
    return replace(found, **changes)


def trace(lane: str, spans: Sequence[RequestSpan], steps: Sequence[StepEvent]) -> Trace:
    replica = TracedReplica(f"{lane}-1", lane, lane, "vllm", len(steps), 0)
    return Trace(TraceHeader("1", "m", 0, 10**12, 0, (replica,), ("g",), True), list(spans), list(steps))


def served(lane: str, requests: int, tokens: int, drafts: int = 0) -> Trace:
    """All at once; on the sequential lane one after the other. All drafts but one are right."""
    spans = [span(number, lane, 5 * number, tokens) for number in range(requests)]
    steps = []
    accepted = max(0, drafts - 1)
    decoding = (tokens - 1) // (1 + accepted)
    for number in range(requests):
        first = 1 + (number * (1 + decoding) if lane == "sequential" else 0)
        steps.append(event(number, lane, first, phase=Phase.PREFILL, scheduled_tokens=64))
        for step in range(first + 1, first + 1 + decoding):
            steps.append(
                event(
                    number,
                    lane,
                    step,
                    scheduled_tokens=1 + drafts,
                    drafted_tokens=drafts,
                    accepted_tokens=accepted,
                    emitted_tokens=1 + accepted,
                )
            )
    steps.sort(key=lambda one: one.step)
    return trace(lane, spans, [replace(one, replica_id=f"{lane}-of-{requests}") for one in steps])


def traced_run(directory: Path, traces: dict[tuple[str, int], Trace]) -> RunFile:
    """Stages by lane and users, in this order."""
    (directory / "traces").mkdir()
    stages, records = [], []
    for (lane, users), recorded in traces.items():
        own = [record(lane, users)]
        plan = StagePlan(lane, "copy", ClosedLoop(users), users)
        file = f"{lane}-{users}.jsonl"
        write_trace(recorded, directory / "traces" / file)
        stages.append(replace(stage_run(own, plan=plan), trace=StageTrace(file)))
        records += own
    run = run_file(stages)
    write_whole_run(directory, run, records)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return traced_run(
        tmp_path,
        {
            ("batched", 1): served("batched", 2, 16),
            ("speculative", 1): served("speculative", 2, 16, drafts=3),
            ("sequential", 8): served("sequential", 8, 16),
            ("batched", 8): served("batched", 16, 16),
            ("speculative", 8): served("speculative", 16, 16, drafts=3),
        },
    )


def figures(found: StepPictures) -> dict[str, Any]:
    return {figure.name: figure for figure in found.charts}


def rows(figure: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = figure.spec["data"]["values"]
    return found


def test_a_run_without_traces_says_how_to_get_the_pictures(tmp_path: Path) -> None:
    own = [record("batched")]
    run = run_file([stage_run(own)])
    assert draw_steps(run, tmp_path) == StepPictures(notes=(NOT_TRACED,))
    write_whole_run(tmp_path, run, own)
    build(tmp_path)
    assert (tmp_path / "report.html").read_text().count("`tandem bench --trace`") == 1


def test_lanes_wait_side_by_side_under_the_greatest_load(run: RunFile, tmp_path: Path) -> None:
    figure = figures(draw_steps(run, tmp_path))["waits"]
    drawn = rows(figure)
    assert len({row["panel"] for row in drawn}) == 3
    assert {row["request"] for row in drawn} == set(range(1, 9)), "as many as every lane has"
    assert figure.reading.startswith("The first 8 requests of each lane under 8 users of copy")
    # The eighth begins with step 113 of 40 ms, and arrived after 35 ms.
    assert "On sequential the longest wait was 4.5 s" in figure.reading
    assert "a request took 640 ms once begun" in figure.reading
    last = [row for row in drawn if row["request"] == 8 and row["panel"].startswith("sequential")]
    assert [row["phase"] for row in last] == ["waiting", "prefill", "decode"]
    assert last[0]["from_s"] == pytest.approx(0.035)
    assert last[-1]["to_s"] == pytest.approx(0.04 * 129)


def test_the_wall_is_that_of_the_batched_lane_s_steps(run: RunFile, tmp_path: Path) -> None:
    roofline = Roofline(135_000_000, "float32", 90e9, 18e9)
    run = replace(run, run=replace(run.run, roofline=roofline))
    figure = figures(draw_steps(run, tmp_path))["memory-wall"]
    sizes = {row["tokens"] for row in rows(figure) if row["kind"] == "decode step"}
    assert sizes == {2, 16}, "of both loads"
    lanes = {row["kind"]: row["tokens"] for row in rows(figure) if row["is_lane"]}
    assert lanes == {"lane sequential": 1, "lane batched": 16, "lane speculative": 64}
    assert any(row["kind"] == "roof" for row in rows(figure))
    assert "30.0 ms to read 540 MB" in figure.reading
    assert "under 8 users of copy" in figure.reading


def test_an_unknown_roof_is_explained(run: RunFile, tmp_path: Path) -> None:
    run = replace(run, run=replace(run.run, roofline="No roof is drawn, for a reason."))
    figure = figures(draw_steps(run, tmp_path))["memory-wall"]
    assert "No roof is drawn, for a reason." in figure.reading
    assert not any(row["kind"] == "roof" for row in rows(figure))


def test_the_same_prompt_on_both_lanes(run: RunFile, tmp_path: Path) -> None:
    found = draw_steps(run, tmp_path)
    figure = figures(found)["drafts"]
    assert figure.reading.startswith("One answer under 1 user of copy")
    assert "batched needed 15 steps and speculative 5, each of 3.00 tokens" in figure.reading
    assert {row["panel"].partition(":")[0] for row in rows(figure)} == {"batched", "speculative"}
    assert found.timelines == (), "no tokens were recorded, so there is no text"


def test_of_a_long_answer_the_beginning_is_drawn(tmp_path: Path) -> None:
    run = traced_run(
        tmp_path,
        {
            ("batched", 1): served("batched", 1, 301),
            ("speculative", 1): served("speculative", 1, 301, drafts=3),
        },
    )
    figure = figures(draw_steps(run, tmp_path))["drafts"]
    assert figure.reading.startswith("The first 48 tokens of one answer")
    assert "batched needed 47 steps and speculative 16" in figure.reading


def test_pictures_that_nothing_feeds_are_named(tmp_path: Path) -> None:
    run = traced_run(tmp_path, {("sequential", 1): served("sequential", 2, 8)})
    found = draw_steps(run, tmp_path)
    assert list(figures(found)) == ["waits"]
    assert [note.partition(" is left out")[0] for note in found.notes[:2]] == [
        "The memory wall",
        "Draft and verify",
    ]
    assert "`tandem lesson`" in found.notes[-1]


def test_a_stage_that_could_not_be_recorded_is_none_of_them(run: RunFile, tmp_path: Path) -> None:
    unrecorded = tuple(replace(stage, trace=StageTrace(None, ("no",))) for stage in run.stages)
    found = draw_steps(replace(run, stages=unrecorded), tmp_path)
    assert found.charts == ()
    assert len(found.notes) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"client_request_id": "somebody-else-0"},
        {"output_tokens": 17},
        {"output_tokens": None},
        {"attempts": (Attempt("x", 0, lane="batched"), Attempt("x-again", 1, lane="batched"))},
        {"attempts": (Attempt("x", 0, lane="speculative"),)},
    ],
)
def test_only_whole_requests_of_the_run_are_shown(changes: dict[str, Any]) -> None:
    whole = served("batched", 2, 16)
    assert [one.number for one in answers(whole, "batched", RUN)] == [0, 1]
    spans = [replace(whole.spans[0], **changes), whole.spans[1]]
    assert [one.number for one in answers(Trace(whole.header, spans, whole.steps), "batched", RUN)] == [1]


def test_a_step_that_was_scheduled_ahead_is_none_of_the_answer() -> None:
    whole = served("batched", 1, 16)
    ahead = event(0, "batched", 99, emitted_tokens=0)
    (found,) = answers(Trace(whole.header, whole.spans, [*whole.steps, ahead]), "batched", RUN)
    assert found.steps == tuple(whole.steps)


def test_a_request_whose_beginning_is_not_recorded_is_left_out() -> None:
    whole = served("batched", 1, 16)
    assert answers(Trace(whole.header, whole.spans, whole.steps[1:]), "batched", RUN) == []


def test_a_missing_trace_is_named(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "traces" / "batched-8.jsonl").unlink()
    with pytest.raises(ValueError, match=r"batched-8\.jsonl: cannot be read: No such file"):
        draw_steps(run, tmp_path)
    (tmp_path / "traces" / "batched-8.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"batched-8\.jsonl, line 1: not a row"):
        draw_steps(run, tmp_path)


def test_the_report_holds_the_pictures_and_their_files(run: RunFile, tmp_path: Path) -> None:
    build(tmp_path)
    page = (tmp_path / "report.html").read_text()
    for name in ("waits", "memory-wall", "drafts"):
        assert f'data-figure="{name}"' in page
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 1000
    assert "Positions in a step" in page
    assert NOT_TRACED not in page


@pytest.mark.parametrize("width_px", [1280, 400])
def test_the_report_fits_and_complains_of_nothing(run: RunFile, tmp_path: Path, width_px: int) -> None:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    build(tmp_path)
    with browser() as tab:
        shown = tab.show(tmp_path / "report.html", width_px, "light")
    assert shown.drawn > 3
    assert shown.overflow_px <= 0
    assert shown.complaints == []
    assert shown.requests == [(tmp_path / "report.html").as_uri()]
