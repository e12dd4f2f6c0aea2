from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadtest.analysis.run_summary import summarize
from loadtest.client.record import RequestRecord
from loadtest.report.__main__ import main
from loadtest.report.build import build, render
from loadtest.report.charts import CHARTS, DrawnChart, draw_all
from loadtest.run.directory import RunFile
from tests.unit.loadtest.runs import record, run_file, stage_run, whole_run, write_whole_run
from tests.unit.loadtest.summaries import TOO_LATE, stage, sweep
from tests.unit.loadtest.summaries import summary as hand_made

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
UNIT = re.compile(r"requests|tokens/s|\((s|ms|GiB|users|ratio)\b")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    write_whole_run(directory, *whole_run())
    build(directory)
    return directory


def parts(spec: Any) -> Iterator[dict[str, Any]]:
    """A Vega-Lite spec and every object in it."""
    if isinstance(spec, dict):
        yield spec
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from parts(value)


def channels(spec: Any) -> set[str]:
    """Every encoding channel used anywhere in a Vega-Lite spec."""
    return {channel for part in parts(spec) for channel in part.get("encoding", {})}


def axis_titles(spec: Any) -> set[str]:
    """Of its axes of numbers; those of panels that show different things have none."""
    axes = [part.get("encoding", {}).get(name, {}) for part in parts(spec) for name in ("x", "y")]
    return {axis["title"] for axis in axes if axis.get("type") == "quantitative" and axis.get("title")}


@cache
def all_drawn() -> dict[str, DrawnChart]:
    """Every chart that there is, of a bench and of a sweep."""
    return {drawn.name: drawn for run in (summarize(*whole_run()), sweep()) for drawn in draw_all(run)}


def test_a_run_gets_all_its_files(built: Path) -> None:
    assert {path.name for path in built.iterdir()} >= {"summary.json", "report.html", "figures"}
    for drawn in draw_all(summarize(*whole_run())):
        data = (built / "figures" / f"{drawn.name}.png").read_bytes()
        assert data.startswith(PNG_SIGNATURE)
        assert int.from_bytes(data[16:20]) > 600  # pixels wide


def test_the_page_asks_nothing_of_the_network(built: Path) -> None:
    page = (built / "report.html").read_text()
    assert "default-src 'none'" in page
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert len(markup) < len(page) / 10
    assert not re.search(r"(?:src|href|action|data)\s*=\s*[\"'](?!#)|@import|url\(", markup)


def test_the_page_says_what_was_measured(built: Path) -> None:
    page = (built / "report.html").read_text().partition("<script>")[0]
    for text in (
        "Abacus 9000",
        "vllm 0.32.0",
        "avx2",
        "pays at 1 user, costs at 8 users, cannot be told apart at 4 users (about even at 4.0 users)",
        "0 of 156 requests",
    ):
        assert text in page, text
    for drawn in draw_all(summarize(*whole_run())):
        assert f'data-figure="{drawn.name}"' in page


def test_the_page_says_with_which_options_the_engines_were_started() -> None:
    run, records = whole_run()
    replicas = [
        replica | ({"arguments": ["--seed=1", "--x={a: 1}"]} if replica["lane"] == "batched" else {})
        for replica in run.run.replicas
    ]
    page = render(summarize(replace(run, run=replace(run.run, replicas=replicas)), records), ())
    assert "Options of batched" in page
    assert "--seed=1 &#39;--x={a: 1}&#39;" in page
    assert "Options of speculative" not in page  # a run of before the lab said them


def test_the_page_says_what_servers_that_are_not_ours_lack() -> None:
    run, records = whole_run()
    lacks = {"batched": [], "speculative": ["cache_salt is not kept"]}
    replicas = [replica | {"lacks": lacks.get(replica["lane"], [])} for replica in run.run.replicas]
    page = render(summarize(replace(run, run=replace(run.run, replicas=replicas)), records), ())
    assert "speculative lacks" in page
    assert "cache_salt is not kept" in page
    assert "batched lacks" not in page


def test_the_page_says_whose_drafts_were_an_oracles() -> None:
    run, records = whole_run()
    drafts = {"method": "oracle", "acceptance": 0.6}
    lanes = [
        lane | ({"speculation": drafts} if lane["name"] == "speculative" else {})
        for lane in run.run.config["lanes"]
    ]
    config = run.run.config | {"lanes": lanes}
    page = render(summarize(replace(run, run=replace(run.run, config=config)), records), ())
    assert "by an oracle, acceptance 0.6 asked for: for studies only" in page
    assert page.count("by an oracle") == 1
    assert "by an oracle" not in render(summarize(*whole_run()), ())


