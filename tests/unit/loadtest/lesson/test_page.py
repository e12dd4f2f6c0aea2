from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.drawing.style import lane_looks
from loadtest.lesson.envelope import Envelope
from loadtest.lesson.page import five_pictures, render
from loadtest.lesson.pictures import looks_of_curves
from loadtest.lesson.teach import LeftOut, Lesson
from serving.core.lane import Strategy
from tests.unit.loadtest.lesson.browser import Browser
from tests.unit.loadtest.lesson.lessons import fixed, placed, simulated, whole


def adaptive() -> Lesson:
    return replace(whole(), envelope=placed())


def words(lesson: Lesson) -> dict[str, str]:
    return {picture.name: " ".join(picture.sentences) for picture in five_pictures(lesson)}


def markup(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = spec["data"]["values"]
    return values


def specs(lesson: Lesson) -> dict[str, Any]:
    return {picture.name: picture.spec for picture in five_pictures(lesson)}


def test_the_sentences_hold_this_run_s_numbers() -> None:
    said = words(whole())
    assert "112 tokens took 280 ms: 400 tokens/s" in said["parallel"]
    assert "96 of them took 4.8 s: 20.0 tokens/s, slower by a factor of 20.0" in said["parallel"]
    assert "1 position took 54.0 ms and one with 16 took 114 ms: 16 times the tokens in 2.11" in said["wall"]
    assert "30.0 ms to read 540 MB" in said["wall"]
    assert "3.0 ms of arithmetic" in said["wall"]
    assert "meet at 10.0 positions" in said["wall"]
    assert "speculative 40.0 and 110" in said["wall"]
    assert "request 12 waited 16.6 s for 1.5 s of work, and all 12 were done after 18.6 s" in said["waits"]
    assert "none waited longer than 50.0 ms" in said["waits"]
    assert "batched needed 24 steps and speculative 6, each of 4.00 tokens" in said["drafts"]
    assert "of 24 drafted tokens the model accepted 18, 75.0%" in said["drafts"]
    assert (
        "took 80.0 ms, a plain one 50.0 ms (medians): the tokens took 730 ms instead of 1.5 s"
        in said["drafts"]
    )


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "blamed"), [(18e9, "memory is the limit"), (90e9, "most of its time is neither")]
)
def test_memory_is_blamed_only_where_the_roof_explains_the_step(copy_bytes_per_s: float, blamed: str) -> None:
    lesson = whole()
    assert not isinstance(lesson.roofline, LeftOut)
    said = words(replace(lesson, roofline=replace(lesson.roofline, copy_bytes_per_s=copy_bytes_per_s)))[
        "wall"
    ]
    assert blamed in said
    assert ("memory is the limit" in said) != ("most of its time is neither" in said)


def test_every_phase_of_every_request_is_drawn_on_one_time_scale() -> None:
    spec = specs(whole())["waits"]
    drawn = rows(spec)
    assert len(drawn) == 2 * 12 * 3
    assert all(row["from_s"] <= row["to_s"] for row in drawn)
    assert "resolve" not in spec  # shared scales are Vega-Lite's default
    assert spec["columns"] == 1
    assert {row["request"] for row in drawn} == set(range(1, 13))


def test_a_step_is_drawn_with_all_its_tokens() -> None:
    drawn = [row for row in rows(specs(whole())["drafts"]) if row["panel"].startswith("speculative")]
    kinds = [row["kind"] for row in drawn if row["step"] == 2]
    assert kinds == ["accepted draft"] * 3 + ["model's token", "rejected draft"]
    assert [row["kind"] for row in drawn if row["step"] == 1] == ["prompt"]


def test_each_lane_has_its_point_and_the_roof_spans_them_all() -> None:
    drawn = rows(specs(whole())["wall"])
    lanes = {row["kind"]: row["tokens"] for row in drawn if row["is_lane"]}
    assert lanes == {"lane sequential": 1, "lane batched": 9.5, "lane speculative": 40}
    roof = [row["tokens"] for row in drawn if row["kind"] == "roof"]
    assert min(roof) == pytest.approx(1)
    assert max(roof) == pytest.approx(512)


def test_pictures_that_a_lab_cannot_show_say_why() -> None:
    lesson = whole()
    lesson = replace(
        lesson,
        queues={Strategy.BATCHED: lesson.queues[Strategy.BATCHED]},
        timelines=LeftOut("It needs a speculative lane, and this lab has none that is ready."),
    )
    assert [name for name, spec in specs(lesson).items() if spec is None] == ["waits", "drafts"]
    page = markup(render(lesson))
    assert "This picture is left out. It needs a sequential lane" in page
    assert "This picture is left out. It needs a speculative lane" in page
    assert page.count("data-figure=") == 3
    assert "Parameters: 135 million in float32; copy 18.0 GB/s; matrix product 90.0 GFLOP/s." in page


def test_the_envelope_says_what_is_best_where_and_what_each_gives_away() -> None:
    said = words(whole())["envelope"]
    assert "Copying a text: best is speculative, k = 4 at 1 to 4 and batched, k = 0 at 16 at once." in said
    assert (
        "A story: best is speculative, k = 4 at 1 and batched, k = 0 at 4 to 16 at once "
        "(within 5% of the next at 1)."
    ) in said
    assert (
        "No fixed choice is best everywhere; at its worst batched, k = 0 gives away 50.0% (copying a text, 1 at "
        "once) and speculative, k = 4 gives away 50.0% (a story, 16 at once)."
    ) in said


