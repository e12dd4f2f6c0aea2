"""Expected acceptance of drafts, by lane, kind of text and tenant, learnt from requests that ended. No clock.

For each position of a draft the chance that its token is accepted where all before it were is a Beta estimate: the
estimate of the level above counts for `strength` drafts, and what was seen for as many as were seen. Levels are
the prior, the lane's kind of text, the tenant's requests of that kind. What was seen counts half after `half_life`
further drafts, and a third after `FADE_S` without news: a lane that nobody is sent to any more is thought well of
again, and tried.

In its kind a tenant counts for `strength` drafts at most, whatever it sends: what one does not accept must not
turn drafts off for all.
"""

from __future__ import annotations

import math
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
FADE_S = 900.0
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
    at_s: float = 0.0

    def keep(self, share: float) -> None:
        self.tried = [share * value for value in self.tried]
        self.accepted = [share * value for value in self.accepted]

    def fade(self, now_s: float) -> None:
        self.keep(faded(self.at_s, now_s))
        self.at_s = now_s

    def add(self, tried: Sequence[float], accepted: Sequence[float], times: float = 1.0) -> None:
        missing = [0.0] * (len(tried) - len(self.tried))
        self.tried += missing
        self.accepted += missing
        for position, (one, other) in enumerate(zip(tried, accepted, strict=True)):
            # What rounding leaves below 0 is none.
            self.tried[position] = max(0.0, self.tried[position] + times * one)
            self.accepted[position] = max(0.0, self.accepted[position] + times * other)

    def chances(self, above: Sequence[float], strength: float, now_s: float) -> list[float]:
        """Of each position, those of the level above drawn towards what was seen."""
        left = faded(self.at_s, now_s)
        chances = list(above)
        for position in range(min(len(chances), len(self.tried))):
            tried, accepted = left * self.tried[position], left * self.accepted[position]
            chances[position] = (strength * chances[position] + accepted) / (strength + tried)
        return chances

    @property
    def num_drafts(self) -> float:
        return self.tried[0] if self.tried else 0.0


@dataclass(slots=True)
class _Tenant:
    """What was seen of it, and how much of that is in its kind."""

    seen: _Seen = field(default_factory=_Seen)
    in_kind: float = 0.0


class AcceptanceEstimator:
    """Learns, and says what to expect.

    Args:
        priors: rates by lane and kind, such as a profile's; what is not in it is guessed by the kind.
        strength: drafts that the level above counts for, and a tenant in its kind at most; above 0.
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
        self._tenants: OrderedDict[tuple[str, TextKind, str], _Tenant] = OrderedDict()

    def learn(
        self, lane: str, kind: TextKind, tenant: str, outcome: DraftOutcome, now_s: float = 0.0
    ) -> None:
        """A request ended; one without drafts says nothing. Time is by any clock."""
        if not outcome.num_drafts:
            return
        key = (lane, kind, tenant)
        if key not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants.popitem(last=False)  # heard of longest ago
        of_kind = self._kinds.setdefault((lane, kind), _Seen(at_s=now_s))
        one = self._tenants.setdefault(key, _Tenant(_Seen(at_s=now_s)))
        self._tenants.move_to_end(key)
        of_kind.fade(now_s)
        one.seen.fade(now_s)
        of_kind.add(one.seen.tried, one.seen.accepted, -one.in_kind)
        one.seen.keep(0.5 ** (outcome.num_drafts / self._half_life))
        one.seen.add(outcome.tried, outcome.accepted)
        one.in_kind = min(1.0, self._strength / one.seen.num_drafts)
        of_kind.add(one.seen.tried, one.seen.accepted, one.in_kind)

    def expect(
        self, lane: str, kind: TextKind, tenant: str, num_drafts: int, now_s: float = 0.0
    ) -> Expectation:
        """What k drafts a step of such a request will give."""
        chances = _chances(self._prior(lane, kind, num_drafts))
        seen = 0.0
        one = self._tenants.get((lane, kind, tenant))
        for level in (self._kinds.get((lane, kind)), one.seen if one else None):
            if level is not None:
                chances = level.chances(chances, self._strength, now_s)
                seen = max(seen, level.num_drafts * faded(level.at_s, now_s))
        rates = []
        rate = 1.0
        for chance in chances:
            rate *= chance
            rates.append(rate)
        return Expectation(tuple(rates), seen)

    def _prior(self, lane: str, kind: TextKind, num_drafts: int) -> Rates:
        known = self._priors.get((lane, kind))
        return geometric_rates(GUESSES[kind], num_drafts) if known is None else extended(known, num_drafts)


def faded(at_s: float, now_s: float) -> float:
    """How much of what was learnt then still counts."""
    return math.exp(min(0.0, at_s - now_s) / FADE_S)


def _chances(rates: Rates) -> list[float]:
    """Of each position, given that all before it were accepted; 0 after one that never is."""
    chances = []
    before = 1.0
    for rate in rates:
        chances.append(rate / before if before else 0.0)
        before = rate
    return chances
