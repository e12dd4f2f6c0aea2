"""What drafts give: tokens of a step by how often each position of a draft is accepted.

*Rates* are unconditional and by position: the share of drafts whose first i tokens were all accepted, i = 1, 2, ...
They never rise. Engines count them; where only one number is known, `geometric_rates` makes them from it.
"""

from __future__ import annotations

from collections.abc import Sequence

Rates = tuple[float, ...]
BISECTIONS = 60  # of [0, 1], which leaves less than the last bit of a float


def checked_rates(rates: Sequence[float]) -> Rates:
    """The same rates, once they can be some.

    Raises:
        ValueError: one is outside of 0..1, or above the one before it.
    """
    before = 1.0
    for position, rate in enumerate(rates, start=1):
        if not 0 <= rate <= before:
            raise ValueError(
                f"acceptance at position {position} is {rate:g}, must be in 0..{before:g}: a draft token counts "
                "only where all before it were accepted"
            )
        before = rate
    return tuple(rates)


def geometric_rates(acceptance: float, num_drafts: int) -> Rates:
    """Rates where every token is accepted with the same chance, whatever came before: a, a^2, ..., a^k.

    Source: the assumption of Leviathan et al. (arXiv 2211.17192), section 3.1.
    """
    _check(acceptance, num_drafts)
    return tuple(acceptance**position for position in range(1, num_drafts + 1))


def extended(rates: Rates, num_drafts: int) -> Rates:
    """Rates of so many positions: cut, or carried on with the last step's chance; none known stay at 0."""
    if num_drafts <= len(rates):
        return rates[:num_drafts]
    if not rates:
        return (0.0,) * num_drafts
    before = rates[-2] if len(rates) > 1 else 1.0
    chance = rates[-1] / before if before else 0.0
    more = range(1, num_drafts - len(rates) + 1)
    return (*rates, *(rates[-1] * chance**position for position in more))


def tokens_per_step(rates: Sequence[float]) -> float:
    """Expected tokens of a step that verifies a draft, the model's own included: 1 + sum of the rates.

    Source: vLLM's mean acceptance length, 1 + accepted / drafts.
    """
    return 1 + sum(rates)


def tokens_variance(rates: Sequence[float]) -> float:
    """Variance of the tokens of one step; with A accepted, E[A^2] = sum of (2 i - 1) P(A >= i)."""
    mean = sum(rates)
    squares = sum((2 * position - 1) * rate for position, rate in enumerate(rates, start=1))
    # Of rates that are all 0 or 1 the difference may round below 0.
    return max(0.0, squares - mean * mean)


def geometric_tokens_per_step(acceptance: float, num_drafts: int) -> float:
    """`tokens_per_step` of `geometric_rates`: (1 - a^(k+1)) / (1 - a), and k + 1 where a is 1.

    Source: Leviathan et al. (arXiv 2211.17192), equation 1.
    """
    return tokens_per_step(geometric_rates(acceptance, num_drafts))


def acceptance_of_length(mean_length: float, num_drafts: int) -> float:
    """The acceptance that gives so many tokens a step with k drafts, by `geometric_tokens_per_step`.

    Raises:
        ValueError: no acceptance gives it: the length is outside of 1..k+1.
    """
    if not (num_drafts >= 1 and 1 <= mean_length <= num_drafts + 1):
        raise ValueError(
            f"mean_length={mean_length:g} is outside of 1..{num_drafts + 1}, of {num_drafts} drafts"
        )
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if geometric_tokens_per_step(middle, num_drafts) < mean_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def memory_bound_speed_up(acceptance: float, num_drafts: int, draft_cost: float) -> float:
    """Speed over plain decoding where a step takes as long however many tokens it verifies: E / (k c + 1).

    Args:
        draft_cost: time of one pass of the draft over one of the target, c.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.8.
    """
    return geometric_tokens_per_step(acceptance, num_drafts) / (num_drafts * draft_cost + 1)


def extra_operations(acceptance: float, num_drafts: int, draft_operations: float) -> float:
    """Arithmetic for each token over that of plain decoding: (k c + k + 1) / E.

    Args:
        draft_operations: operations of the draft for a token over those of the target.

    Source: Leviathan et al. (arXiv 2211.17192), theorem 3.11.
    """
    computed = num_drafts * draft_operations + num_drafts + 1
    return computed / geometric_tokens_per_step(acceptance, num_drafts)


def _check(acceptance: float, num_drafts: int) -> None:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance:g} is outside of 0..1")
    if num_drafts < 0:
        raise ValueError(f"num_drafts={num_drafts} must be at least 0")
