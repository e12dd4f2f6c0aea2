"""Fits step times to measured steps: by relative error, robust against steps that something else held up.

Coefficients are times, so none may be negative: every choice of those above 0 is tried.

The form is that of the steps which nothing held up; its level is that of the mean step, held-up ones included, for
tokens/s and TPOT go by the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import (
    DraftCost,
    LinearStepTime,
    PromptCost,
    RooflineStepTime,
    StepTime,
)

Floats = npt.NDArray[np.float64]
Form = TypeVar("Form")

MIN_POINTS = 4
HUBER_SCALES = 1.345  # of the residuals' scale; 95 percent efficient on normal errors (Huber)
MAD_TO_SIGMA = 1.4826
MIN_SCALE = 0.002  # of a step: clocks and noise are no finer, and points without any noise have no scale
REWEIGHTINGS = 30
LEAST_SHARE = 0.25  # of the time that a step roughly takes: errors of shorter ones are relative to that
NUM_KNEES = 200
OUTLIER_WEIGHT = 0.5  # a step that counts for less is one
LONGEST_HOLD_UP = 3.0  # of a step's time: one that took longer counts as one that took so long
LEAST_REAL = 1 / 3  # of it: one that seems to have taken less is an error of the record


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured step, or the median of several alike.

    Attributes:
        tokens: positions computed: prompts, one for each sequence that decodes, drafts to verify.
        kv_tokens: positions in the KV cache of all its sequences.
        seconds: how long it took.
        num_drafts: tokens drafted for each of `drafted_sequences`; 0 without speculation.
        prompt_tokens: of `tokens`, those of prompts.
    """

    tokens: float
    kv_tokens: float
    seconds: float
    num_drafts: int = 0
    drafted_sequences: float = 0.0
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        most = float("inf")
        if not (0 < self.tokens < most and 0 <= self.kv_tokens < most and 0 < self.seconds < most):
            raise ValueError(
                f"a step of {self.tokens:g} tokens and {self.kv_tokens:g} in the KV cache that took "
                f"{self.seconds:g} s is none"
            )


@dataclass(frozen=True, slots=True)
class Residuals:
    """How far a fit is from its points; shares are of the measured time.

    Attributes:
        median_share, p95_share, max_share: of the differences without their sign.
        num_outliers: points that were weighed down.
        noise: standard deviation of the measured over the fitted time, as a share of its mean; what was held up
            counts as for the level.
    """

    num_points: int
    median_share: float
    p95_share: float
    max_share: float
    num_outliers: int
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit(Generic[Form]):
    """A form with its coefficients, and how well it fits."""

    form: Form
    residuals: Residuals


def fit_linear(points: Sequence[StepPoint]) -> Fit[LinearStepTime]:
    """t = a + b * tokens + c * kv_tokens, and d more where there are prompts, of the points without drafts.

    Raises:
        ValueError: they are too few or too much alike to tell the coefficients apart.
    """
    return fit_plain(points)[0]


def fit_plain(points: Sequence[StepPoint]) -> tuple[Fit[LinearStepTime], PromptCost]:
    """`fit_linear`, and what prompts cost: d beside who decodes, and what their steps take longer when alone.

    Raises:
        ValueError: as `fit_linear`.
    """
    tokens, kv_tokens, seconds = _plain(points)
    plain = [point for point in points if not point.num_drafts]
    is_alone = np.array([_is_alone(point) for point in plain])
    has_prompt = np.array([float(point.prompt_tokens > 0) for point in plain]) * ~is_alone
    columns = [np.ones_like(tokens), tokens]
    if kv_tokens.any():
        columns.append(kv_tokens)
    _check_told_apart(columns)
    has_both = bool(0 < has_prompt.sum() < len(has_prompt))
    if has_both:
        columns.append(has_prompt)
    stacked = np.column_stack(columns)
    times, weights = _robust(stacked, seconds)
    level = _level((stacked @ times)[~is_alone], seconds[~is_alone])
    times = [level * time for time in times]
    mixed_s = times.pop() if has_both else 0.0
    form = LinearStepTime(*times, *([0.0] * (3 - len(times))))
    predicted = np.array(
        [form.step_s(*pair) for pair in zip(tokens.tolist(), kv_tokens.tolist(), strict=True)]
    )
    predicted += mixed_s * has_prompt
    alone_s = max(0.0, float(np.median((seconds - predicted)[is_alone]))) if is_alone.any() else 0.0
    residuals = _shares(predicted + alone_s * is_alone, seconds, weights)
    return Fit(form, residuals), PromptCost(mixed_s, 0.0, alone_s)


