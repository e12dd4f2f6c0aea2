"""Service level objectives: what a request must keep to count, and what a stage must keep to hold.

    ttft_p95<2s,tpot_p95<300ms      95 percent of requests see TTFT below 2 s, 95 percent TPOT below 300 ms
    ttft<2s,e2e<10s@99              99 percent of requests keep both limits

A request *meets* an objective when it completed and keeps every limit. A stage *holds* it when the share
that meets it is at least `attainment`, 95 percent unless `@` says otherwise, and each percentile named keeps
its limit. A request that failed meets nothing and stands in every percentile as infinitely late.
A limit on a percentile below `attainment`, such as a median, binds that percentile and not each request.

Metrics are `ttft`, `tpot`, `e2e` and `icl`, the largest gap between two chunks of one choice; units `ms` and `s`.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.client.record import ClientReason, RequestRecord
from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import wilson
from serving.core.latency import RequestTimeline, e2e_latency_s, inter_chunk_latencies_s, tpot_s, ttft_s

DEFAULT_ATTAINMENT = 0.95
FAILED = "failed"
ROUNDING = 1e-9  # 0.95 of 20 requests is 19, not 19.000000000000004
METRICS = ("ttft", "tpot", "e2e", "icl")

_LIMIT = re.compile(
    r"(?P<metric>[a-z0-9]+?)(?:_p(?P<percentile>\d+(?:\.\d+)?))?<(?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s)"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A latency stays below `limit_s`: for a share of requests where a percentile is named, else for each.

    Attributes:
        text: as it was written.
        share: 0.95 for p95; None without a percentile.
    """

    text: str
    metric: str
    limit_s: float
    share: float | None

    def is_kept(self, timeline: RequestTimeline) -> bool:
        """Whether a completed request kept it. What it has not, such as a gap in a single chunk, is never late."""
        value_s = _latency_s(self.metric, timeline)
        return value_s is None or value_s < self.limit_s


@dataclass(frozen=True, slots=True)
class Slo:
    """An objective; `attainment` is a share, above 0 and at most 1."""

    text: str
    limits: tuple[Limit, ...]
    attainment: float

    def misses(self, record: RequestRecord) -> tuple[str, ...]:
        """The limits that a finished request broke, by their text; `failed` for one that did not complete.

        Of one that the tool gave up with its stage, those it had broken by then.
        """
        if record.reason == ClientReason.STAGE_HOPELESS:
            return self._missed_already(record)
        if not record.is_completed:
            return (FAILED,)
        return tuple(limit.text for limit in self.limits if not limit.is_kept(record.timeline))

    def _missed_already(self, record: RequestRecord) -> tuple[str, ...]:
        """Limits that a request had broken when the tool gave its stage up."""
        age_s = record.finished_at_s - record.scheduled_at_s
        timeline = record.timeline
        has_begun = timeline.first_token_at_s is not None
        values_s = {"e2e": age_s, "ttft": ttft_s(timeline) if has_begun else age_s}
        return tuple(each.text for each in self.limits if values_s.get(each.metric, 0.0) >= each.limit_s)

    def is_met_by(self, misses: Iterable[str]) -> bool:
        """Whether a request with these misses meets the objective."""
        return not any(miss == FAILED or miss in self.each_request for miss in misses)

    @property
    def each_request(self) -> frozenset[str]:
        """Texts of the limits that each request must keep."""
        return frozenset(
            limit.text for limit in self.limits if limit.share is None or limit.share >= self.attainment
        )

    def value_s(self, limit: Limit, record: RequestRecord, misses: Sequence[str]) -> float:
        """What a finished request adds to a limit's percentile: infinite where it failed or is known to be late."""
        if FAILED in misses or (not record.is_completed and limit.text in misses):
            return math.inf
        if not record.is_completed:
            return 0.0
        return _latency_s(limit.metric, record.timeline) or 0.0


@dataclass(frozen=True, slots=True)
class SloSummary:
    """How a stage kept its objective.

    Attributes:
        attainment: share of all requests, failures included, that met every limit.
        goodput_per_s: requests/s that met it.
        holds: whether the objective holds for the stage.
        misses: requests that broke each limit, by its text; `failed` for those that did not complete.
        binding: the limit broken most often; None when nothing was missed.
    """

    attainment: Estimate
    goodput_per_s: Estimate
    holds: bool
    misses: dict[str, int]
    binding: str | None


def parse_slo(text: str) -> Slo:
    """Read an objective.

    Raises:
        ValueError: it is not one; the text names the part and what is allowed.
    """
    limits_text, at, percent = text.replace(" ", "").partition("@")
    attainment = DEFAULT_ATTAINMENT
    if at:
        attainment = _share(percent, f"slo {text!r}: attainment")
    limits = tuple(_parse_limit(part, text) for part in limits_text.split(","))
    names = [limit.text for limit in limits]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"slo {text!r}: {doubled[0]!r} is there twice")
    return Slo(text, limits, attainment)


