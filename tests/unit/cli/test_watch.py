"""The terminal view: figures from pages of metrics, and a table that fits."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from serving.cli import watch

URL = "http://127.0.0.1:1"
TARGETS = [
    {"targets": ["s"], "labels": {"role": "scheduler"}},
    {"targets": ["g"], "labels": {"role": "gateway"}},
    {"targets": ["r1"], "labels": {"role": "replica", "lane": "spec", "replica": "spec-1"}},
    {"targets": ["r2"], "labels": {"role": "replica", "lane": "spec", "replica": "spec-2"}},
    {"targets": ["ray"], "labels": {"role": "ray"}},
]


def scheduler_page(refused: int) -> str:
    return f"""# HELP tandem_wanted_replicas Replicas.
# TYPE tandem_wanted_replicas gauge
tandem_wanted_replicas{{lane="spec"}} 3.0
tandem_replica_ready{{lane="spec",replica="spec-1"}} 1.0
tandem_replica_ready{{lane="spec",replica="spec-2"}} 1.0
tandem_running_requests{{lane="spec",replica="spec-1"}} 2.0
tandem_running_requests{{lane="spec",replica="spec-2"}} 1.0
tandem_waiting_requests{{lane="spec"}} 4.0
tandem_waiting_requests{{lane="any"}} 5.0
tandem_refusals_total{{lane="spec",reason="queue_full"}} {refused}
tandem_refusals_total{{lane="spec",reason="queue_timeout"}} {refused}
"""


def gateway_page(fast: int, slow: int) -> str:
    """`fast` requests took 0 to 0.1 s, `slow` ones 0.1 to 0.5 s."""
    rows = [("0.1", fast), ("0.5", fast + slow), ("+Inf", fast + slow)]
    return "".join(
        f'tandem_{figure}_seconds_bucket{{lane="spec",le="{edge}"}} {count}\n'
        for figure in ("ttft", "tpot")
        for edge, count in rows
    )


def replica_page(tokens: int, drafted: int, accepted: int) -> str:
    return f"""vllm:generation_tokens_total{{model_name="m"}} {tokens}
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}
vllm:something_else_total{{model_name="m"}} 7
"""


class Lab:
    """Answers as a lab whose counters go up with each reading of its targets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.readings = -1
        self.gone: set[str] = set()

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return False

    def fetch(self, url: str) -> bytes:
        if url == f"{URL}/targets":
            self.readings += 1
            return json.dumps(TARGETS).encode()
        address = url.removeprefix("http://").removesuffix("/metrics")
        if address in self.gone:
            raise ConnectionRefusedError("refused")
        n = self.readings
        pages: dict[str, Callable[[], str]] = {
            "s": lambda: scheduler_page(2 * n),
            "g": lambda: gateway_page(6 * n, 4 * n),
            "r1": lambda: replica_page(1000 + 30 * n, 8 * n, 5 * n),
            "r2": lambda: replica_page(2000 + 10 * n, 8 * n, 7 * n),
        }
        return pages[address]().encode()


def first_frame(lab: Lab) -> watch.Frame:
    return next(watch.frames(URL, lab.fetch, lab.wait, lab.clock))


def test_figures_are_of_the_time_between_two_readings() -> None:
    shown = first_frame(Lab())
    assert shown.window_s == 1
    (lane,) = shown.lanes
    assert (lane.lane, lane.replicas_ready, lane.replicas_wanted) == ("spec", 2, 3)
    assert (lane.running, lane.waiting, shown.waiting_any) == (3, 4, 5)
    assert lane.tokens_per_s == 40
    assert lane.acceptance_rate == 12 / 16
    assert lane.refusals_per_s == 4
    assert lane.ttft_p50_s == pytest.approx(0.1 * 5 / 6)
    assert lane.ttft_p95_s == pytest.approx(0.1 + 0.4 * 3.5 / 4)
    assert shown.faults == ()


def test_the_window_slides() -> None:
    lab = Lab()
    source = watch.frames(URL, lab.fetch, lab.wait, lab.clock)
    windows_s = [next(source).window_s for _ in range(40)]
    assert windows_s[:3] == [1, 2, 3]
    assert set(windows_s[30:]) == {watch.WINDOW_S}


def test_the_window_can_be_chosen() -> None:
    lab = Lab()
    source = watch.frames(URL, lab.fetch, lab.wait, lab.clock, window_s=3)
    assert [next(source).window_s for _ in range(5)] == [1, 2, 3, 3, 3]


def test_a_single_frame_is_over_a_window_that_it_states() -> None:
    lab = Lab()
    shown = watch.one_frame(URL, lab.fetch, lab.wait, lab.clock, window_s=20)
    assert (shown.window_s, shown.lanes[0].tokens_per_s) == (20, 2)  # 40 tokens between two readings
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(watch.picture(shown, URL))
    assert isinstance(console.file, io.StringIO)
    assert f"{URL}, last 20 s" in console.file.getvalue()
    assert watch.one_frame(URL, lab.fetch, lab.wait, lab.clock).window_s == watch.ONCE_S > 5


def test_a_process_that_does_not_answer_is_named_and_the_rest_is_shown() -> None:
    lab = Lab()
    lab.gone = {"r2"}
    shown = first_frame(lab)
    assert shown.faults == ("replica at r2: refused",)
    assert shown.lanes[0].tokens_per_s == 30


