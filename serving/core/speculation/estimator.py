"""Expected acceptance of drafts, by lane, kind of text and tenant, learnt from requests that ended. No clock.

For each position of a draft the chance that its token is accepted where all before it were is a Beta estimate: the
estimate of the level above counts for `strength` drafts, and what was seen for as many as were seen. Levels are
the prior, the lane's kind of text, the tenant's requests of that kind. What was seen counts half after `half_life`
further drafts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serving.core.speculation.acceptance import (
    Rates,
    acceptance_of_length,
    extended,
    geometric_rates,
    tokens_per_step,
)
from serving.core.speculation.text_kind import TextKind

MAX_TENANTS = 10_000  # a client can invent names without end
# Of a lane of which nothing is known: the chance of each token after accepted ones. Guesses, soon outweighed.
GUESSES = {
    TextKind.COPY: 0.8,
    TextKind.CODE: 0.6,
    TextKind.REPETITIVE: 0.6,
    TextKind.GROUNDED: 0.5,
    TextKind.OPEN: 0.4,
}


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What became of the drafts of a request, by position, shape (k,).

    Attributes:
        tried: steps whose draft reached this position with all before it accepted.
        accepted: of those, steps in which it was accepted too.
    """

    tried: tuple[float, ...]
    accepted: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tried) != len(self.accepted):
            raise ValueError(f"{len(self.tried)} positions were tried and {len(self.accepted)} accepted")
        before = float("inf")
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            if not 0 <= accepted <= tried <= before:
                raise ValueError(f"{accepted:g} accepted of {tried:g} tried, of {before:g} that came so far")
            before = accepted

    @classmethod
    def of_positions(cls, num_drafts: float, accepted: Sequence[float]) -> DraftOutcome:
        """Of drafts of one length, such as vLLM's counter of accepted tokens by position."""
        return cls((num_drafts, *accepted[:-1]) if accepted else (), tuple(accepted))

    @classmethod
    def of_counts(cls, num_drafts: int, accepted_tokens: int, draft_length: int) -> DraftOutcome:
        """Of the sums alone: spread over the positions as if each token had the same chance."""
        if num_drafts == 0 or draft_length == 0:
            return cls((), ())
        acceptance = acceptance_of_length(1 + accepted_tokens / num_drafts, draft_length)
        rates = geometric_rates(acceptance, draft_length)
        return cls.of_positions(num_drafts, [num_drafts * rate for rate in rates])

    @property
    def num_drafts(self) -> float:
        return self.tried[0] if self.tried else 0.0

    @property
    def rates(self) -> Rates:
        """By position, of all drafts; none where there were no drafts."""
        return tuple(accepted / self.num_drafts for accepted in self.accepted) if self.num_drafts else ()


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected acceptance of a request's drafts.

    Attributes:
        rates: by position, unconditional.
        num_drafts: that were seen of requests like it, forgotten ones left out; 0: it is the prior.
    """

    rates: Rates
    num_drafts: float

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over drafted ones; 0 without drafts."""
        return sum(self.rates) / len(self.rates) if self.rates else 0.0

    @property
    def tokens_per_step(self) -> float:
        return tokens_per_step(self.rates)


@dataclass(slots=True)
class _Seen:
    """Sums that forget."""

    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def learn(self, outcome: DraftOutcome, half_life: float) -> None:
        kept = 0.5 ** (outcome.num_drafts / half_life)
        missing = [0.0] * (len(outcome.tried) - len(self.tried))
        self.tried = [kept * value for value in self.tried] + missing
        self.accepted = [kept * value for value in self.accepted] + missing
        for position, (tried, accepted) in enumerate(zip(outcome.tried, outcome.accepted, strict=True)):
            self.tried[position] += tried
            self.accepted[position] += accepted

    def chances(self, above: Sequence[float], strength: float) -> list[float]:
        """Of each position, those of the level above drawn towards what was seen."""
        chances = list(above)
        for position in range(min(len(chances), len(self.tried))):
            tried, accepted = self.tried[position], self.accepted[position]
            chances[position] = (strength * chances[position] + accepted) / (strength + tried)
        return chances

    @property
    def num_drafts(self) -> float:
        return self.tried[0] if self.tried else 0.0


class AcceptanceEstimator:
    """Learns, and says what to expect.

    Args:
        priors: rates by lane and kind, such as a profile's; what is not in it is guessed by the kind.
        strength: drafts that the level above counts for, above 0.
        half_life: drafts after which what was seen counts half, above 0.
    """

    def __init__(
        self,
        priors: Mapping[tuple[str, TextKind], Rates] | None = None,
        *,
        strength: float = 50.0,
        half_life: float = 5_000.0,
    ) -> None:
        for name, value in (("strength", strength), ("half_life", half_life)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value:g} must be above 0")
        self._priors = dict(priors or {})
        self._strength = strength
        self._half_life = half_life
        self._kinds: dict[tuple[str, TextKind], _Seen] = {}
        self._tenants: OrderedDict[tuple[str, TextKind, str], _Seen] = OrderedDict()

    def learn(self, lane: str, kind: TextKind, tenant: str, outcome: DraftOutcome) -> None:
        """A request ended; one without drafts says nothing."""
        if not outcome.num_drafts:
            return
        key = (lane, kind, tenant)
        if key not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants.popitem(last=False)  # heard of longest ago
        self._kinds.setdefault((lane, kind), _Seen()).learn(outcome, self._half_life)
        self._tenants.setdefault(key, _Seen()).learn(outcome, self._half_life)
        self._tenants.move_to_end(key)

    def expect(self, lane: str, kind: TextKind, tenant: str, num_drafts: int) -> Expectation:
        """What k drafts a step of such a request will give."""
        chances = _chances(self._prior(lane, kind, num_drafts))
        seen = 0.0
        for level in (self._kinds.get((lane, kind)), self._tenants.get((lane, kind, tenant))):
            if level is not None:
                chances = level.chances(chances, self._strength)
                seen = max(seen, level.num_drafts)
        rates = []
        rate = 1.0
        for chance in chances:
            rate *= chance
            rates.append(rate)
        return Expectation(tuple(rates), seen)

    def _prior(self, lane: str, kind: TextKind, num_drafts: int) -> Rates:
        known = self._priors.get((lane, kind))
        return geometric_rates(GUESSES[kind], num_drafts) if known is None else extended(known, num_drafts)


def _chances(rates: Rates) -> list[float]:
    """Of each position, given that all before it were accepted; 0 after one that never is."""
    chances = []
    before = 1.0
    for rate in rates:
        chances.append(rate / before if before else 0.0)
        before = rate
    return chances