def evaluate(slo: Slo, records: Sequence[RequestRecord], requests_per_s: float) -> SloSummary:
    """How requests kept an objective. Those the user broke off say nothing and are left out.

    Intervals: Wilson, which takes the requests for independent of each other.

    Args:
        requests_per_s: how fast they were served, or in an open loop asked for.

    Raises:
        ValueError: there is no request to judge.
    """
    judged = decided(slo, records)
    if not judged:
        raise ValueError("an objective needs at least one finished request; there is none")
    outlook = Outlook(slo, len(judged))
    misses = [outlook.ended(record) for record in judged]
    num_met = sum(map(slo.is_met_by, misses))
    broken = Counter(miss for each in misses for miss in each)
    attainment = wilson(num_met, len(judged))
    low, high = attainment.low, attainment.high
    return SloSummary(
        attainment=attainment,
        # The share is uncertain; how many requests there were is not.
        goodput_per_s=Estimate(
            attainment.value * requests_per_s,
            None if low is None else low * requests_per_s,
            None if high is None else high * requests_per_s,
        ),
        holds=outlook.can_hold(),
        misses=dict(broken),
        binding=max(broken, key=lambda miss: broken[miss], default=None),
    )


def decided(slo: Slo, records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those of which it is known whether they met the objective.

    What the user broke off says nothing of the server. A request that was given up with its stage is decided
    once it has broken a limit; else nobody knows.
    """
    return [
        record
        for record in records
        if record.reason != ClientReason.INTERRUPTED
        and (record.reason != ClientReason.STAGE_HOPELESS or slo.misses(record))
    ]


class Outlook:
    """Whether an objective can hold, told of each request as it ends: all still to come may turn out well.

    Once all have ended it is the verdict. Percentiles are those of the tables: `serving.core.latency.percentile`.

    Args:
        planned: requests of the whole stage, >= 1.
    """

    def __init__(self, slo: Slo, planned: int) -> None:
        self._slo = slo
        self._planned = planned
        self._num_lost = 0
        self._tails = {
            limit.text: _Tail(planned, limit.share) for limit in slo.limits if limit.share is not None
        }

    @property
    def num_lost(self) -> int:
        """Requests that did not meet the objective."""
        return self._num_lost

    def ended(self, record: RequestRecord) -> tuple[str, ...]:
        """Take in a finished request; the limits it broke."""
        misses = self._slo.misses(record)
        self._num_lost += not self._slo.is_met_by(misses)
        for limit in self._slo.limits:
            if tail := self._tails.get(limit.text):
                tail.add(self._slo.value_s(limit, record, misses))
        return misses

    def can_hold(self, running_ages_s: Iterable[float] = ()) -> bool:
        """Whether it holds, or still can.

        Args:
            running_ages_s: time since its due instant of each unfinished request; counts against E2E limits only.
        """
        ages_s = list(running_ages_s)
        e2e = [limit for limit in self._slo.limits if limit.metric == "e2e"]
        each_s = min(
            (limit.limit_s for limit in e2e if limit.text in self._slo.each_request), default=math.inf
        )
        num_lost = self._num_lost + sum(age_s >= each_s for age_s in ages_s)
        if not _reaches(self._planned - num_lost, self._slo.attainment, self._planned):
            return False
        return all(
            self._tails[limit.text].percentile(ages_s if limit in e2e else ()) < limit.limit_s
            for limit in self._slo.limits
            if limit.share is not None
        )


class _Tail:
    """The largest of a sample that is still growing: enough of them for one of its percentiles.

    Args:
        total: size of the whole sample; what is missing of it counts as 0.
    """

    def __init__(self, total: int, share: float) -> None:
        rank = (total - 1) * share
        self._size = total - int(rank)
        self._part = rank - int(rank)
        self._largest: list[float] = []

    def add(self, value: float) -> None:
        if len(self._largest) < self._size:
            heapq.heappush(self._largest, value)
        else:
            heapq.heappushpop(self._largest, value)

    def percentile(self, more: Iterable[float] = ()) -> float:
        largest = heapq.nlargest(self._size, (*self._largest, *more))
        largest += [0.0] * (self._size - len(largest))
        low, high = largest[-1], largest[max(0, self._size - 2)]
        # The difference of two that are infinite is no number.
        return low if low == high or not self._part else low + (high - low) * self._part


def _reaches(count: int, share: float, total: int) -> bool:
    return count >= share * total - ROUNDING


def _parse_limit(part: str, text: str) -> Limit:
    match = _LIMIT.fullmatch(part)
    if match is None or match["metric"] not in METRICS:
        raise ValueError(
            f"slo {text!r}: {part!r} is no limit: one is {', '.join(METRICS)}, maybe with _p and a percentile, "
            "then < and a time in ms or s: ttft_p95<2s or tpot<300ms"
        )
    limit_s = float(match["value"]) * (0.001 if match["unit"] == "ms" else 1)
    if not (limit_s > 0 and math.isfinite(limit_s)):
        raise ValueError(f"slo {text!r}: the time in {part!r} must be above 0")
    percentile = match["percentile"]
    share = None if percentile is None else _share(percentile, f"slo {text!r}: percentile of {part!r}")
    return Limit(part, match["metric"], limit_s, share)


def _share(percent: str, what: str) -> float:
    try:
        value = float(percent)
    except ValueError:
        value = math.nan
    if not 0 < value <= 100:
        raise ValueError(f"{what} is {percent!r}, must be above 0 and at most 100 percent")
    return value / 100


def _latency_s(metric: str, timeline: RequestTimeline) -> float | None:
    match metric:
        case "ttft":
            return ttft_s(timeline) if timeline.chunk_at_s else None
        case "tpot":
            return tpot_s(timeline)
        case "e2e":
            return e2e_latency_s(timeline)
        case "icl":
            return max(inter_chunk_latencies_s(timeline), default=None)
    raise ValueError(f"metric {metric!r} is none of {', '.join(METRICS)}")