def test_figures_are_in_the_page_as_they_are_drawn(built: Path) -> None:
    page = (built / "report.html").read_text()
    found = re.search(r"^const figures = (\{.*\});$", page, re.MULTILINE)
    assert found
    specs = json.loads(found[1])
    assert specs == {drawn.name: drawn.spec for drawn in draw_all(summarize(*whole_run()))}


def test_the_runs_of_these_tests_draw_every_chart() -> None:
    assert all_drawn().keys() == {chart.name for chart in CHARTS}


@pytest.mark.parametrize("name", [chart.name for chart in CHARTS])
def test_lines_differ_by_more_than_colour(name: str) -> None:
    spec = all_drawn()[name].spec
    marks = {part["mark"]["type"] for part in parts(spec) if "mark" in part}
    if "line" in marks:
        assert {"shape", "strokeDash", "color"} <= channels(spec)
    else:
        assert "nominal" in {part.get("type") for part in parts(spec)}, "each lane has a row of its own"


@pytest.mark.parametrize("name", [chart.name for chart in CHARTS])
def test_axes_of_numbers_carry_a_unit(name: str) -> None:
    titles = axis_titles(all_drawn()[name].spec)
    assert titles
    assert [title for title in titles if not UNIT.search(title)] == []


def test_axes_carry_units() -> None:
    drawn = {each.name: json.dumps(each.spec) for each in draw_all(summarize(*whole_run()))}
    for name, title in (
        ("throughput-ttft", "TTFT p50 (s, log scale)"),
        ("throughput-tpot", "TPOT p50 (ms, log scale)"),
        ("time-per-request", "E2E p50 (s)"),
        ("memory", "memory (GiB)"),
        ("throughput-ttft", "output tokens/s"),
    ):
        assert title in drawn[name]


def test_the_crossing_is_marked() -> None:
    spec = next(
        each.spec for each in draw_all(summarize(*whole_run())) if each.name == "speculation-speed-up"
    )
    assert "TPOT ≈ 4.0" in json.dumps(spec, ensure_ascii=False)


def envelope_rows(run: RunFile, records: list[RequestRecord]) -> list[dict[str, Any]] | None:
    drawn = {each.name: each.spec for each in draw_all(summarize(run, records))}
    return drawn["envelope"]["data"]["values"] if "envelope" in drawn else None


def test_the_envelope_is_the_best_lane_of_each_load_by_what_a_user_gets() -> None:
    run, records = whole_run()
    drawn = envelope_rows(run, records)
    assert drawn is not None
    stages = {
        (s.lane, s.workload, s.concurrency): s.output_tokens_per_s for s in summarize(run, records).stages
    }
    points = [row for row in drawn if row["kind"] == "point"]
    assert len(points) == len(stages) == 3 * 2 * 3
    for row in points:
        rate = stages[row["name"], row["panel"], row["concurrency"]]
        assert rate is not None
        assert row["value"] == pytest.approx(rate.value / row["concurrency"])
    for row in drawn:
        if row["kind"] == "envelope" and row["concurrency"] in (1, 4, 8):
            here = [
                p["value"]
                for p in points
                if p["panel"] == row["panel"] and p["concurrency"] == row["concurrency"]
            ]
            assert row["value"] == pytest.approx(max(here))


def test_a_lane_that_chooses_k_is_drawn_and_is_no_part_of_the_envelope() -> None:
    run, records = whole_run()
    config = deepcopy(run.run.config)
    (lane,) = [lane for lane in config["lanes"] if lane["name"] == "speculative"]
    lane["speculation"] = {"method": "adaptive", "num_speculative_tokens": 4}
    chosen = envelope_rows(replace(run, run=replace(run.run, config=config)), records)
    fixed = envelope_rows(run, records)
    assert chosen is not None
    assert fixed is not None
    assert {row["name"] for row in chosen if row["kind"] == "point"} == {
        "sequential",
        "batched",
        "speculative",
    }
    # Speculation gives most to a user who is alone.
    alone = [
        next(row["value"] for row in rows if row["kind"] == "envelope" and row["concurrency"] == 1)
        for rows in (chosen, fixed)
    ]
    assert alone[0] < alone[1]


