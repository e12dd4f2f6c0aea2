from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import RequestLabel, RequestRecord, from_row, read_records, to_row
from serving.core.request import Outcome

INSTANTS = st.floats(min_value=0, max_value=1e6)
RECORDS = st.builds(
    RequestRecord,
    label=st.builds(
        RequestLabel, st.text(), st.text(), st.text(), st.text(), st.integers(0, 9999), st.booleans()
    ),
    outcome=st.sampled_from(Outcome),
    scheduled_at_s=INSTANTS,
    finished_at_s=INSTANTS,
    dispatched_at_s=st.none() | INSTANTS,
    sent_at_s=st.none() | INSTANTS,
    first_byte_at_s=st.none() | INSTANTS,
    chunk_at_s=st.lists(INSTANTS, max_size=5).map(tuple),
    chunk_tokens=st.none() | st.lists(st.integers(0, 99), max_size=5).map(tuple),
    status=st.none() | st.integers(100, 599),
    reason=st.none() | st.text(),
    error=st.none() | st.text(),
    output_tokens=st.none() | st.integers(0, 9999),
    asked_output_tokens=st.none() | st.integers(0, 9999),
    num_reconnects=st.integers(0, 2),
    retry_after_s=st.none() | INSTANTS,
    stamped_by=st.sampled_from(["kernel", "process"]),
    read_lag_s=st.none() | INSTANTS,
    text=st.text(),
)


@given(RECORDS)
def test_a_row_is_one_line_and_gives_the_record_back(record: RequestRecord) -> None:
    row = to_row(record)
    assert "\n" not in row
    assert from_row(row) == record


def test_a_row_names_first_and_last_token() -> None:
    record = RequestRecord(
        RequestLabel("r", "batched", "copy", "batched/copy/1 user", 0),
        Outcome.COMPLETED,
        1.0,
        2.0,
        chunk_at_s=(1.25, 1.5, 1.75),
    )
    row = json.loads(to_row(record))
    assert (row["first_token_at_s"], row["last_token_at_s"]) == (1.25, 1.75)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    good = to_row(
        RequestRecord(
            RequestLabel("r", "batched", "copy", "batched/copy/1 user", 0), Outcome.COMPLETED, 1.0, 2.0
        )
    )
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{good}\n{good[:40]}\n")
    with pytest.raises(ValueError, match=r"requests\.jsonl:2: not a request record"):
        list(read_records(path))