def fit_prompt_cost(points: Sequence[StepPoint], plain: CostModel) -> PromptCost:
    """What prompts cost a lane that drafts, of its steps without a draft; no less than the lane without drafts.

    Args:
        plain: of that lane.
    """
    prompts = [point for point in points if point.prompt_tokens and not point.num_drafts]
    if len(prompts) < MIN_POINTS:
        return plain.prompt_cost
    prompt_tokens = np.array([float(point.prompt_tokens) for point in prompts])
    seconds = np.array([point.seconds for point in prompts])
    known_s = np.array(
        [
            plain.step_time.step_s(point.tokens, point.kv_tokens)
            + plain.prompt_cost.prompt_s(point.prompt_tokens, are_alone=_is_alone(point))
            for point in prompts
        ]
    )
    columns = np.column_stack([np.ones_like(prompt_tokens), prompt_tokens])
    times, _ = _robust(columns, seconds, known_s)
    scale = _level_of_added(columns @ times, seconds, known_s)
    cost = plain.prompt_cost
    return PromptCost(cost.step_s + scale * times[0], cost.token_s + scale * times[1], cost.alone_s)


def fit_roofline(points: Sequence[StepPoint]) -> Fit[RooflineStepTime]:
    """t = c * kv_tokens + max(read, b * tokens), of the points without drafts.

    The knee is searched: for one at n tokens, the form is linear in max(n, tokens). Where all steps are on one side
    of it, it comes out at the edge of what was measured.

    Raises:
        ValueError: as `fit_linear`.
    """
    tokens, kv_tokens, seconds = _plain(points)
    _check_told_apart([np.ones_like(tokens), tokens, *([kv_tokens] if kv_tokens.any() else [])])
    best: tuple[float, Fit[RooflineStepTime]] | None = None
    for knee in np.geomspace(tokens.min(), tokens.max(), NUM_KNEES):
        columns = [np.maximum(tokens, knee)]
        if kv_tokens.any():
            columns.append(kv_tokens)
        times, weights = _robust(np.column_stack(columns), seconds)
        form = RooflineStepTime(times[0] * float(knee), times[0], times[1] if len(times) > 1 else 0.0)
        predicted = form.kv_token_s * kv_tokens + np.maximum(form.read_s, form.token_s * tokens)
        # By absolute differences: squares would let the outliers choose the knee.
        loss = float(np.mean(np.abs(predicted / seconds - 1)))
        if best is None or loss < best[0]:
            best = loss, Fit(form, _residuals(form, tokens, kv_tokens, seconds, weights))
    assert best is not None, "NUM_KNEES > 0"
    return best[1]


def fit_draft_cost(points: Sequence[StepPoint], step_time: StepTime) -> Fit[DraftCost]:
    """What drafts add to a step of the fitted time, of the points with drafts.

    With one number of drafts only, what each step and what each pass costs cannot be told apart: all of it is taken
    for passes.

    Raises:
        ValueError: there are no such points.
    """
    drafted = [point for point in points if point.num_drafts and point.drafted_sequences]
    if not drafted:
        raise ValueError("no step with drafts was measured, so what drafts cost is not known")
    passes = np.array([float(point.num_drafts) for point in drafted])
    sequences = np.array([point.drafted_sequences for point in drafted])
    seconds = np.array([point.seconds for point in drafted])
    verify_s = np.array([step_time.step_s(point.tokens, point.kv_tokens) for point in drafted])
    named = {"pass_s": passes}
    if np.unique(passes).size > 1:
        named["step_s"] = np.ones_like(passes)
    if np.unique(sequences).size > 1:
        named["pass_sequence_s"] = passes * sequences
    columns = np.column_stack(list(named.values()))
    times, weights = _robust(columns, seconds, verify_s)
    scale = _level_of_added(columns @ times, seconds, verify_s)
    found = {name: scale * time for name, time in zip(named, times, strict=True)}
    form = DraftCost(found.get("step_s", 0.0), found["pass_s"], found.get("pass_sequence_s", 0.0))
    added_s = np.array([form.draft_s(point.num_drafts, point.drafted_sequences) for point in drafted])
    return Fit(form, _shares(verify_s + added_s, seconds, weights))


def _is_alone(point: StepPoint) -> bool:
    """Whether it is of prompts, and nobody had anything in the KV cache."""
    return bool(point.prompt_tokens) and not point.kv_tokens