def test_tokens_of_several_tokenizers_share_no_envelope() -> None:
    run, records = whole_run()
    config = deepcopy(run.run.config)
    for lane in config["lanes"]:
        lane["model"] = {"name": lane["name"], "path": f"/models/{lane['name']}"}
    assert envelope_rows(replace(run, run=replace(run.run, config=config)), records) is None


def test_a_figure_without_data_is_left_out() -> None:
    records = [record("batched")]
    summary = summarize(run_file([stage_run(records)]), records)
    names = {drawn.name for drawn in draw_all(summary)}
    assert "failures" in names
    assert not names & {"speculation-speed-up", "memory", "acceptance", "capacity", "attainment"}
    page = render(summary, draw_all(summary)).partition("<script>")[0]
    assert "speculation-speed-up" not in page


def test_an_invalid_run_says_so_first() -> None:
    invalid = stage("batched", invalid=(TOO_LATE,))
    made = hand_made([invalid, stage("sequential", tokens_per_s=20.0)])
    page = render(made, draw_all(made)).partition("<body>")[2]
    assert page.index("INVALID: 1 of 2 stages") < page.index("The highest throughput")
    row = page[page.index("INVALID batched") :]
    assert TOO_LATE in row[: row.index("</table>")], "the reason stands with the row it concerns"
    assert "What to do" in page
    assert "INVALID batched" in page  # its row in each table, told apart without colour


def test_a_sweep_opens_with_the_answer_and_shows_each_capacity() -> None:
    made = sweep()
    page = render(made, draw_all(made)).partition("<script>")[0]
    opening = page[page.index('class="findings"') :]
    assert opening.index("the lane speculative serves 1.90") < opening.index("<table")
    assert "1.30 [1.22–1.38]" in page
    assert "31,000 tokens/s" in page  # the client's ceiling


def test_failures_are_listed_and_their_text_is_not_markup() -> None:
    records = [record("batched"), record("batched", number=1, reason="upstream_broke")]
    summary = summarize(run_file([stage_run(records)]), records)
    page = render(summary, draw_all(summary)).partition("<script>")[0]
    assert "<td>upstream_broke</td>" in page
    assert "&lt;b&gt;upstream_broke&lt;/b&gt; in words" in page
    assert "1 request did not complete: 1 upstream_broke." in page
    assert "1 of 2 failed" in json.dumps(draw_all(summary)[-1].spec)


def test_text_of_an_answer_cannot_end_the_script() -> None:
    records = [record("batched")]
    run = run_file([stage_run(records)])
    run.run.config["lanes"][0]["note"] = "</script><script>alert(1)</script>"
    page = render(summarize(run, records), draw_all(summarize(run, records)))
    assert page.count("</script>") == 3  # the page's own


def test_a_run_that_did_nothing_still_has_a_report(tmp_path: Path) -> None:
    write_whole_run(tmp_path, run_file([]), [])
    summary = build(tmp_path)
    assert summary.stages == ()
    assert "no lane ran" in (tmp_path / "report.html").read_text()


def test_a_run_that_was_killed_in_a_line_has_a_report_that_says_so(tmp_path: Path) -> None:
    records = [record("batched", number=number) for number in range(3)]
    write_whole_run(tmp_path, run_file([stage_run(records)]), records)
    path = tmp_path / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    done = CliRunner().invoke(main, [str(tmp_path), "--json"])
    assert f"{path}:3: the last line is cut off" in done.stderr
    assert json.loads(done.stdout)["stages"][0]["requests"] == 2
    path.write_bytes(path.read_bytes() + b"\n")
    damaged = CliRunner().invoke(main, [str(tmp_path)])
    assert damaged.exit_code == 2
    assert f"Error: {path}:3: not a request record: " in damaged.stderr


@pytest.mark.parametrize("name", ["summary.json", "figures", "report.html"])
def test_a_report_that_cannot_be_written_names_the_file(name: str, tmp_path: Path) -> None:
    records = [record("batched")]
    write_whole_run(tmp_path, run_file([stage_run(records)]), records)
    if name == "figures":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    done = CliRunner().invoke(main, [str(tmp_path)])
    assert done.exit_code == 1
    assert f"Error: {tmp_path / name}: cannot be written: " in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"requests\.jsonl: is missing; is this the directory of a run\?"):
        build(tmp_path)
