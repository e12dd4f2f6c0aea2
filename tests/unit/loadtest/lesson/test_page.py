from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.lesson.page import four_pictures, render
from loadtest.lesson.teach import LeftOut, Lesson
from serving.core.lane import Strategy
from tests.unit.loadtest.lesson.browser import Browser
from tests.unit.loadtest.lesson.lessons import simulated, whole


def words(lesson: Lesson) -> dict[str, str]:
    return {picture.name: " ".join(picture.sentences) for picture in four_pictures(lesson)}


def markup(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = spec["data"]["values"]
    return values


def specs(lesson: Lesson) -> dict[str, Any]:
    return {picture.name: picture.spec for picture in four_pictures(lesson)}


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
    assert page.count("data-figure=") == 2
    assert "Parameters: 135 million in float32; copy 18.0 GB/s; matrix product 90.0 GFLOP/s." in page


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
@pytest.mark.parametrize(("make", "drawn"), [(whole, 4), (simulated, 3)])
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
