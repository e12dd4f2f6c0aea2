from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.record import (
    RequestLabel,
    RequestRecord,
    fault_of,
    from_row,
    read_records,
    to_row,
    torn_line,
)
from serving.core.request import Outcome
from tests.unit.loadtest import runs

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
    chunk_choice=st.lists(st.integers(0, 9), max_size=5).map(tuple),
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


def test_a_row_names_the_choice_of_each_chunk_where_there_are_several() -> None:
    one = runs.record("batched")
    assert "chunk_choice" not in json.loads(to_row(one))
    choices = tuple(range(len(one.chunk_at_s)))
    several = from_row(to_row(replace(one, chunk_choice=choices)))
    assert several.chunk_choice == several.timeline.chunk_choice == choices


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


GOOD = to_row(
    RequestRecord(RequestLabel("r", "batched", "copy", "batched/copy/1 user", 0), Outcome.COMPLETED, 1.0, 2.0)
).encode()


@pytest.mark.parametrize(
    ("damaged", "fault"),
    [
        (GOOD[:40], "Invalid JSON: EOF while parsing"),
        (b"", "Invalid JSON: EOF while parsing"),
        (b"\x00\x01", "Invalid JSON: "),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
        (GOOD.replace(b'"completed"', b'"won"'), "outcome: Input should be 'completed'"),
        (
            GOOD.replace(b'"finished_at_s": 2.0', b'"finished_at_s": NaN'),
            "finished_at_s: Input should be a finite number, not nan",
        ),
        (
            GOOD.replace(b'"scheduled_at_s": 1.0', b'"scheduled_at_s": -1e9'),
            "scheduled_at_s: Input should be greater than or equal to 0, not -1000000000.0",
        ),
        (
            GOOD.replace(b'"finished_at_s": 2.0', b'"finished_at_s": 1e308'),
            "finished_at_s: Input should be less than or equal to 1000000000, not 1e+308",
        ),
        (
            GOOD.replace(b'"finished_at_s": 2.0', b'"finished_at_s": 0.5'),
            "finished_at_s is 0.5, before scheduled_at_s, 1",
        ),
        (
            b"{}",
            "label: Field required; outcome: Field required; scheduled_at_s: Field required; and 1 more",
        ),
    ],
)
def test_a_damaged_line_is_named_with_its_fault(damaged: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join((GOOD, damaged, GOOD, b"")))
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: not a request record: {fault}")) as raised:
        list(read_records(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"outcome": Outcome.CANCELLED, "finished_at_s": 0.5, "chunk_at_s": ()}, None),  # before it was due
        ({"finished_at_s": 0.5, "chunk_at_s": ()}, "finished_at_s is 0.5, before scheduled_at_s, 1"),
        ({"chunk_at_s": (0.9, 1.5)}, "the first of chunk_at_s is 0.9, before scheduled_at_s, 1"),
        (
            {"chunk_at_s": (1.5, 1.4)},
            "sent_at_s, chunk_at_s and finished_at_s are out of order: 1.4 follows 1.5",
        ),
        (
            {"sent_at_s": 1.6, "chunk_at_s": (1.5,)},
            "sent_at_s, chunk_at_s and finished_at_s are out of order: 1.5 follows 1.6",
        ),
        ({"chunk_tokens": (1,)}, "chunk_tokens has 1 entries, chunk_at_s 2"),
        ({"chunk_choice": (0, 1, 0)}, "chunk_choice has 3 entries, chunk_at_s 2"),
    ],
)
def test_what_cannot_be_of_a_record_is_found(changes: dict[str, Any], fault: str | None) -> None:
    label = RequestLabel("r", "batched", "copy", "batched/copy/1 user", 0)
    good = RequestRecord(label, Outcome.COMPLETED, 1.0, 2.0, chunk_at_s=(1.25, 1.5), chunk_tokens=(3, 4))
    assert fault_of(replace(good, **({"chunk_tokens": None} | changes))) == fault


def test_a_last_line_without_an_end_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(GOOD + b"\n")
    assert torn_line(path) is None
    path.write_bytes(GOOD + b"\n" + GOOD[:40])
    assert len(list(read_records(path))) == 1
    told = torn_line(path)
    assert told is not None
    assert told.startswith(f"{path}:2: the last line is cut off, 40 bytes are left out")
    path.write_bytes(b"")
    assert torn_line(path) is None


def test_records_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: cannot be read: Is a directory")):
        list(read_records(tmp_path))


def test_a_torn_last_line_costs_that_record_only(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    row = to_row(runs.record("batched"))
    path.write_text(f"{row}\n{row[:-30]}")
    assert len(list(read_records(path))) == 1
