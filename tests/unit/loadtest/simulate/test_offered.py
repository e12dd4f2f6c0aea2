from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from loadtest.offer.arrivals import parse_load
from loadtest.offer.load import TraceReplay
from loadtest.simulate.lanes import TextMix
from loadtest.simulate.offered import mean_lengths, offered_by
from serving.core.speculation.cost_model import Lengths

ANY = TextMix(("any",), (1.0,))
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-03-02 09:00:00,92,13\n2026-03-02 09:00:02,257,38\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_trace_brings_its_lengths(trace: Path) -> None:
    offered = offered_by(parse_load(f"trace:{trace},speed=2"), ANY, 0)
    assert [(each.at_s, each.prompt_tokens, each.output_tokens) for each in offered] == [
        (0.0, 92, 13),
        (1.0, 257, 38),
    ]
    assert mean_lengths(offered) == Lengths(174.5, 25.5)


def test_a_rate_has_the_lengths_that_are_said() -> None:
    load = parse_load("poisson:20/s,60s")
    offered = offered_by(load, ANY, 3, prompt_tokens=100, output_tokens=30)
    assert len(offered) == pytest.approx(1200, rel=0.1)
    assert {(each.prompt_tokens, each.output_tokens) for each in offered} == {(100, 30)}
    spread = offered_by(load, ANY, 3, prompt_tokens=100, output_tokens=30, spread=0.5)
    assert [each.at_s for each in spread] == [each.at_s for each in offered]
    assert mean_lengths(spread).prompt_tokens == pytest.approx(100, rel=0.06)
    assert statistics.stdev(each.output_tokens for each in spread) == pytest.approx(16, rel=0.2)
    assert offered_by(load, ANY, 3, prompt_tokens=100, output_tokens=30, spread=0.5) == spread


def test_kinds_of_text_come_by_their_shares() -> None:
    mix = TextMix(("a", "b"), (0.8, 0.2))
    offered = offered_by(parse_load("poisson:50/s,60s"), mix, 3, prompt_tokens=1, output_tokens=1)
    assert statistics.mean(each.kind for each in offered) == pytest.approx(0.2, abs=0.03)


def test_loads_that_say_too_little_or_too_much_are_refused(trace: Path) -> None:
    with pytest.raises(ValueError, match="8 users: users who wait for answers"):
        offered_by(parse_load("8"), ANY, 0)
    with pytest.raises(ValueError, match=r"how long its requests are is not said \(--output-tokens\)"):
        offered_by(parse_load("poisson:2/s"), ANY, 0, prompt_tokens=100)
    with pytest.raises(ValueError, match="--prompt-tokens 5: the trace has lengths of its own"):
        offered_by(parse_load(f"trace:{trace}"), ANY, 0, prompt_tokens=5)
    with pytest.raises(ValueError, match=r"after 2e\+12 s; at most 1e\+09 s .* --speed too low"):
        offered_by(TraceReplay(str(trace), speed=1e-12), ANY, 0)
    with pytest.raises(ValueError, match="no request falls into it"):
        offered_by(parse_load("poisson:0.001/s,1s"), ANY, 0, prompt_tokens=5, output_tokens=5)
