from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from loadtest.offer import recorded_trace, user_files
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
        ("[1]", r"item 1: 1 is not an object"),
        ("5", r"line 1: 5 is not an object"),
        ('{"Timestamp": true, "Request tokens": 1, "Response tokens": 2}', r"column Timestamp: True"),
        ('{"Timestamp": 1, "Request tokens": null, "Response tokens": 2}', r"column Request tokens: None"),
        ("[" * 100_000, r"item 1: not JSON"),
        ('{"a":' * 100_000, r"line 1: not JSON"),
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
    many = tmp_path / "many.csv"
    many.write_bytes(SAMPLE.read_bytes())
    monkeypatch.setattr(recorded_trace, "MAX_ROWS", 2)
    with pytest.raises(ValueError, match="more than 2 requests; name a window, such as from=1h,60s"):
        read_recorded_trace(many)
    monkeypatch.setattr(user_files, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match=r"bytes are more than 100; cut the file"):
        read_recorded_trace(SAMPLE)
    monkeypatch.undo()
    whole = gzip.compress(SAMPLE.read_bytes())
    for damaged in (whole[: len(whole) // 2], whole[:40] + bytes(40) + whole[80:]):
        (tmp_path / "t.csv.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.csv\.gz, after line \d+: damaged"):
            read_recorded_trace(tmp_path / "t.csv.gz")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_gzipped_files_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    text = f"{BURST}\n1,m,2,3,5,l\n"
    if name.endswith("l"):
        text = json.dumps({"Timestamp": 1, "Request tokens": 2, "Response tokens": 3}) + "\n"
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(("\ufeff" + text).encode()))
    assert read_recorded_trace(tmp_path / f"{name}.gz").rows == (TraceRow(0, 2, 3),)


def test_burstgpt_with_columns_of_sessions(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = write(tmp_path / "t.csv", header, "5,s1,,ChatGPT,3,4,7,l", "6,s1,1.5,ChatGPT,3,0,3,l")
    trace = read_recorded_trace(path)
    assert trace.rows == (TraceRow(0, 3, 4),)
    assert trace.notes == (f"{path}: 1 of 2 rows are left out: an empty prompt or answer",)


def test_images_of_azure_s_trace_are_said_not_to_be_sent(tmp_path: Path) -> None:
    header = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"
    path = write(tmp_path / "t.csv", header, "2024-10-15 00:00:00.1,2,1500,9", "2024-10-15 00:00:01.1,0,20,9")
    trace = read_recorded_trace(path)
    assert len(trace.rows) == 2
    assert trace.notes == (f"{path}: 1 of 2 requests had images (NumImages); they are sent as text alone",)


def test_who_has_mooncake_s_columns_names_the_unit(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at, "input_length": 30, "output_length": 5, "hash_ids": [1]} for at in (0, 3052, 4000)
    ]
    path = write(tmp_path / "t.jsonl", *map(json.dumps, rows))
    assert [row.at_s for row in read_recorded_trace(path, unit="ms").rows] == pytest.approx([0, 3.052, 4])
    assert [row.at_s for row in read_recorded_trace(path, unit="s").rows] == [0, 3052, 4000]
    assert read_recorded_trace(path, unit="ms").notes == (
        f"{path}: what prompts have in common (hash_ids) is the workload's, not the trace's",
    )
    with pytest.raises(ValueError, match=r"Mooncake or Bailian: .*name the unit, as in trace:PATH,unit=ms"):
        read_recorded_trace(path)
    with pytest.raises(ValueError, match=r"unit=ms: the columns of Azure have a unit of their own"):
        read_recorded_trace(SAMPLE, unit="ms")


def test_a_window_is_read_and_no_more(tmp_path: Path) -> None:
    rows = [f"{at},m,{at},1,9,l" for at in range(100, 200, 10)]
    path = write(tmp_path / "t.csv", BURST, *rows, "no row at all")
    window = read_recorded_trace(path, from_s=35, length_s=30)
    assert window.rows == (TraceRow(5, 140, 1), TraceRow(15, 150, 1), TraceRow(25, 160, 1))
    assert read_recorded_trace(path, length_s=20).rows == (TraceRow(0, 100, 1), TraceRow(10, 110, 1))
    with pytest.raises(ValueError, match="column Timestamp: 'no row at all'"):
        read_recorded_trace(path)
    with pytest.raises(ValueError, match="column Timestamp: 'no row at all'"):
        read_recorded_trace(path, from_s=60, length_s=60)


def test_a_window_of_a_trace_that_is_not_in_order_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", BURST, "5,m,1,1,2,l", "9,m,1,1,2,l", "4,m,1,1,2,l")
    with pytest.raises(
        ValueError, match=r"line 4: earlier than the line before it; a window .* sort it by time"
    ):
        read_recorded_trace(path, length_s=60)
    assert len(read_recorded_trace(path).rows) == 3


def test_a_window_without_requests_says_where_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", BURST, "5,m,1,1,2,l", "9,m,1,1,2,l")
    with pytest.raises(ValueError, match=r"no requests in it from 60 s on, for 5 s"):
        read_recorded_trace(path, from_s=60, length_s=5)


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("t.parquet", b"PAR1....", r"is Parquet, which is not read here; convert it: python -c .*t\.jsonl"),
        ("t.csv.zst", b"\x28\xb5\x2f\xfd", r"is Zstandard, .* zstd -d "),
        ("t.csv.xz", b"\xfd7zXZ\x00", r"is xz, .* xz -dk "),
        ("t.csv.bz2", b"BZh9", r"is bzip2, .* bzip2 -dk "),
        ("t.zip", b"PK\x03\x04", r"is a zip archive, .* unzip "),
        ("t.csv", b'{"a": 1}\n5\n', r"is JSON, but not named so: mv .*t\.csv .*t\.jsonl"),
        (
            "t.csv",
            b"request_id,request_type,arrival_timestamp,batch_size,prompt_size,token_size\n0,0,1,1,2,3\n",
            r"Splitwise; .* sed -e '1s/arrival_timestamp/Timestamp/' -e '1s/prompt_size/Request tokens/'",
        ),
        ("t.csv", b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,2\n", "the columns of Vidur; "),
        ("t.csv", b"when,what\n1,2\n", r"rename yours: sed -e '1s/YOURS/Timestamp/' .*t\.burstgpt\.csv"),
    ],
)
def test_a_layout_that_is_not_read_is_named_with_the_line_that_converts_it(
    name: str, data: bytes, fault: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=fault):
        read_recorded_trace(tmp_path / name)


def test_the_line_for_foreign_columns_works(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrived_at,num_prefill_tokens,num_decode_tokens", "0.5,1,2")
    with pytest.raises(ValueError, match="the columns of Vidur") as error:
        read_recorded_trace(path)
    subprocess.run(["sh", "-c", "sed " + str(error.value).partition("names: sed ")[2]], check=True)
    assert read_recorded_trace(tmp_path / "t.burstgpt.csv").rows == (TraceRow(0, 1, 2),)


def test_a_trace_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", BURST, "5,m,1,1,2,l")
    assert read_recorded_trace(path) is read_recorded_trace(path)
    write(path, BURST, "5,m,1,1,2,l", "6,m,1,1,2,l")
    assert len(read_recorded_trace(path).rows) == 2


def test_the_sample_is_a_minute_with_a_burst_in_it() -> None:
    trace = read_recorded_trace(SAMPLE)
    assert len(trace.rows) == 60
    assert 30 < trace.rows[-1].at_s < 120
    gaps_s = [later.at_s - earlier.at_s for earlier, later in zip(trace.rows, trace.rows[1:], strict=False)]
    assert sum(gaps_s[20:39]) < sum(gaps_s[:19])
