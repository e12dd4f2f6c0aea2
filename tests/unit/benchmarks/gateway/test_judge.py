"""The targets are judged against vllm-router in the same repeat, and failures of ours miss them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.benchmarks.gateway.figures import FirstTokens, Idle, Measured, Sample
from serving.benchmarks.gateway.judge import judge
from serving.benchmarks.gateway.names import DIRECT, OURS, ROUTER
from serving.benchmarks.verdict import Verdict

LEVELS = (1, 128, 256, 512, 1000)


def sample(peer: str, streams: int, repeat: int = 1, **changed: Any) -> Sample:
    one = Sample(
        peer=peer,
        streams=streams,
        repeat=repeat,
        tokens=8000.0,
        window_s=8.0,
        ttft_p50_ms=40.0,
        ttft_p99_ms=60.0,
        gateway_cpu_s=0.8,
        rest_cpu_s=0.1,
        engine_cpu_s=0.5,
        others_cpu_s=0.1,
        failures={},
        starved=0,
        client_share=0.3,
        client_lag_p99_ms=1.0,
    )
    return replace(one, **changed)


def measured(**ours: Any) -> Measured:
    """The router with fixed figures, ours with those that differ, at all levels."""
    samples = [sample(ROUTER, streams) for streams in LEVELS]
    samples += [sample(OURS, streams, **ours) for streams in LEVELS]
    probes = [FirstTokens(DIRECT, 1, 100, 21.0, {}), FirstTokens(OURS, 1, 100, 22.0, {})]
    return Measured(samples, probes, [Idle(OURS, 1000, 1000, 0, 20_000_000)])


def of(verdicts: list[Verdict], *words: str) -> list[bool | None]:
    return [one.is_met for one in verdicts if all(word in one.target for word in words)]


def test_all_targets_can_be_met() -> None:
    verdicts = judge(measured(tokens=8800.0), OURS)
    assert [verdict.is_met for verdict in verdicts] == [True] * len(verdicts)
    assert len(verdicts) == 14


def test_as_many_tokens_are_enough_at_256_streams_only() -> None:
    verdicts = judge(measured(), OURS)
    assert of(verdicts, "tokens/s", "256") == [True]
    assert of(verdicts, "tokens/s", "512") == of(verdicts, "tokens/s", "1,000") == [False]


def test_first_tokens_may_be_later_at_more_streams() -> None:
    verdicts = judge(measured(ttft_p50_ms=52.0), OURS)
    assert of(verdicts, "TTFT p50", "128") == [False]
    assert of(verdicts, "TTFT p50", "256") == of(verdicts, "TTFT p50", "512") == [True]


def test_the_last_percent_may_be_no_later() -> None:
    assert of(judge(measured(ttft_p99_ms=61.0), OURS), "TTFT p99") == [False] * 3


def test_processor_time_is_per_token() -> None:
    assert of(judge(measured(gateway_cpu_s=1.1), OURS), "processor time") == [True] * 3
    assert of(judge(measured(gateway_cpu_s=1.1, tokens=7000.0), OURS), "processor time") == [False] * 3


@pytest.mark.parametrize(("ttft_ms", "is_met"), [(22.5, True), (22.6, False), (None, None)])
def test_what_is_added_at_one_stream(ttft_ms: float | None, is_met: bool | None) -> None:
    probes = [FirstTokens(DIRECT, 1, 100, 21.0, {}), FirstTokens(OURS, 1, 100, ttft_ms, {})]
    assert of(judge(replace(measured(), first_tokens=probes), OURS), "added") == [is_met]


@pytest.mark.parametrize(
    ("held", "grown", "is_met"), [(100, 2.9e6, True), (100, 3e6, False), (99, 1e6, None)]
)
def test_idle_streams(held: int, grown: float, is_met: bool | None) -> None:
    idle = [Idle(OURS, 100, held, 10_000_000, 10_000_000 + int(grown))]
    assert of(judge(replace(measured(), idle=idle), OURS), "idle") == [is_met]


def test_a_level_with_failures_of_ours_is_missed() -> None:
    whole = measured(tokens=16000.0)
    failing = [
        replace(one, failures={"status 503": 1}) if (one.peer, one.streams) == (OURS, 512) else one
        for one in whole.samples
    ]
    verdicts = judge(replace(whole, samples=failing), OURS)
    assert of(verdicts, "tokens/s", "512") == [False]
    assert of(verdicts, "tokens/s", "256") == [True]
    assert "1 of its own failed" in next(one.note for one in verdicts if "at 512" in one.target)


def test_failures_of_the_router_are_told_and_decide_nothing() -> None:
    whole = measured(tokens=16000.0)
    failing = [replace(one, starved=3) if one.peer == ROUTER else one for one in whole.samples]
    verdicts = judge(replace(whole, samples=failing), OURS)
    assert of(verdicts, "tokens/s") == [True] * 3
    assert "3 of vllm-router's failed" in verdicts[0].note


def test_without_the_router_nothing_is_judged_against_it() -> None:
    whole = measured()
    alone = replace(whole, samples=[one for one in whole.samples if one.peer != ROUTER])
    verdicts = judge(alone, OURS)
    assert of(verdicts, ROUTER) == [None] * 12
    assert of(verdicts, "added") == of(verdicts, "idle") == [True]


def test_each_repeat_is_compared_with_the_same_repeat() -> None:
    """The machine was half as fast in the second repeat, for both."""
    samples = [
        sample(peer, 256, repeat, tokens=tokens)
        for repeat, factor in ((1, 1.0), (2, 0.5))
        for peer, tokens in ((ROUTER, 8000 * factor), (OURS, 8800 * factor))
    ]
    found = Measured(samples, [], []).ratio(OURS, ROUTER, 256, lambda one: one.tokens_per_s)
    assert found is not None
    assert (found.least, found.most) == pytest.approx((1.1, 1.1))
