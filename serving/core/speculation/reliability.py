"""Whether predicted acceptance comes true: predicted against observed, in bins of the prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Requests whose predicted acceptance rate was in low..high.

    Attributes:
        predicted, observed: means over the draft tokens, 0 to 1.
    """

    low: float
    high: float
    predicted: float
    observed: float
    draft_tokens: int
    num_requests: int


class Reliability:
    """Sums by bin; `num_bins` of equal width, >= 1."""

    def __init__(self, num_bins: int = 10) -> None:
        if num_bins < 1:
            raise ValueError(f"num_bins={num_bins} must be at least 1")
        self._predicted = [0.0] * num_bins
        self._accepted = [0] * num_bins
        self._drafted = [0] * num_bins
        self._requests = [0] * num_bins

    def add(self, predicted: float, accepted_tokens: int, draft_tokens: int) -> None:
        """A request ended whose acceptance rate was predicted when it came.

        Raises:
            ValueError: a share or a count is impossible.
        """
        if not (0 <= predicted <= 1 and 0 <= accepted_tokens <= draft_tokens):
            raise ValueError(
                f"predicted={predicted:g} must be in 0..1, accepted_tokens={accepted_tokens} in "
                f"0..draft_tokens={draft_tokens}"
            )
        place = min(int(predicted * len(self._drafted)), len(self._drafted) - 1)
        self._predicted[place] += predicted * draft_tokens
        self._accepted[place] += accepted_tokens
        self._drafted[place] += draft_tokens
        self._requests[place] += 1

    def bins(self) -> tuple[ReliabilityBin, ...]:
        """Those that hold draft tokens, the lowest prediction first."""
        count = len(self._drafted)
        return tuple(
            ReliabilityBin(
                place / count,
                (place + 1) / count,
                self._predicted[place] / self._drafted[place],
                self._accepted[place] / self._drafted[place],
                self._drafted[place],
                self._requests[place],
            )
            for place in range(count)
            if self._drafted[place]
        )

    def error(self) -> float | None:
        """Mean distance of predicted and observed over all draft tokens; None without any.

        Source: expected calibration error (Naeini et al., AAAI 2015), of draft tokens.
        """
        total = sum(self._drafted)
        if not total:
            return None
        return sum(each.draft_tokens * abs(each.predicted - each.observed) for each in self.bins()) / total
