"""What the lab counted over a stage, and whether it agrees with what the client saw."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from loadtest.analysis.summary import Agreement
from loadtest.client.lab import LaneCounts, PrefixCounts, Scrape
from loadtest.client.record import ClientReason, RequestRecord
from serving.core.lane import ANY_LANE
from serving.core.request import Outcome
from serving.core.speculation import SpeculationCounts

# The client counts TTFT from its first byte sent, the gateway from the request's arrival there: between them
# lie a loopback connection and the reading of the head. On two cores that engines keep busy, and with Serve's proxy
# between as it was then, it took 5 to 25 ms.
TTFT_TOLERANCE_S = 0.050
TTFT_TOLERANCE_SHARE = 0.10
# The same requests stand in both histograms, so beyond that shift only a stray few may differ.
DISTRIBUTION_TOLERANCE = 0.05
ROUNDING = 1e-9

# Ends that only the client knows of: the gateway may have taken them for complete.
_CLIENTS_OWN = frozenset(ClientReason) - {ClientReason.ERROR_EVENT}


@dataclass(frozen=True, slots=True)
class ServerView:
    """What a lane's processes counted over a stage; a figure is None where they do not tell, or `notes` says why.

    Attributes:
        lane: the gateways' counts of it.
        no_lane: their counts of requests that were turned away before they had a lane.
    """

    lane: LaneCounts | None
    no_lane: LaneCounts | None
    speculation: SpeculationCounts | None
    prefix: PrefixCounts | None
    notes: tuple[str, ...]


def view(before: Scrape, after: Scrape, lane: str) -> ServerView:
    """What was counted between two scrapes; nothing of a stage whose requests the scheduler spread over lanes."""
    if lane == ANY_LANE:
        return ServerView(
            None, None, None, None, (f"not compared with the server: lane {ANY_LANE} is all of them",)
        )
    notes: list[str] = []
    speculation = _speculation(before, after, lane, notes)
    prefix = _prefix(before, after, lane, notes)
    counts = _gateways(before, after, (lane, ""), notes)
    in_lane, no_lane = counts or (None, None)
    return ServerView(in_lane, no_lane, speculation, prefix, tuple(notes))


def agreements(seen: ServerView, records: Sequence[RequestRecord]) -> tuple[Agreement, ...]:
    """The client's figures beside the gateways'; empty where these are not known.

    Counts and tokens must be equal. Requests that the client gave up by itself are the exception: how those
    ended at the gateway cannot be known here, so they widen the tolerance by as much as they may be.

    Args:
        records: all that the stage sent, warm-up among them.
    """
    if seen.lane is None or seen.no_lane is None:
        return ()
    completed = [record for record in records if record.is_completed]
    given_up = [record for record in records if record.reason in _CLIENTS_OWN]
    # Without a byte of the answer it is not sure that the lab ever saw the request.
    unsure = [record for record in given_up if record.first_byte_at_s is None]
    num_completed = seen.lane.ended.get(Outcome.COMPLETED, 0)
    rows = [
        _agreement(
            "requests", len(records) - len(unsure), seen.lane.num_ended + seen.no_lane.num_ended, len(unsure)
        ),
        _agreement("completed requests", len(completed), num_completed, len(given_up)),
        _agreement(
            "output tokens",
            sum(record.output_tokens or 0 for record in completed),
            seen.lane.output_tokens,
            sum(_most_tokens(record, completed) for record in given_up),
        ),
    ]
    # Other requests in one than in the other have other latencies.
    begun = [record for record in completed if record.chunk_at_s]
    if len(completed) == num_completed and len(begun) == seen.lane.ttft_count and begun:
        rows += _ttft_agreements(begun, seen.lane)
    return tuple(rows)


def _ttft_agreements(completed: Sequence[RequestRecord], lane: LaneCounts) -> list[Agreement]:
    """Mean and distribution of TTFT, from the instant of sending: what the gateway saw began then."""
    ttfts_s = sorted(
        record.chunk_at_s[0] - record.sent_at_s for record in completed if record.sent_at_s is not None
    )
    if not ttfts_s:
        return []
    server_s = lane.ttft_sum_s / lane.ttft_count
    distance = largest_distance(ttfts_s, lane)
    one_request = 1 / len(ttfts_s)
    return [
        _agreement("mean TTFT from sent (s)", fmean(ttfts_s), server_s, _ttft_tolerance_s(server_s)),
        _agreement("distance of TTFT distributions", distance, 0.0, max(DISTRIBUTION_TOLERANCE, one_request)),
    ]


def largest_distance(client_s: Sequence[float], lane: LaneCounts) -> float:
    """Largest distance of the cumulative shares over the server's bucket edges, 0 to 1.

    Compared as a Lévy distance: the client's values may be shifted by the tolerance of a TTFT, or many equal
    values beside an edge would count as a distance of 1.

    Args:
        client_s: rising.
    """
    largest = 0.0
    for edge_s, count in lane.ttft_buckets:
        server = count / lane.ttft_count
        shift_s = _ttft_tolerance_s(edge_s)
        least = bisect_right(client_s, edge_s - shift_s) / len(client_s)
        most = bisect_right(client_s, edge_s + shift_s) / len(client_s)
        largest = max(largest, least - server, server - most)
    return largest


def _ttft_tolerance_s(ttft_s: float) -> float:
    return max(TTFT_TOLERANCE_S, TTFT_TOLERANCE_SHARE * ttft_s)


def _most_tokens(record: RequestRecord, completed: Sequence[RequestRecord]) -> int:
    """The most tokens that a request may have been counted with."""
    if record.asked_output_tokens is not None:
        return record.asked_output_tokens
    return max((each.output_tokens or 0 for each in completed), default=0)


def _agreement(quantity: str, client: float, server: float, tolerance: float) -> Agreement:
    # A distance of exactly the tolerance, such as one request, is within it, however it was rounded.
    return Agreement(quantity, client, server, tolerance, abs(client - server) <= tolerance * (1 + ROUNDING))


def _gateways(
    before: Scrape, after: Scrape, lanes: Sequence[str], notes: list[str]
) -> tuple[LaneCounts, ...] | None:
    """Growth of each lane's counts over all gateways, or None with a note."""
    earlier = {gateway.gateway: gateway for gateway in before.gateways}
    later = {gateway.gateway: gateway for gateway in after.gateways}
    if not later and not earlier:
        return None
    # A gateway that came or went in between took part of the stage's counts with it.
    if earlier.keys() != later.keys():
        notes.append("not compared with the server: gateways changed during the stage, or did not answer")
        return None
    totals = []
    for lane in lanes:
        total = LaneCounts(lane, {})
        for name, gateway in later.items():
            old, new = earlier[name].lane(lane), gateway.lane(lane)
            if new.num_ended < old.num_ended:
                notes.append(f"not compared with the server: counters of gateway {name} went back")
                return None
            total = _plus(total, _plus(new, old, -1))
        totals.append(total)
    return tuple(totals)


