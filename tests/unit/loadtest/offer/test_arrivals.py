from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.offer.arrivals import DEFAULT_DURATION_S, MAX_RATE_PER_S, parse_load, schedule
from loadtest.offer.load import ClosedLoop, OpenLoop, Process, RateSegment, TraceReplay, constant_rate

rates = st.floats(0, 20, allow_nan=False).map(lambda rate: round(rate, 3))
segments = st.builds(RateSegment, st.floats(0.1, 30), rates, rates)
loads = st.builds(
    OpenLoop,
    st.lists(segments, min_size=1, max_size=5)
    .map(tuple)
    .filter(lambda some: sum(one.requests for one in some) > 0),
    st.sampled_from(["constant", "poisson", "gamma"]),
    st.floats(0.1, 10),
)


def open_load(text: str) -> OpenLoop:
    load = parse_load(text)
    assert isinstance(load, OpenLoop)
    return load


def instants_s(text: str, seed: str = "a") -> list[float]:
    return [arrival.at_s for arrival in schedule(open_load(text), seed)]


@given(loads, st.text(max_size=5))
def test_arrivals_are_in_order_within_the_load_and_the_same_for_a_seed(load: OpenLoop, seed: str) -> None:
    arrivals = schedule(load, seed)
    assert arrivals == schedule(load, seed)
    at_s = [arrival.at_s for arrival in arrivals]
    assert at_s == sorted(at_s)
    assert all(0 <= one <= load.duration_s * (1 + 1e-12) for one in at_s)
    assert all(arrival.prompt_tokens is arrival.output_tokens is None for arrival in arrivals)


@given(loads)
def test_nothing_arrives_while_the_rate_is_0(load: OpenLoop) -> None:
    quiet = RateSegment(10, 0, 0)
    late = OpenLoop((quiet, *load.segments), load.process, load.burstiness)
    at_s = [arrival.at_s for arrival in schedule(late, "a")]
    assert all(one >= 10 for one in at_s)
    assert [one - 10 for one in at_s] == pytest.approx([arrival.at_s for arrival in schedule(load, "a")])


@given(loads)
def test_constant_arrivals_are_as_many_as_the_rate_says(load: OpenLoop) -> None:
    even = OpenLoop(load.segments, "constant")
    assert abs(len(schedule(even, "")) - even.requests) <= 0.5 + 1e-6


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_another_seed_is_another_schedule(process: Process) -> None:
    load = constant_rate(2, 30, process)
    assert schedule(load, "1") != schedule(load, "2")


def test_constant_arrivals_keep_their_distance() -> None:
    assert instants_s("constant:4/s,2s") == pytest.approx([0.125 + 0.25 * n for n in range(8)])


@pytest.mark.parametrize(
    ("text", "variation"),
    [
        ("constant:100/s,300s", 0.0),
        ("poisson:100/s,300s", 1.0),
        ("gamma:100/s,burstiness=0.25,300s", 2.0),
        ("gamma:100/s,burstiness=4,300s", 0.5),
    ],
)
def test_gaps_have_the_mean_and_the_variation_of_their_process(text: str, variation: float) -> None:
    gaps_s = [later - earlier for earlier, later in pairwise(instants_s(text))]
    # 30,000 gaps: the mean is known within 0.6 % for a variation of 1, and twice that for 2.
    assert fmean(gaps_s) == pytest.approx(0.01, rel=0.04)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_a_bursty_load_offers_no_more_than_its_rate() -> None:
    # Gaps drawn from the first arrival on would give (variation^2 - 1) / 2 = 4.5 arrivals too many.
    load = open_load("gamma:2/s,burstiness=0.1,5s")
    counts = [len(schedule(load, str(seed))) for seed in range(3000)]
    assert fmean(counts) == pytest.approx(load.requests, abs=4 * pstdev(counts) / math.sqrt(len(counts)))
    assert 4 * pstdev(counts) / math.sqrt(len(counts)) < 1


def test_each_step_gets_its_share() -> None:
    at_s = instants_s("constant:steps=1-2-4/s,30s")
    assert [sum(start <= one < start + 30 for one in at_s) for start in (0, 30, 60)] == [30, 60, 120]


def test_a_ramp_fills_up_as_the_area_under_it() -> None:
    # Over the first half of 0 to 8 req/s in 60 s lies a quarter of the requests.
    at_s = instants_s("constant:ramp=0-8/s,60s")
    assert len(at_s) == 240
    assert sum(one < 30 for one in at_s) == 60
    down = instants_s("constant:ramp=8-0/s,60s")
    assert sorted(60 - one for one in down) == pytest.approx(at_s)


def test_a_spike_is_at_its_peak_in_the_middle_third() -> None:
    at_s = instants_s("constant:spike=1-8/s,60s")
    assert [sum(start <= one < start + 20 for one in at_s) for start in (0, 20, 40)] == [20, 160, 20]


