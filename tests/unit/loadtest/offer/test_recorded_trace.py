from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.offer import user_files
from loadtest.offer.recorded_trace import TraceRow, read_recorded_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
SAMPLE = Path(user_files.__file__).parent / "texts" / "sample_trace.csv"


def write(path: Path, *lines: str, end: str = "\n", start: str = "") -> Path:
    path.write_bytes((start + end.join(lines) + end).encode())
    return path


def test_azure_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", AZURE, "2023-11-16 09:30:46.6805900,120,40", "2023-11-16 09:30:50.9951690,80,90"
    )
    first, second = read_recorded_trace(path).rows
    assert first == TraceRow(0, 120, 40)
    assert second.at_s == pytest.approx(4.314579, abs=2e-6)
    assert (second.prompt_tokens, second.output_tokens) == (80, 90)


def test_azure_dates_with_a_time_zone(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", AZURE, "2024-05-10 00:00:00.5+00:00,1,2", "2024-05-10 02:00:01.5+02:00,3,4"
    )
    assert [row.at_s for row in read_recorded_trace(path).rows] == pytest.approx([0, 1])


def test_burstgpt_columns_and_its_failed_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        BURST,
        "5,ChatGPT,300,20,320,Conversation log",
        "45,ChatGPT,900,0,900,Conversation log",
        "118.5,GPT-4,400,250,650,API log",
    )
    trace = read_recorded_trace(path)
    assert trace.rows == (TraceRow(0, 300, 20), TraceRow(113.5, 400, 250))
    assert trace.num_left_out == 1


def test_jsonl_in_either_layout(tmp_path: Path) -> None:
    azure = {"TIMESTAMP": "2023-11-16T18:15:46Z", "ContextTokens": 3, "GeneratedTokens": 4}
    burst = {"Timestamp": 7, "Request tokens": 3, "Response tokens": 4, "Session ID": "x"}
    for row in (azure, burst):
        path = write(tmp_path / "t.jsonl", json.dumps(row))
        assert read_recorded_trace(path).rows == (TraceRow(0, 3, 4),)


def test_mark_line_ends_blank_lines_and_order_do_not_matter(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "Timestamp,Request tokens,Response tokens",
        "9,3,4",
        "",
        "2,1,2",
        "  ",
        "",
        end="\r\n",
        start="\ufeff",
    )
    assert read_recorded_trace(path).rows == (TraceRow(0, 1, 2), TraceRow(7, 3, 4))
    row = '{"Timestamp": 2, "Request tokens": 1, "Response tokens": 2}'
    path = write(tmp_path / "t.jsonl", row, "", end="\r\n", start="\ufeff")
    assert read_recorded_trace(path).rows == (TraceRow(0, 1, 2),)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ((AZURE, "yesterday,1,2"), r"line 2, column TIMESTAMP: 'yesterday' is not a date"),
        (
            (AZURE, "2023-11-16 18:15:46,1,2", "2023-11-16 18:15:47,-1,2"),
            r"line 3, column ContextTokens: '-1'",
        ),
        ((AZURE, "2023-11-16 18:15:46,1,2.5"), r"column GeneratedTokens: '2.5' is not a whole number"),
        ((AZURE, "2023-11-16 18:15:46,1"), r"column GeneratedTokens: None"),
        ((BURST, "inf,m,1,2,3,l"), r"line 2, column Timestamp: 'inf' is not a number of seconds"),
        ((BURST, "1,m,many,2,3,l"), r"column Request tokens: 'many'"),
        ((BURST, "1,m,99999999999,2,3,l"), r"column Request tokens: '99999999999' .* in 0\.\.10000000"),
        (("when,what", "1,2"), r"columns when, what are neither TIMESTAMP, ContextTokens"),
        ((BURST,), r"no requests in it \(0 rows"),
        ((BURST, "1,m,5,0,5,l"), r"no requests in it \(1 rows"),
        ((BURST, '1,m,5,"0,5,l'), r"not CSV"),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(tmp_path: Path, lines: tuple[str, ...], fault: str) -> None:
    path = write(tmp_path / "bad.csv", *lines)
    with pytest.raises(ValueError, match=fault) as error:
        read_recorded_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", r"line 1: not JSON"),
        ("[1]", r"line 1: \[1\] is not an object"),
        ('{"Timestamp": true, "Request tokens": 1, "Response tokens": 2}', r"column Timestamp: True"),
        ('{"Timestamp": 1, "Request tokens": null, "Response tokens": 2}', r"column Request tokens: None"),
        ("[" * 100_000, r"line 1: not JSON"),
    ],
)
def test_a_bad_row_of_jsonl_is_refused_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_recorded_trace(write(tmp_path / "bad.jsonl", text))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"none\.csv: cannot be read: No such file"):
        read_recorded_trace(tmp_path / "none.csv")
    path = tmp_path / "t.csv"
    path.write_bytes(b"Timestamp,Request tokens,Response tokens\n1,2,3\n\xff\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_recorded_trace(path)
    monkeypatch.setattr(user_files, "MAX_ROWS", 2)
    with pytest.raises(ValueError, match="more than 2 rows"):
        read_recorded_trace(SAMPLE)
    monkeypatch.setattr(user_files, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match=r"bytes are more than 100; cut the file"):
        read_recorded_trace(SAMPLE)


def test_the_sample_is_a_minute_with_a_burst_in_it() -> None:
    trace = read_recorded_trace(SAMPLE)
    assert len(trace.rows) == 60
    assert 30 < trace.rows[-1].at_s < 120
    gaps_s = [later.at_s - earlier.at_s for earlier, later in zip(trace.rows, trace.rows[1:], strict=False)]
    assert sum(gaps_s[20:39]) < sum(gaps_s[:19])
