"""The load client against a server that stamps what it really sends.

Servers and clients are processes of their own. Token counts must be exact. Every reported TTFT, gap, E2E and
time of decoding must lie within 2 ms or 2 percent, the larger, of what the server stamped: see `truth.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.core.latency import inter_chunk_latencies_s, percentile, tpot_s
from serving.engines.base import SentStream
from tests.golden.conftest import PROFILES, STALLED, Profile, Server
from tests.golden.truth import between, decoding, faults, instant, pairs_of_choices, was_starved

# A stamp before a write and one after it bracket the truth. Brackets as wide as the tolerance would prove little.
WIDEST_MEDIAN_S = 0.0005
CHUNKS = 32  # of each choice
CHOICES = 4
ATTEMPTS = 60
ROUNDING_S = 1e-4


def assert_true(
    server: Server, *, streams: int, requests: int, tokens: int, choices: int = 1
) -> list[SentStream]:
    """Measure until every request was once reported as it was sent; the streams of those measurements.

    Two cores that others use as well may leave a client without one for longer than a gap. The kernel then merges
    chunks that lie unread and keeps one stamp, so no client can tell them apart. Only a record that shows that
    itself is measured again, with all others beside it. Any other fault counts at once; so does the last attempt.
    """
    true: dict[str, SentStream] = {}
    for attempt in range(1, ATTEMPTS + 1):
        records = server.measure(streams=streams, requests=requests, tokens=tokens, choices=choices)
        assert len({record.label.request_id for record in records}) == len(records) == streams * requests
        sent = server.sent()
        found = {record.label.request_id: faults([record], sent) for record in records}
        true |= {name: sent[name] for name, lines in found.items() if not lines}
        if len(true) == len(records):  # request ids are the same in each attempt
            break
        hidden = [one for one in records if found[one.label.request_id] and not was_starved(one)]
        lines = [line for lines in found.values() for line in lines]
        story = f"attempt {attempt}: {len(lines)} faults, {len(hidden)} records false and not starved:\n"
        story += "\n".join(lines[:20])
        assert not hidden, story
        assert attempt < ATTEMPTS, f"{len(records) - len(true)} requests never true; {story}"
    widths_s = [instant(chunk).high_s - instant(chunk).low_s for one in true.values() for chunk in one.chunks]
    assert (percentile(widths_s, 50) or 0) < WIDEST_MEDIAN_S
    return list(true.values())


def sent_gaps_s(stream: SentStream) -> list[float]:
    return [between(*pair).low_s for pair in pairs_of_choices(stream)]


@pytest.mark.parametrize("streams", [1, 50])
@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_every_time_and_count_is_as_it_was_sent(
    servers: dict[Profile, Server], profile: Profile, streams: int
) -> None:
    server = servers[profile]
    tokens = CHUNKS * profile.tokens_per_chunk
    sent = assert_true(server, streams=streams, requests=1 if streams > 1 else 2, tokens=tokens)
    # The server is what its profile says, so that the two profiles do differ. It may catch up on one step at most.
    step_s = profile.step_ms / 1000
    assert min(gap for stream in sent for gap in sent_gaps_s(stream)) < 2 * step_s
    for stream in sent:
        first, last = instant(stream.chunks[0]), instant(stream.chunks[-1])
        assert last.high_s - first.low_s > (len(stream.chunks) - 2) * step_s - ROUNDING_S
        assert (
            first.high_s - stream.received_monotonic_ns / 1e9 > profile.ttft_ms / 1000 - step_s - ROUNDING_S
        )


@pytest.mark.parametrize("streams", [1, 50])
def test_a_stall_is_reported_where_and_as_long_as_it_was(
    servers: dict[Profile, Server], streams: int
) -> None:
    for stream in assert_true(servers[STALLED], streams=streams, requests=1, tokens=CHUNKS):
        gaps_s = sent_gaps_s(stream)
        assert gaps_s.index(max(gaps_s)) == STALLED.stall_after_tokens - 1
        assert max(gaps_s) > STALLED.stall_ms / 1000 * 0.9


@pytest.mark.parametrize("profile", [PROFILES[0], PROFILES[3]], ids=str)
def test_several_choices_have_the_times_of_each(servers: dict[Profile, Server], profile: Profile) -> None:
    tokens = CHUNKS * profile.tokens_per_chunk
    for stream in assert_true(servers[profile], streams=1, requests=2, tokens=tokens, choices=CHOICES):
        assert len(sent_gaps_s(stream)) == CHOICES * (CHUNKS - 1)
        # Reported is what was sent; what was sent is the profile's time per token, and not a quarter of it.
        sent_tpot_s = decoding(stream).high_s / (CHOICES * (tokens - 1))
        assert sent_tpot_s > (CHUNKS - 2) * profile.step_ms / 1000 / (tokens - 1)


@pytest.mark.parametrize("profile", [PROFILES[0], PROFILES[3]], ids=str)
def test_choices_taken_for_one_are_caught(servers: dict[Profile, Server], profile: Profile) -> None:
    """The check can fail: pooled, a step's chunks lie next to each other, and the tokens of all share one time."""
    server = servers[profile]
    tokens = CHUNKS * profile.tokens_per_chunk
    (record,) = server.measure(streams=1, requests=1, tokens=tokens, choices=CHOICES)
    sent = server.sent()
    pooled = replace(record, chunk_choice=())
    assert any("choice by chunk" in line for line in faults([pooled], sent))
    true_tpot_s = decoding(sent[record.label.request_id]).low_s / (CHOICES * (tokens - 1))
    assert (tpot_s(pooled.timeline) or 0) < true_tpot_s / (CHOICES - 1)
    assert (percentile(inter_chunk_latencies_s(pooled.timeline), 50) or 0) < profile.step_ms / 1000 / 2


@pytest.mark.parametrize("profile", [PROFILES[0], PROFILES[3]], ids=str)
def test_a_reader_that_lumps_is_caught(servers: dict[Profile, Server], profile: Profile) -> None:
    """The check can fail: blocks of 1,024 bytes hold small events back until they are full."""
    server = servers[profile]
    tokens = CHUNKS * profile.tokens_per_chunk
    records = server.measure(streams=1, requests=1, tokens=tokens, reader="lumping")
    found = faults(records, server.sent())
    assert any("TTFT" in line for line in found)
    assert sum("gap" in line for line in found) > CHUNKS / 2
    assert not any("tokens" in line or "chunks" in line for line in found)