def _plus(a: LaneCounts, b: LaneCounts, sign: int = 1) -> LaneCounts:
    buckets_a, buckets_b = dict(a.ttft_buckets), dict(b.ttft_buckets)
    return LaneCounts(
        lane=a.lane,
        ended={key: a.ended.get(key, 0) + sign * b.ended.get(key, 0) for key in a.ended | b.ended},
        output_tokens=a.output_tokens + sign * b.output_tokens,
        ttft_count=a.ttft_count + sign * b.ttft_count,
        ttft_sum_s=a.ttft_sum_s + sign * b.ttft_sum_s,
        ttft_buckets=tuple(
            (edge_s, buckets_a.get(edge_s, 0) + sign * buckets_b.get(edge_s, 0))
            for edge_s in sorted(buckets_a | buckets_b)
        ),
    )


def _speculation(before: Scrape, after: Scrape, lane: str, notes: list[str]) -> SpeculationCounts | None:
    """What the lane's engines drafted between two scrapes, or None and why it is not known."""
    earlier, later = before.speculation(lane), after.speculation(lane)
    # A replica that came or went in between took part of the stage's counts with it.
    if earlier.keys() != later.keys():
        notes.append("acceptance unknown: the lane's replicas changed during the stage, or did not answer")
        return None
    if not later:
        return None
    total = SpeculationCounts(0, 0, 0)
    for replica, counts in later.items():
        if counts.num_drafts < earlier[replica].num_drafts:
            notes.append(f"acceptance unknown: counters of replica {replica} went back during the stage")
            return None
        total = add_speculation(total, counts - earlier[replica])
    return total


def add_speculation(a: SpeculationCounts, b: SpeculationCounts) -> SpeculationCounts:
    return SpeculationCounts(
        a.num_drafts + b.num_drafts, a.draft_tokens + b.draft_tokens, a.accepted_tokens + b.accepted_tokens
    )


def _prefix(before: Scrape, after: Scrape, lane: str, notes: list[str]) -> PrefixCounts | None:
    """What the lane's prefix caches were asked for and had between two scrapes, or None and why it is not known."""
    earlier, later = before.prefix(lane), after.prefix(lane)
    if not earlier and not later:
        return None
    if earlier.keys() != later.keys() or any(later[name].queries < earlier[name].queries for name in later):
        notes.append("prefix cache hits unknown: the lane's replicas changed or began anew during the stage")
        return None
    return PrefixCounts(
        sum(later[name].queries - earlier[name].queries for name in later),
        sum(later[name].hits - earlier[name].hits for name in later),
    )