def test_one_choice_that_is_best_everywhere_is_called_so() -> None:
    copying = tuple(curve for curve in fixed() if curve.text == "copying a text")
    plain, drafting = copying[0], replace(copying[1], points=copying[1].points[:2])
    said = words(replace(whole(), envelope=Envelope((plain, drafting), "Unknown.")))["envelope"]
    assert (
        "Best everywhere here, or within 5% of it: speculative, k = 4; at its worst batched, k = 0 gives away 50.0%"
        in said
    )


def test_what_was_not_measured_is_called_reckoned() -> None:
    said, page = words(whole())["envelope"], markup(render(whole()))
    assert "Adaptive was not measured" in said
    assert "reckoned by the cost model" in said
    assert "4.2% off in the median, 11.0% at most" in said
    assert (
        "copying a text, k = 4 at 1 to 4 and k = 0 at 16 at once; a story, k = 1 at 1 and k = 0 at 4 to 16"
        in said
    )
    drawn = rows(specs(whole())["envelope"])
    assert {row["name"] for row in drawn if row["kind"] == "point" and "k" in row} == {"best k, reckoned"}
    assert [row["k"] for row in drawn if "k" in row and row["panel"] == "a story"] == [
        "k = 1",
        "k = 0",
        "k = 0",
    ]
    assert "Not measured. The k that gives most" in page
    assert "<dt>Adaptive</dt>" not in page


def test_adaptive_placement_that_was_measured_is_drawn_and_nothing_is_reckoned() -> None:
    lesson = adaptive()
    said, page = words(lesson)["envelope"], markup(render(lesson))
    assert (
        "Measured, adaptive placement is at most 10.0% below the envelope (copying a text, 4 at once)" in said
    )
    assert (
        "its requests ran on: copying a text, speculative at 1, batched and speculative at 4 and batched at 16"
        in said
    )
    assert "reckoned" not in said
    assert "has no point" not in said
    assert not isinstance(lesson.envelope, LeftOut)
    *others, last = lesson.envelope.curves
    shorter = (*others, replace(last, points=last.points[:1]))
    said = words(replace(lesson, envelope=Envelope(shorter, None)))["envelope"]
    assert "It has no point where its requests were never all under way: a story, 4 and 16 at once." in said
    drawn = rows(specs(lesson)["envelope"])
    assert "adaptive placement" in {row.get("name") for row in drawn}
    assert not any("reckoned" in str(row.get("name")) for row in drawn)
    assert "<dt>Adaptive</dt>" in page
    assert "<dt>Best k, reckoned</dt>" not in page


def test_the_band_is_the_upper_edge_of_what_is_fixed() -> None:
    drawn = rows(specs(adaptive())["envelope"])
    for text in ("copying a text", "a story"):
        band = [row for row in drawn if row["kind"] == "envelope" and row["panel"] == text]
        at = {row["concurrency"]: row["value"] for row in band}
        points = [row for row in drawn if row["kind"] == "point" and row["panel"] == text]
        for load in (1, 4, 16):
            highest = max(
                row["value"]
                for row in points
                if row["concurrency"] == load and row["name"] != "adaptive placement"
            )
            assert at[load] == pytest.approx(highest)
    # Where the two lines of copying cross, both have as much: 30 + s (8 - 30) = 18 + s (10 - 18).
    crossing = 4 * 4 ** (12 / 14)
    nearest = min(
        (row for row in drawn if row["kind"] == "envelope" and row["panel"] == "copying a text"),
        key=lambda row: abs(row["concurrency"] - crossing),
    )
    assert nearest["value"] == pytest.approx(18 - 8 * 12 / 14, rel=0.06)


def test_each_line_has_its_lane_s_look_in_every_picture() -> None:
    lesson = adaptive()
    assert not isinstance(lesson.envelope, LeftOut)
    looks = looks_of_curves(lesson.lab.description["config"], lesson.envelope.curves)
    lanes = lane_looks(lesson.lab.description["config"], ())
    assert looks["batched, k = 0"] == lanes["batched"]
    assert looks["speculative, k = 4"] == lanes["speculative"]
    assert looks["adaptive placement"] not in lanes.values()


def test_a_simulated_lab_is_called_one() -> None:
    page = markup(render(simulated()))
    assert "This lab is simulated" in page
    assert "No weights." in page
    assert "there is no text to show" in page
    assert "is simulated" not in markup(render(whole()))


def test_the_page_holds_its_pictures_and_asks_nothing_of_the_network() -> None:
    page = render(whole())
    found = re.search(r"^const figures = (\{.*\});$", page, re.MULTILINE)
    assert found
    assert json.loads(found[1]) == specs(whole())
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href|action|data)\s*=\s*[\"'](?!#)|@import|url\(", markup(page))


def test_what_a_model_says_is_text_and_no_markup() -> None:
    page = render(whole())  # its answers hold <b>
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width_px", [1280, 400])
@pytest.mark.parametrize(("make", "drawn"), [(whole, 5), (simulated, 4), (adaptive, 5)])
def test_the_page_fits_and_complains_of_nothing(
    tab: Browser, tmp_path: Path, make: Any, drawn: int, width_px: int, scheme: str
) -> None:
    path = tmp_path / "lesson.html"
    path.write_text(render(make()), encoding="utf-8")
    shown = tab.show(path, width_px, scheme)
    assert shown.drawn == drawn
    assert shown.overflow_px <= 0
    assert shown.complaints == []
    assert shown.requests == [path.as_uri()]


def test_faults_of_a_page_are_noticed(tab: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<title>bad</title><div style='width:900px'>wide</div><img src='http://127.0.0.1:1/x.png'>"
        "<script>console.error('oh'); nothing();</script>"
    )
    shown = tab.show(path, 400, "light")
    assert shown.overflow_px > 400
    assert "http://127.0.0.1:1/x.png" in shown.requests
    assert "oh" in str(shown.complaints)
    assert "nothing is not defined" in str(shown.complaints)
