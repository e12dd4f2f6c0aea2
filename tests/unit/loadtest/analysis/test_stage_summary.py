from __future__ import annotations

from loadtest.analysis.stage_summary import make_repeat, summarize_stage
from loadtest.client.record import ClientReason
from tests.unit.loadtest.runs import record, stage_run


def test_a_lab_that_is_gone_is_no_result() -> None:
    gone = [record("batched", number=n, chunks=0, reason=ClientReason.CONNECT) for n in range(3)]
    summary = summarize_stage([make_repeat(stage_run(gone), gone)])
    assert any("could not be reached: 100% of requests" in reason for reason in summary.invalid)
