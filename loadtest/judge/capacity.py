"""The search for a lane's capacity: the highest rate at which it still holds the objective.

Bracket: from a first guess, double the rate while it holds, halve it while it does not. Bisect on a log scale
until the two ends are within the resolution. Then do it again around what was found, with other seeds.
Pure: it is told what each probe gave, and says what to probe next.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import geometric_mean_of_repeats

# A probe that came out invalid may have met a passing disturbance: it is made once more.
MAX_INVALID = 2
WIDEST_STEP = 2.0
DIGITS = 3  # of a rate, as its stage is named


@dataclass(frozen=True, slots=True)
class Probe:
    """One stage of a capacity search."""

    rate_per_s: float
    repeat: int
    attainment: float
    holds: bool
    is_valid: bool
    mean_in_flight: float
    binding: str | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate at which a lane still holds the objective.

    Attributes:
        rate_per_s: geometric mean of the repeats; None when no rate held. The interval reaches from the rates
            that held to those that did not, so it covers the search's resolution too.
        by_repeat: the highest rate that held in each finished repeat of the search, requests/s.
        is_lower_bound: it still held at the highest rate that could be tried.
        binding: the limit that broke above it.
        mean_in_flight: requests in flight at the highest rate that held.
    """

    lane: str
    workload: str
    rate_per_s: Estimate | None
    by_repeat: tuple[float, ...]
    is_lower_bound: bool
    binding: str | None
    mean_in_flight: float | None
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How to search.

    Attributes:
        first_rate_per_s: the first guess.
        resolution: how near the rate that holds and the one that does not must come, as a share of it.
        repeats: searches with seeds of their own; an interval needs two.
        max_probes: the most stages in all, for one lane and workload.
        max_s: seconds that they may take together; None for no limit.
        lowest_rate_per_s: no lower rate is tried.
    """

    first_rate_per_s: float
    resolution: float = 0.1
    repeats: int = 3
    max_probes: int = 24
    max_s: float | None = None
    lowest_rate_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.first_rate_per_s > 0 and math.isfinite(self.first_rate_per_s)):
            raise ValueError(f"first_rate_per_s={self.first_rate_per_s} must be above 0")
        if not 0.02 <= self.resolution <= 1:
            raise ValueError(f"resolution={self.resolution} must be in 0.02..1")
        for name, value in (("repeats", self.repeats), ("max_probes", self.max_probes)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.max_s is not None and not self.max_s > 0:
            raise ValueError(f"max_s={self.max_s} must be above 0")


@dataclass(slots=True)
class Bracket:
    """One repeat of the search.

    Attributes:
        low, high: the highest rate that held, the lowest above it that did not.
        ceiling: the lowest rate that the client could not offer; nothing is known at or above it.
    """

    start: float
    step: float
    resolution: float
    low: Probe | None = None
    high: Probe | None = None
    ceiling: float | None = None
    _num_invalid: int = field(default=0, init=False)
    _rate: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._rate = rounded(self.start)

    def next_rate(self) -> float | None:
        """The rate to probe; None when this repeat is done."""
        return None if self.is_done else self._rate

    @property
    def is_done(self) -> bool:
        if self.low is None:
            return False
        if self.ceiling is not None and self._rate >= self.ceiling:
            return True
        return self.high is not None and (
            self.high.rate_per_s <= self.low.rate_per_s * (1 + self.resolution) * (1 + 1e-9)
        )

    @property
    def invalid_in_a_row(self) -> int:
        """Invalid probes of the rate that is next."""
        return self._num_invalid

    def record(self, probe: Probe) -> None:
        if not probe.is_valid:
            self._num_invalid += 1
            if self._num_invalid < MAX_INVALID:
                return
            self.ceiling = probe.rate_per_s
        elif probe.holds:
            self.low = probe
        else:
            self.high = probe
        self._num_invalid = 0
        self._rate = rounded(self._choose(probe.rate_per_s))

    def _choose(self, rate: float) -> float:
        if self.low is not None and self.high is not None:
            # Where the middle could not be offered, it is at the ceiling and the repeat is done.
            return math.sqrt(self.low.rate_per_s * self.high.rate_per_s)
        step, self.step = self.step, min(WIDEST_STEP, self.step**2)
        return rate / step if self.low is None else rate * step


class CapacitySearch:
    """Ask `next_probe`, run it, `record` it, until there is none; then `result`."""

    def __init__(self, lane: str, workload: str, settings: SearchSettings) -> None:
        self._lane = lane
        self._workload = workload
        self._settings = settings
        self._probes: list[Probe] = []
        self._spent_s = 0.0
        self._longest_s = 0.0
        self._brackets = [Bracket(settings.first_rate_per_s, WIDEST_STEP, settings.resolution)]

    def next_probe(self) -> tuple[float, int] | None:
        """Rate in requests/s, and the number of the repeat, which gives the seed; None when done or spent."""
        settings, bracket = self._settings, self._brackets[-1]
        rate = bracket.next_rate()
        if rate is None or rate < settings.lowest_rate_per_s or len(self._probes) >= settings.max_probes:
            return None
        # The next probe will take about as long as the longest so far.
        if settings.max_s is not None and self._spent_s + self._longest_s > settings.max_s:
            return None
        # A rate that is probed again after an invalid probe needs another number, to be another stage.
        repeat = len(self._brackets) - 1 + settings.repeats * bracket.invalid_in_a_row
        return rate, repeat

    def record(self, probe: Probe, took_s: float = 0.0) -> None:
        """Take in what a probe gave.

        Raises:
            ValueError: it is not the one that was asked for.
        """
        if probe.rate_per_s != self._brackets[-1].next_rate():
            raise ValueError(
                f"probe of {probe.rate_per_s} requests/s: the search asks for {self._brackets[-1].next_rate()}"
            )
        self._probes.append(probe)
        self._spent_s += took_s
        self._longest_s = max(self._longest_s, took_s)
        bracket = self._brackets[-1]
        bracket.record(probe)
        if bracket.is_done and len(self._brackets) < self._settings.repeats:
            assert bracket.low is not None
            resolution = self._settings.resolution
            self._brackets.append(Bracket(bracket.low.rate_per_s, 1 + resolution, resolution))

    def result(self) -> Capacity:
        """What was found so far."""
        brackets = [bracket for bracket in self._brackets if bracket.is_done] or self._brackets[:1]
        lows = [bracket.low for bracket in brackets if bracket.low is not None]
        highs = [bracket.high for bracket in brackets if bracket.high is not None]
        is_lower_bound = bool(lows) and len(highs) < len(brackets)
        binding = Counter(probe.binding for probe in highs if probe.binding is not None)
        return Capacity(
            lane=self._lane,
            workload=self._workload,
            rate_per_s=_rate(lows, [] if is_lower_bound else highs),
            by_repeat=tuple(probe.rate_per_s for probe in lows),
            is_lower_bound=is_lower_bound,
            binding=binding.most_common(1)[0][0] if binding else None,
            mean_in_flight=fmean(probe.mean_in_flight for probe in lows) if lows else None,
            probes=tuple(self._probes),
        )


def _rate(lows: list[Probe], highs: list[Probe]) -> Estimate | None:
    lower = geometric_mean_of_repeats([probe.rate_per_s for probe in lows])
    upper = geometric_mean_of_repeats([probe.rate_per_s for probe in highs])
    if lower is None or upper is None or lower.low is None or upper.high is None:
        return lower
    # The boundary of each repeat lies between its two ends: the interval covers both.
    return Estimate(lower.value, lower.low, upper.high)


def rounded(rate: float) -> float:
    """A rate as a stage is named after it."""
    return float(f"{rate:.{DIGITS}g}")
