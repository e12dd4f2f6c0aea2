"""What was measured of an engine, bare and through the gateway, and what that says of the targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving.benchmarks.spread import Spread, differences, quotients, spread
from serving.benchmarks.text_table import NONE, text_table
from serving.benchmarks.verdict import Verdict, judged

BARE, OURS = "bare", "gateway"
LEAST_TOKENS_RATIO = 0.97
MOST_ADDED_MS = 5.0
MOST_TPOT_RATIO = 1.01


@dataclass(frozen=True, slots=True)
class Sample:
    """One side at one level in one repeat.

    Attributes:
        side: `bare` or `gateway`.
        answers: that ended within the window.
        failures: requests that failed or came incomplete, by kind, warm-up included.
    """

    side: str
    users: int
    repeat: int
    tokens_per_s: float
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    answers: int
    failures: Mapping[str, int]


@dataclass(frozen=True)
class Measured:
    """All that a run measured."""

    samples: Sequence[Sample]

    def of(self, side: str, users: int, figure: Callable[[Sample], float | None]) -> list[float | None]:
        """A figure of each repeat, in order."""
        own = [one for one in self.samples if (one.side, one.users) == (side, users)]
        return [figure(one) for one in sorted(own, key=lambda one: one.repeat)]

    def _pairs(
        self, users: int, figure: Callable[[Sample], float | None]
    ) -> tuple[list[float | None], list[float | None]]:
        return self.of(OURS, users, figure), self.of(BARE, users, figure)

    def tokens_ratio(self, users: int) -> Spread | None:
        """Tokens per second through the gateway / bare, repeat by repeat."""
        return spread(quotients(*self._pairs(users, _tokens_per_s)))

    def added_ms(self, users: int) -> Spread | None:
        """TTFT p50 through the gateway - bare, repeat by repeat."""
        return spread(differences(*self._pairs(users, _ttft)))

    def tpot_ratio(self, users: int) -> Spread | None:
        """TPOT p50 through the gateway / bare, repeat by repeat."""
        return spread(quotients(*self._pairs(users, _tpot)))

    def num_failures(self, users: int) -> int:
        """Of both sides, in all repeats."""
        return sum(sum(one.failures.values()) for one in self.samples if one.users == users)


def _tokens_per_s(sample: Sample) -> float | None:
    return sample.tokens_per_s


def _ttft(sample: Sample) -> float | None:
    return sample.ttft_p50_ms


def _tpot(sample: Sample) -> float | None:
    return sample.tpot_p50_ms


def judge(measured: Measured, levels: Sequence[int]) -> list[Verdict]:
    """The targets at each level; none is met where a request failed."""
    found = []
    for users in levels:
        subject = f"{users} users" if users > 1 else "1 user"
        failures = measured.num_failures(users)
        for verdict in (
            judged(
                subject,
                f"tokens/s at least {LEAST_TOKENS_RATIO:g} times the bare engine's",
                measured.tokens_ratio(users),
                at_least=LEAST_TOKENS_RATIO,
            ),
            judged(
                subject,
                f"TTFT p50 at most {MOST_ADDED_MS:g} ms above the bare engine's",
                measured.added_ms(users),
                at_most=MOST_ADDED_MS,
            ),
            judged(
                subject,
                f"TPOT p50 at most {MOST_TPOT_RATIO:g} times the bare engine's",
                measured.tpot_ratio(users),
                at_most=MOST_TPOT_RATIO,
            ),
        ):
            found.append(
                Verdict(subject, verdict.target, False, verdict.figure, f"{failures} requests failed")
                if failures
                else verdict
            )
    return found


def sides_table(measured: Measured, levels: Sequence[int]) -> str:
    """Each side at each level: median over the repeats, and the range of it."""
    rows = []
    for users in levels:
        for side in (BARE, OURS):
            cells = [
                _text(spread(measured.of(side, users, figure)), form)
                for figure, form in ((_tokens_per_s, ",.1f"), (_ttft, ",.1f"), (_tpot, ",.2f"))
            ]
            answers = sum(one.answers for one in measured.samples if (one.side, one.users) == (side, users))
            rows.append([side, f"{users:,}", *cells, f"{answers:,}"])
    return text_table(["engine"], ["users", "tokens/s", "TTFT p50, ms", "TPOT p50, ms", "answers"], rows)


def comparison_table(measured: Measured, levels: Sequence[int]) -> str:
    """What the gateway adds at each level, repeat against repeat."""
    rows = [
        [
            f"{users:,}",
            _text(measured.tokens_ratio(users), ".3f"),
            _text(measured.added_ms(users), "+.2f"),
            _text(measured.tpot_ratio(users), ".3f"),
            str(measured.num_failures(users)),
        ]
        for users in levels
    ]
    numbers = ["users", "tokens/s, x bare", "TTFT p50, ms added", "TPOT p50, x bare", "failed"]
    return text_table([], numbers, rows)


def alternating(repeat: int) -> tuple[str, str]:
    """Which side goes first: each of them in turn, so that what drifts meets both alike."""
    return (BARE, OURS) if repeat % 2 else (OURS, BARE)


def _text(found: Spread | None, form: str) -> str:
    return NONE if found is None else found.text(form)