def test_a_lane_at_rest_has_dashes_and_not_zeros() -> None:
    snapshot = watch.Snapshot(0.0, {"scheduler": watch.read_page(scheduler_page(0), "")})
    (lane,) = watch.frame([snapshot]).lanes
    assert (lane.ttft_p50_s, lane.tpot_p50_s, lane.acceptance_rate) == (None, None, None)


def tokens_per_s(readings: list[dict[str, str | None]]) -> tuple[float, tuple[str, ...]]:
    """Of one lane whose processes had these pages, a second apart; None for one that could not be read."""
    shown = watch.frame(
        [
            watch.Snapshot(
                float(at_s),
                {
                    name: None if text is None else watch.read_page(text, "spec")
                    for name, text in ({"scheduler": scheduler_page(0)} | pages).items()
                },
            )
            for at_s, pages in enumerate(readings)
        ]
    )
    return shown.lanes[0].tokens_per_s, shown.left_out


def test_the_rest_goes_on_counting_when_a_replica_is_replaced() -> None:
    old = [replica_page(50_000 + 100 * second, 0, 0) for second in range(5)]
    other = [replica_page(70_000 + 100 * second, 0, 0) for second in range(10)]
    new = [replica_page(100 * second, 0, 0) for second in range(5)]
    readings: list[dict[str, str | None]] = [{"other": page} for page in other]
    for second in range(5):
        readings[second]["old"] = old[second]
        readings[5 + second]["new"] = new[second]
    # Nine seconds of the other, and four of each of the two before and after.
    assert tokens_per_s(readings)[0] == pytest.approx((900 + 400 + 400) / 9)
    # Under the name of the one that it replaces its counters go back.
    renamed = [{"other": page["other"], "old": page.get("old", page.get("new"))} for page in readings]
    assert tokens_per_s(renamed)[0] == pytest.approx((900 + 400) / 9)


def test_a_gateway_that_began_anew_under_its_name_has_the_latencies_of_now() -> None:
    pages = [watch.read_page(gateway_page(fast, slow), "") for fast, slow in ((900, 0), (0, 10))]
    scheduler = watch.read_page(scheduler_page(0), "")
    shown = watch.frame(
        [watch.Snapshot(float(n), {"gateway": page, "scheduler": scheduler}) for n, page in enumerate(pages)]
    )
    assert shown.lanes[0].ttft_p50_s == pytest.approx(0.3)


@pytest.mark.parametrize("missed", [[0], [9], [4], [0, 1, 9]])
def test_a_page_that_was_missed_is_no_burst(missed: list[int]) -> None:
    readings: list[dict[str, str | None]] = [
        {name: replica_page(start + 100 * second, 0, 0) for name, start in (("a", 1_000), ("b", 500_000))}
        for second in range(10)
    ]
    for second in missed:
        readings[second]["b"] = None
    rate, left_out = tokens_per_s(readings)
    assert rate == pytest.approx(200)
    assert left_out == ()


def test_a_page_that_was_read_once_is_said_to_be_left_out() -> None:
    a, b = replica_page(1_000, 0, 0), replica_page(500_000, 0, 0)
    rate, left_out = tokens_per_s([{"a": a, "b": None}, {"a": replica_page(1_100, 0, 0), "b": b}])
    assert rate == 100
    assert left_out == ("b",)


@pytest.mark.parametrize(
    ("share", "expected_s"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 3.0), (0.99, 3.0)]
)
def test_quantiles_are_linear_within_a_bucket(share: float, expected_s: float) -> None:
    # 2 up to 1 s, 1 up to 3 s, 1 beyond every finite edge.
    cumulative = {1.0: 2.0, 3.0: 3.0, float("inf"): 4.0}
    assert watch.quantile_s(share, cumulative) == pytest.approx(expected_s)


def test_nothing_observed_has_no_quantile() -> None:
    assert watch.quantile_s(0.5, {1.0: 0.0, float("inf"): 0.0}) is None
    assert watch.quantile_s(0.5, {}) is None


@pytest.mark.parametrize("width", [80, 132])
def test_the_table_fits(width: int) -> None:
    lanes = tuple(
        watch.LaneFigures(name, 12, 12, 128, 1024, 12345.6, 12.34, 99.99, 0.123, 0.75, 12.5)
        for name in ("sequential", "speculative")
    )
    shown = watch.Frame(30.0, lanes, 1024, 12.5, ())
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(watch.picture(shown, URL))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for heading in watch.HEADINGS:
        assert heading in text
    for figure in ("12345.6", "12.34 s", "99.99 s", "123 ms", "75%", "12.5", "1024"):
        assert figure in text, figure
    assert "…" not in text


def test_json_is_one_line_with_every_figure() -> None:
    line = watch.as_json(first_frame(Lab()))
    assert "\n" not in line
    assert json.loads(line)["lanes"][0]["tokens_per_s"] == 40


def test_what_is_no_lab_is_refused() -> None:
    with pytest.raises(ValueError, match="not a list of targets"):
        watch.read_snapshot(URL, lambda _: b'{"targets": 1}')
