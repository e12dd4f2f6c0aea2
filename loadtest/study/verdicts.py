"""What the study expects of adaptive decoding, whether the figures say so, and what binds where not. Pure."""

from __future__ import annotations

from loadtest.judge.estimate import Estimate
from loadtest.study.analysis import Study
from loadtest.study.schedule import LEVELS
from serving.simulation.verdicts import Verdict

MAX_REGRET = 0.05
MIN_GAIN = 1.15


def verdicts(study: Study, arm: str, where: str) -> list[Verdict]:
    """Regret at each load, and gain over the whole run.

    Args:
        where: hardware and objective, in words.
    """
    return [_regret(study, arm, where), _gain(study, arm, where)]


def _regret(study: Study, arm: str, where: str) -> Verdict:
    by_level = {level: study.regret(arm, level) for level in LEVELS}
    worst = max(by_level, key=lambda level: by_level[level].value)
    missed = [level for level in LEVELS if by_level[level].value > MAX_REGRET]
    best = study.best_fixed(worst)
    levels = ", ".join(f"{level:g}" for level in missed)
    return Verdict(
        f"{where}: {arm} loses at most {MAX_REGRET:.0%} of the best fixed arm's goodput at each load",
        not missed,
        f"most at {worst:g} of capacity, {in_percent(by_level[worst])} of {best}'s",
        f"More at {levels}. At {worst:g} {_what_binds(study, arm, worst, best)}",
    )


def _gain(study: Study, arm: str, where: str) -> Verdict:
    gain = study.gain(arm)
    most = max(study.arms, key=lambda name: study.gain(name).value)
    share = study.goodput_rps(study.best_fixed(), study.steps_of(None)).value
    share /= study.offered_rps(study.steps_of(None))
    return Verdict(
        f"{where}: {arm} has {MIN_GAIN:g} times the goodput of the best single fixed arm over the whole run",
        gain.value >= MIN_GAIN,
        f"{in_times(gain)}, against {study.best_fixed()}",
        f"{study.best_fixed()} has {share:.0%} of all requests already, which leaves {1 / share:.2f}x at most; "
        f"most has {most}, {in_times(study.gain(most))}"
        if share
        else "no fixed arm has any",
    )


def _what_binds(study: Study, arm: str, level: float, best: str) -> str:
    """What the arm's requests broke there, beside those of the best fixed arm."""
    steps = study.steps_of(level)
    own, others = study.misses(arm, steps), study.misses(best, steps)
    texts = sorted(own.keys() | others.keys(), key=lambda text: others.get(text, 0) - own.get(text, 0))
    broken = "; ".join(
        f"{text}: {own.get(text, 0):.0%} of its requests, {others.get(text, 0):.0%} of {best}'s"
        for text in texts
    )
    return f"what was broken: {broken or 'nothing'}"


def in_percent(estimate: Estimate) -> str:
    """A share with its interval."""
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.value:.1f}%"
    return f"{100 * estimate.value:.1f}% ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def in_times(estimate: Estimate) -> str:
    """A ratio with its interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}x"
    return f"{estimate.value:.3f}x ({estimate.low:.3f} to {estimate.high:.3f})"
