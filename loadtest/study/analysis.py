"""What each arm gave at each load, and what an adaptive one lost or gained against the fixed ones. Pure.

*Goodput* is requests/s, of those due in a step, that met the objective. *Regret* is the share of the best fixed
arm's goodput that an adaptive arm did not give; below 0 it gave more. The best fixed arm is chosen anew at each
load for the regret by load, and once for the whole run.

Intervals: 95 percent, by drawing repeats of each part with replacement, the same for all arms, for the arms of a
part's repeat share their arrivals. A part is what ran in one piece: its steps share queue and machine. The best
fixed arm is chosen within each draw, so the choice is part of what is uncertain. Of few repeats they are too
narrow; of one there is none.

Source: the percentile bootstrap, Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import CONFIDENCE, RESAMPLES
from loadtest.judge.slo import Slo, parse_slo
from loadtest.simulate.verdict import Mask, broken_limits, met_by
from loadtest.study.schedule import KINDS, rise_and_fall, step_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = TypeVar("Key")

WHOLE = ((0, len(rise_and_fall())),)  # all steps in one piece


@dataclass(frozen=True, slots=True)
class Answers:
    """What became of some requests of one arm; shape (requests,) each.

    Attributes:
        due_s: since the first of the steps that they are of.
        kind: index of the kind of text.
        ttft_s, tpot_s, e2e_s: infinite for a request that was refused or failed.
        lane: index in `lanes`; -1 where none served it.
        lanes: names.
    """

    due_s: Floats
    kind: Ints
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    lane: Ints
    lanes: tuple[str, ...]

    def of(self, which: Mask) -> Answers:
        """Those of the mask."""
        return Answers(
            self.due_s[which],
            self.kind[which],
            self.ttft_s[which],
            self.tpot_s[which],
            self.e2e_s[which],
            self.lane[which],
            self.lanes,
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count.

    Attributes:
        of_kinds: by kind of text, in the order of `KINDS`.
    """

    name: str
    of_kinds: tuple[Slo, ...]

    @property
    def text(self) -> str:
        """In words; by kind where kinds differ."""
        texts = [slo.text for slo in self.of_kinds]
        if len(set(texts)) == 1:
            return texts[0]
        return "; ".join(f"{kind} {text}" for kind, text in zip(KINDS, texts, strict=True))


def objectives(ttft_limit_s: float, relaxed_tpot_s: float, fast_tpot_s: float) -> tuple[Objective, ...]:
    """Those of the study: a relaxed one, a fast one, and fast copies beside relaxed stories."""

    def slo(tpot_s: float) -> Slo:
        return parse_slo(f"ttft<{ttft_limit_s:g}s,tpot<{1000 * tpot_s:.4g}ms")

    relaxed, fast = slo(relaxed_tpot_s), slo(fast_tpot_s)
    return (
        Objective("relaxed", (relaxed, relaxed)),
        Objective("fast", (fast, fast)),
        Objective("by kind", (fast, relaxed)),
    )


@dataclass(frozen=True, slots=True)
class StepTally:
    """One step of one arm's repeat.

    Attributes:
        offered, met: requests.
        misses: by the limit that was broken, `failed` for those that were refused; one may break several.
        tpots_s: of served requests.
        lanes: requests by kind of text and lane.
    """

    offered: int
    met: int
    misses: Counter[str] = field(default_factory=Counter)
    tpots_s: tuple[float, ...] = ()
    lanes: Counter[tuple[int, str]] = field(default_factory=Counter)


def by_step(answers: Answers, step_s: float, num_steps: int) -> tuple[Answers, ...]:
    """Those due in each of so many steps, in their order; who came later is in none."""
    step = step_of(answers.due_s, step_s)
    return tuple(answers.of(step == number) for number in range(num_steps))


def tally(answers: Answers, objective: Objective) -> StepTally:
    """What is counted of one step of one arm's repeat."""
    met = np.zeros(len(answers.due_s), dtype=np.bool_)
    broken: dict[str, Mask] = {}
    for kind, slo in enumerate(objective.of_kinds):
        own = answers.kind == kind
        found = broken_limits(slo, answers)
        met |= own & met_by(slo, found, len(own))
        for text, mask in found.items():
            broken[text] = broken.get(text, np.zeros_like(met)) | (own & mask)
    served = answers.lane >= 0
    pairs = zip(answers.kind[served].tolist(), answers.lane[served].tolist(), strict=True)
    return StepTally(
        len(met),
        int(met.sum()),
        Counter({text: int(mask.sum()) for text, mask in broken.items() if mask.any()}),
        tuple(answers.tpot_s[np.isfinite(answers.tpot_s)].tolist()),
        Counter((kind, answers.lanes[lane]) for kind, lane in pairs),
    )