def test_a_trace_is_replayed_with_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n100,10,5\n104,20,6\n112,30,7\n")
    arrivals = schedule(TraceReplay(str(path), speed=2), "any")
    assert [(one.at_s, one.prompt_tokens, one.output_tokens) for one in arrivals] == [
        (0, 10, 5),
        (2, 20, 6),
        (6, 30, 7),
    ]
    assert schedule(TraceReplay(str(path), speed=2, max_duration_s=6), "any") == arrivals[:2]
    window = schedule(TraceReplay(str(path), speed=2, max_duration_s=5, from_s=3), "any")
    assert [(one.at_s, one.prompt_tokens) for one in window] == [(0.5, 20), (4.5, 30)]


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("8", ClosedLoop(8)),
        ("closed:8", ClosedLoop(8)),
        (" closed:8,think=500ms ", ClosedLoop(8, 0.5)),
        ("trace:a.csv", TraceReplay("a.csv")),
        ("trace:a,b.csv,speed=2,2min", TraceReplay("a,b.csv", 2, 120)),
        ("trace:runs/a:b.csv,1h,speed=0.5", TraceReplay("runs/a:b.csv", 0.5, 3600)),
        ("trace:a.csv,from=2h,60s", TraceReplay("a.csv", 1, 60, 7200)),
        ("trace:a.jsonl,unit=ms,from=0s", TraceReplay("a.jsonl", unit="ms")),
    ],
)
def test_users_and_traces_are_read(text: str, load: ClosedLoop | TraceReplay) -> None:
    assert parse_load(text) == load


def test_rates_are_read() -> None:
    load = open_load("poisson:2.5/s")
    assert load.segments == (RateSegment(DEFAULT_DURATION_S, 2.5, 2.5),)
    assert (load.process, load.label) == ("poisson", "poisson 2.5 req/s")
    bursty = open_load("gamma:2/s,burstiness=0.5,90s")
    assert (bursty.process, bursty.burstiness, bursty.duration_s) == ("gamma", 0.5, 90)
    assert open_load("poisson:ramp=0.5-4/s,120s").segments == (RateSegment(120, 0.5, 4),)


def test_loads_that_differ_have_labels_that_differ() -> None:
    texts = [
        "2",
        "closed:2,think=1s",
        "poisson:2/s",
        "constant:2/s",
        "gamma:2/s,burstiness=0.5",
        "gamma:2/s,burstiness=2",
        "poisson:steps=1-3/s",
        "poisson:ramp=1-3/s",
        "poisson:spike=1-3/s",
        "poisson:steps=1-3/s,30s",
        "poisson:ramp=1-3/s,30s",
        "poisson:spike=1-3/s,30s",
        "trace:a.csv",
        "trace:a.csv,speed=2",
        "trace:a.csv,speed=2,30s",
        "trace:a.csv,speed=2,30s,from=1h",
    ]
    assert len({parse_load(text).label for text in texts}) == len(texts)


@pytest.mark.parametrize("rate", ["poisson:2/s", "gamma:2/s,burstiness=0.5"])
def test_a_rate_has_one_label_however_long_it_is_offered(rate: str) -> None:
    assert parse_load(rate).label == parse_load(f"{rate},5min").label


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "users '' is not a whole number"),
        ("0", "users: 0 must be in 1"),
        ("8.5", "users '8.5' is not a whole number"),
        ("closed:4,foo=1", "'foo=1' is not known here"),
        ("closed:4,think=2", "duration '2' is not a number with ms, s, min or h"),
        ("warp:3", "'warp' is none of closed, constant, poisson, gamma, trace"),
        ("poisson:2", "rate '2' has no unit"),
        ("poisson:0/s", "offers nothing"),
        ("poisson:nan/s", "rate 'nan' is not a plain number"),
        ("poisson:-2/s", "rate '' is not a plain number"),
        (f"poisson:{MAX_RATE_PER_S + 1:.0f}/s", "rate in req/s"),
        ("poisson:99999/s,600s", "requests expected"),
        ("poisson:2/s,48h", "duration in s"),
        ("poisson:2/s,0s", "duration in s: 0 must be in 0.001"),
        ("poisson:2/s,60s,30s", "duration is given twice"),
        ("poisson:2/s,burstiness=1", "'burstiness=1' is not known here"),
        ("gamma:2/s,burstiness=0", "burstiness: 0 must be in 0.01"),
        ("poisson:1-2/s", "rate takes one rate, got 2"),
        ("poisson:steps=1/s", "steps takes two rates or more, got 1"),
        ("poisson:stairs=1-2/s", "'stairs' is not a shape"),
        ("trace:", "path"),
        ("trace:a.csv,speed=fast", "speed 'fast' is not a plain number"),
        ("trace:a.csv,speed=2,speed=3", "speed is given twice"),
        ("trace:a.csv,from=soon", "duration 'soon' is not a number with ms"),
        ("trace:a.csv,unit=h", "unit 'h' must be one of us, ms, s"),
    ],
)
def test_a_wrong_load_is_refused_with_its_value(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r"^load ") as error:
        parse_load(text)
    assert repr(text) in str(error.value)
    assert fault in str(error.value)


@given(st.text("0123456789.:/s,=-steprampcloedhink", max_size=30))
def test_any_text_is_a_load_or_an_error_that_names_it(text: str) -> None:
    try:
        parse_load(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - both ends are allowed