def _level(predicted_s: Floats, seconds: Floats) -> float:
    """How much longer the mean step takes than is predicted of it."""
    ratios = _ratios(predicted_s, seconds)
    return float(ratios.mean()) if ratios.size else 1.0


def _ratios(predicted_s: Floats, seconds: Floats) -> Floats:
    """Measured over predicted times, without errors of the record; none is longer than what was held up counts."""
    ratios = seconds / predicted_s
    return np.minimum(ratios[ratios >= LEAST_REAL], LONGEST_HOLD_UP)


def _level_of_added(added_s: Floats, seconds: Floats, known_s: Floats) -> float:
    """By what the added part has to be multiplied for the whole to be right on the mean; 0 at least."""
    whole_s = known_s + added_s
    share = float((added_s / whole_s).mean())
    if not share:
        return 1.0
    lacks = _level(whole_s, seconds) - 1
    return max(0.0, 1 + lacks / share)


def _plain(points: Sequence[StepPoint]) -> tuple[Floats, Floats, Floats]:
    plain = [point for point in points if not point.num_drafts]
    if len(plain) < MIN_POINTS:
        raise ValueError(
            f"{len(plain)} steps without drafts were measured; a fit needs {MIN_POINTS} at least"
        )
    tokens = np.array([float(point.tokens) for point in plain])
    kv_tokens = np.array([float(point.kv_tokens) for point in plain])
    return tokens, kv_tokens, np.array([point.seconds for point in plain])


def _check_told_apart(columns: Sequence[Floats]) -> None:
    scaled = np.column_stack([column / column.max() for column in columns])
    if np.linalg.matrix_rank(scaled, tol=1e-6) < len(columns):
        raise ValueError(
            "the steps are too much alike to tell what a step, a token and a token in the KV cache cost: measure "
            "at several batch sizes, and each at several lengths of context"
        )


def _robust(columns: Floats, seconds: Floats, known_s: Floats | float = 0.0) -> tuple[list[float], Floats]:
    """Times of at least 0 that make `known_s + columns @ times` come close to `seconds`, and each row's weight.

    Iteratively reweighted least squares of the relative errors, with Huber's weights.
    """
    scales = columns.max(axis=0)
    plain = columns / scales
    # A step that seems to take no time would outweigh all others by its relative error, however little it weighs.
    roughly_s = known_s + plain @ _non_negative(plain, seconds - known_s)
    unit_s = np.maximum(seconds, LEAST_SHARE * roughly_s)
    scaled = plain / unit_s[:, None]
    wanted = (seconds - known_s) / unit_s
    weights = np.ones_like(seconds)
    times = _non_negative(scaled, wanted)
    for _ in range(REWEIGHTINGS):
        errors = scaled @ times - wanted
        scale = max(MIN_SCALE, MAD_TO_SIGMA * float(np.median(np.abs(errors))))
        weights = np.minimum(1.0, HUBER_SCALES * scale / np.maximum(np.abs(errors), 1e-12))
        root = np.sqrt(weights)
        before, times = times, _non_negative(scaled * root[:, None], wanted * root)
        if np.allclose(times, before, rtol=1e-6, atol=0):
            break
    return [float(time) for time in times / scales], weights


def _non_negative(columns: Floats, wanted: Floats) -> Floats:
    """Least squares with no coefficient below 0: the best of all choices of columns that come out so."""
    num_columns = columns.shape[1]
    best = np.zeros(num_columns)
    least = float(wanted @ wanted)
    for size in range(1, num_columns + 1):
        for chosen in map(list, combinations(range(num_columns), size)):
            solved = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)[0]
            loss = float(np.sum((columns[:, chosen] @ solved - wanted) ** 2))
            if (solved >= 0).all() and loss < least:
                least, best = loss, np.zeros(num_columns)
                best[chosen] = solved
    return best


def _residuals(
    form: StepTime, tokens: Floats, kv_tokens: Floats, seconds: Floats, weights: Floats
) -> Residuals:
    pairs = zip(tokens.tolist(), kv_tokens.tolist(), strict=True)
    return _shares(np.array([form.step_s(*pair) for pair in pairs]), seconds, weights)


def _shares(predicted: Floats, seconds: Floats, weights: Floats) -> Residuals:
    shares = np.abs(predicted / seconds - 1)
    median, p95 = np.percentile(shares, (50, 95))
    ratios = _ratios(predicted, seconds)
    return Residuals(
        len(seconds),
        float(median),
        float(p95),
        float(shares.max()),
        int(np.count_nonzero(weights < OUTLIER_WEIGHT)),
        float(ratios.std() / ratios.mean()) if ratios.size else 0.0,
    )