@dataclass(frozen=True, slots=True)
class Study:
    """All that was counted.

    Attributes:
        arms: by name, the steps of each repeat; as many repeats of each arm.
        fixed: names of the arms that decode the same way whatever comes.
        step_s: how long each step was offered.
        parts: steps that ran in one piece, first and end of each.
    """

    arms: Mapping[str, Sequence[Sequence[StepTally]]]
    fixed: tuple[str, ...]
    step_s: float
    parts: tuple[tuple[int, int], ...] = WHOLE

    def __post_init__(self) -> None:
        repeats = {name: len(runs) for name, runs in self.arms.items()}
        if not self.num_repeats or len(set(repeats.values())) > 1:
            raise ValueError(f"arms need equally many repeats, one at least; there are {repeats}")
        if unknown := set(self.fixed) - self.arms.keys():
            raise ValueError(f"fixed arms {sorted(unknown)} are none of {', '.join(self.arms)}")
        if not self.fixed:
            raise ValueError("regret is against fixed arms, of which there is none")

    @property
    def num_repeats(self) -> int:
        return len(next(iter(self.arms.values()), ()))

    @property
    def adaptive(self) -> tuple[str, ...]:
        return tuple(name for name in self.arms if name not in self.fixed)

    def steps_of(self, level: float | None) -> tuple[int, ...]:
        """Numbers of the steps at that load; all without one."""
        return tuple(
            number for number, offered in enumerate(rise_and_fall()) if level is None or offered == level
        )

    def offered_rps(self, steps: Sequence[int]) -> float:
        """Requests/s that were due in these steps, on the mean of all arms."""
        total = sum(run[step].offered for runs in self.arms.values() for run in runs for step in steps)
        return total / (len(self.arms) * self.num_repeats * len(steps) * self.step_s)

    def goodput_rps(self, arm: str, steps: Sequence[int]) -> Estimate:
        """Requests/s that met the objective."""
        value, draws = self._goodput(arm, steps)
        return self._estimate(value, draws)

    def regret(self, arm: str, level: float) -> Estimate:
        """Share of the best fixed arm's goodput at this load that the arm did not give."""
        ratio = self._over_best_fixed(arm, self.steps_of(level))
        return Estimate(
            1 - ratio.value,
            None if ratio.high is None else 1 - ratio.high,
            None if ratio.low is None else 1 - ratio.low,
        )

    def gain(self, arm: str) -> Estimate:
        """Goodput of the whole run over that of the best single fixed arm."""
        return self._over_best_fixed(arm, self.steps_of(None))

    def best_fixed(self, level: float | None = None) -> str:
        """The fixed arm with the most goodput at this load, or over the whole run; of equals the first."""
        steps = self.steps_of(level)
        return max(self.fixed, key=lambda arm: self._goodput(arm, steps)[0])

    def misses(self, arm: str, steps: Sequence[int]) -> dict[str, float]:
        """Shares of the offered requests that broke each limit, the largest first."""
        offered = sum(run[step].offered for run in self.arms[arm] for step in steps)
        counts = _sum(run[step].misses for run in self.arms[arm] for step in steps)
        return {text: count / offered for text, count in counts.most_common()} if offered else {}

    def tpot_p50_s(self, arm: str, steps: Sequence[int]) -> float | None:
        """Median of the served requests; None where none was."""
        values = [value for run in self.arms[arm] for step in steps for value in run[step].tpots_s]
        return float(np.median(values)) if values else None

    def lane_shares(self, arm: str, steps: Sequence[int]) -> dict[int, dict[str, float]]:
        """By kind of text, the shares of its served requests that each lane served."""
        counts = _sum(run[step].lanes for run in self.arms[arm] for step in steps)
        shares: dict[int, dict[str, float]] = {}
        for kind in sorted({kind for kind, _ in counts}):
            own = {lane: count for (of, lane), count in sorted(counts.items()) if of == kind}
            total = sum(own.values())
            shares[kind] = {lane: count / total for lane, count in own.items()}
        return shares

    def _over_best_fixed(self, arm: str, steps: Sequence[int]) -> Estimate:
        value, draws = self._goodput(arm, steps)
        fixed = [self._goodput(name, steps) for name in self.fixed]
        best = max(own for own, _ in fixed)
        best_draws = np.max([drawn for _, drawn in fixed], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Where nothing fixed met it, whatever is met is infinitely better; nothing at all is as good.
            ratios = np.where(best_draws > 0, draws / best_draws, np.where(draws > 0, np.inf, 1.0))
        if best > 0:
            return self._estimate(value / best, ratios)
        return self._estimate(float("inf") if value > 0 else 1.0, ratios)

    def _goodput(self, arm: str, steps: Sequence[int]) -> tuple[float, Floats]:
        """Requests/s, and of each draw of repeats; shape (RESAMPLES,)."""
        seconds = len(steps) * self.step_s
        total, totals = 0.0, np.zeros(RESAMPLES)
        for part, (first, end) in enumerate(self.parts):
            own = [step for step in steps if first <= step < end]
            met = np.array([sum(run[step].met for step in own) for run in self.arms[arm]], dtype=np.float64)
            # The same draws for every arm and load: arms are compared within a repeat of a part.
            drawn = np.random.default_rng(part).integers(self.num_repeats, size=(RESAMPLES, self.num_repeats))
            total += float(met.mean())
            totals += met[drawn].mean(axis=1)
        return total / seconds, totals / seconds

    def _estimate(self, value: float, draws: Floats) -> Estimate:
        if self.num_repeats < 2:
            return Estimate(value)
        tail = (1 - CONFIDENCE) / 2
        # Without interpolation: draws may be infinite.
        low, high = np.quantile(draws, (tail, 1 - tail), method="inverted_cdf")
        return Estimate(value, float(low), float(high))


def together(studies: Sequence[Study]) -> Study:
    """The repeats of several runs as those of one; there is one at least.

    Raises:
        ValueError: they have other arms, or steps of another length.
    """
    first = studies[0]
    for other in studies[1:]:
        if (
            other.arms.keys() != first.arms.keys()
            or other.step_s != first.step_s
            or other.parts != first.parts
        ):
            raise ValueError(
                f"runs of {', '.join(first.arms)} with steps of {first.step_s:g} s, and of "
                f"{', '.join(other.arms)} with {other.step_s:g} s, are not of one study"
            )
    arms = {arm: [run for study in studies for run in study.arms[arm]] for arm in first.arms}
    return Study(arms, first.fixed, first.step_s, first.parts)


def _sum(counters: Iterable[Counter[Key]]) -> Counter[Key]:
    total: Counter[Key] = Counter()
    for counter in counters:
        total.update(counter)
    return total
