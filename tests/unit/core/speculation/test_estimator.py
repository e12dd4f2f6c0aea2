from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.speculation import estimator as module
from serving.core.speculation.acceptance import Rates, checked_rates, geometric_rates
from serving.core.speculation.estimator import FADE_S, AcceptanceEstimator, DraftOutcome
from serving.core.speculation.reliability import Reliability
from serving.core.speculation.text_kind import TextKind

LANE = "speculative"
OPEN, COPY = TextKind.OPEN, TextKind.COPY

positions = st.lists(st.integers(0, 50), max_size=5).map(lambda given: sorted(given, reverse=True))
outcomes = positions.map(lambda counts: DraftOutcome.of_positions(counts[0] + 3, counts) if counts else None)
requests = st.tuples(st.sampled_from([COPY, OPEN]), st.sampled_from("ab"), outcomes)


def drafted(rng: random.Random, rates: Rates, num_drafts: int = 40) -> DraftOutcome:
    """Drafts whose tokens are accepted by chance."""
    accepted = [0] * len(rates)
    for _ in range(num_drafts):
        chance = rng.random()
        for position, rate in enumerate(rates):
            accepted[position] += chance < rate
    return DraftOutcome.of_positions(num_drafts, accepted)


def learnt(rates: Rates, half_life: float = 5000.0) -> AcceptanceEstimator:
    estimator, rng = AcceptanceEstimator(half_life=half_life), random.Random(5)
    for _ in range(200):
        estimator.learn(LANE, OPEN, "a", drafted(rng, rates))
    return estimator


@given(st.lists(requests, max_size=30), st.integers(0, 8))
def test_speculation_estimates_are_always_rates(
    ended: list[tuple[TextKind, str, DraftOutcome | None]], num_drafts: int
) -> None:
    estimator = AcceptanceEstimator({(LANE, COPY): (0.9, 0.5)})
    for kind, tenant, outcome in ended:
        if outcome is not None:
            estimator.learn(LANE, kind, tenant, outcome)
    for kind, tenant in itertools.product((COPY, OPEN), "abc"):
        expected = estimator.expect(LANE, kind, tenant, num_drafts)
        assert len(expected.rates) == num_drafts
        assert checked_rates(expected.rates) == expected.rates
        assert 1 <= expected.tokens_per_step <= num_drafts + 1
        assert expected.num_drafts >= 0


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 500))
def test_a_speculation_estimate_is_between_prior_and_observed(
    prior: float, observed: float, num_drafts: int
) -> None:
    estimator = AcceptanceEstimator({(LANE, OPEN): (prior,)})
    estimator.learn(LANE, OPEN, "a", DraftOutcome((num_drafts,), (observed * num_drafts,)))
    (rate,) = estimator.expect(LANE, OPEN, "a", 1).rates
    assert min(prior, observed) - 1e-9 <= rate <= max(prior, observed) + 1e-9


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=10))
def test_more_accepted_drafts_never_lower_a_speculation_estimate(counts: list[tuple[int, int]]) -> None:
    less, more = AcceptanceEstimator(), AcceptanceEstimator()
    for tried, accepted in counts:
        accepted = min(tried, accepted)
        less.learn(LANE, OPEN, "a", DraftOutcome((tried,), (accepted,)))
        more.learn(LANE, OPEN, "a", DraftOutcome((tried,), (min(tried, accepted + 1),)))
    assert more.expect(LANE, OPEN, "a", 1).rates[0] >= less.expect(LANE, OPEN, "a", 1).rates[0]


@pytest.mark.parametrize("rates", [(0.66, 0.45, 0.29), (0.95, 0.9, 0.9), (0.1, 0.0, 0.0)])
def test_speculation_estimates_come_to_what_is_observed(rates: Rates) -> None:
    expected = learnt(rates).expect(LANE, OPEN, "a", 3)
    assert expected.rates == pytest.approx(rates, abs=0.03)
    assert expected.num_drafts == pytest.approx(200 * 40, rel=0.5)


def test_before_anything_is_learnt_speculation_goes_by_the_prior() -> None:
    estimator = AcceptanceEstimator({(LANE, COPY): (0.9, 0.8)})
    assert estimator.expect(LANE, COPY, "a", 4).rates == pytest.approx((0.9, 0.8, 0.8 * 8 / 9, 0.8 * 64 / 81))
    assert estimator.expect(LANE, OPEN, "a", 2).rates == pytest.approx(geometric_rates(0.4, 2))
    assert estimator.expect("other", COPY, "a", 1).rates == (0.8,)
    assert estimator.expect(LANE, COPY, "a", 2).num_drafts == 0
    assert estimator.expect(LANE, COPY, "a", 0).acceptance_rate == 0


def test_what_one_kind_or_lane_teaches_says_nothing_of_another() -> None:
    estimator = learnt((0.1,))
    assert estimator.expect(LANE, COPY, "a", 1).rates == (0.8,)
    assert estimator.expect("other", OPEN, "a", 1).rates == (0.4,)


def test_a_tenant_is_told_from_the_others_of_its_kind() -> None:
    estimator, rng = AcceptanceEstimator(), random.Random(5)
    for _ in range(50):
        estimator.learn(LANE, OPEN, "usual", drafted(rng, (0.3,)))
        estimator.learn(LANE, OPEN, "usual", drafted(rng, (0.3,)))
        estimator.learn(LANE, OPEN, "guessable", drafted(rng, (0.9,)))
    rate = {
        tenant: estimator.expect(LANE, OPEN, tenant, 1).rates[0] for tenant in ("usual", "guessable", "new")
    }
    assert rate["usual"] == pytest.approx(0.3, abs=0.05)
    assert rate["guessable"] == pytest.approx(0.9, abs=0.05)
    assert rate["new"] == pytest.approx(0.5, abs=0.05)  # the mean of its kind


@pytest.mark.parametrize("half_life", [200.0, 2000.0])
def test_what_was_seen_long_ago_is_forgotten(half_life: float) -> None:
    estimator, rng = learnt((0.9,), half_life=half_life), random.Random(6)
    for _ in range(round(half_life / 40)):
        estimator.learn(LANE, OPEN, "a", drafted(rng, (0.1,)))
    # Half of what counts is new; the level above and the tenant's own tell the same.
    assert estimator.expect(LANE, OPEN, "a", 1).rates[0] == pytest.approx(0.5, abs=0.07)
    for _ in range(round(6 * half_life / 40)):
        estimator.learn(LANE, OPEN, "a", drafted(rng, (0.1,)))
    assert estimator.expect(LANE, OPEN, "a", 1).rates[0] == pytest.approx(0.1, abs=0.05)


def test_in_its_kind_a_tenant_counts_as_much_as_the_prior_at_most() -> None:
    prior = {(LANE, OPEN): (0.8,)}
    one, many = AcceptanceEstimator(prior), AcceptanceEstimator(prior)
    for number in range(40):
        nothing = DraftOutcome((50,), (0,))
        one.learn(LANE, OPEN, "evil", nothing)
        many.learn(LANE, OPEN, f"t{number}", nothing)
    assert one.expect(LANE, OPEN, "new", 1).acceptance_rate == pytest.approx(0.4)
    assert one.expect(LANE, OPEN, "evil", 1).acceptance_rate < 0.02
    assert many.expect(LANE, OPEN, "new", 1).acceptance_rate == pytest.approx(0.8 / 41)


def test_a_tenant_that_changes_changes_its_part_of_the_kind() -> None:
    estimator = AcceptanceEstimator({(LANE, OPEN): (0.5,)}, half_life=50)
    for accepted in (0, 50):
        for _ in range(20):
            estimator.learn(LANE, OPEN, "a", DraftOutcome((50,), (accepted,)))
    assert estimator.expect(LANE, OPEN, "new", 1).acceptance_rate == pytest.approx(0.75, abs=0.01)


def test_without_news_it_is_forgotten_in_time() -> None:
    estimator = AcceptanceEstimator({(LANE, OPEN): (0.8,)})
    for number in range(20):
        estimator.learn(LANE, OPEN, f"t{number}", DraftOutcome((50,), (0,)), now_s=100.0)
    found = [
        estimator.expect(LANE, OPEN, tenant, 1, 100.0 + age * FADE_S)
        for age in (0, 1, 3, 10)
        for tenant in ("new", "t1")
    ]
    rates = [each.acceptance_rate for each in found]
    assert rates[::2] == sorted(rates[::2])
    assert rates[1::2] == sorted(rates[1::2])
    assert rates[-1] == pytest.approx(0.8, abs=0.01)
    assert found[-1].num_drafts < 0.1
    # What is learnt then is of then.
    estimator.learn(LANE, OPEN, "t1", DraftOutcome((50,), (25,)), now_s=100.0 + 10 * FADE_S)
    late = estimator.expect(LANE, OPEN, "new", 1, 100.0 + 10 * FADE_S).acceptance_rate
    assert late == pytest.approx((0.8 + 0.5) / 2, abs=0.01)


def test_tenants_without_end_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 3)
    estimator = AcceptanceEstimator(strength=1)
    for tenant in "abcad":
        estimator.learn(LANE, OPEN, tenant, DraftOutcome((1000,), (1000 if tenant in "ab" else 0,)))
    by_kind = estimator.expect(LANE, OPEN, "unknown", 1).rates[0]
    assert estimator.expect(LANE, OPEN, "b", 1).rates[0] == by_kind
    assert estimator.expect(LANE, OPEN, "a", 1).rates[0] > 0.9


def test_outcomes_from_what_engines_count() -> None:
    assert DraftOutcome.of_positions(10, (7, 4, 1)) == DraftOutcome((10, 7, 4), (7, 4, 1))
    # The sums alone: 12 accepted of 10 drafts of 3.
    outcome = DraftOutcome.of_counts(10, 12, 3)
    assert sum(outcome.accepted) == pytest.approx(12)
    assert outcome.accepted[1] / outcome.accepted[0] == pytest.approx(outcome.accepted[0] / 10)
    assert DraftOutcome.of_counts(0, 0, 3).num_drafts == 0
    with pytest.raises(ValueError, match="5 accepted of 4 tried"):
        DraftOutcome((4,), (5,))
    with pytest.raises(ValueError, match="2 positions were tried and 1 accepted"):
        DraftOutcome((4, 3), (3,))
    with pytest.raises(ValueError, match="half_life=0 must be above 0"):
        AcceptanceEstimator(half_life=0)


def test_learnt_speculation_estimates_come_true_bin_by_bin() -> None:
    """Kinds and tenants of unlike text: what was predicted when a request came, against what it then was."""
    rng = random.Random(9)
    by_tenant = {
        f"{kind}-{number}": (kind, geometric_rates(min(1.0, max(0.0, rng.gauss(mean, 0.15))), 3))
        for kind, mean in ((COPY, 0.85), (OPEN, 0.45))
        for number in range(10)
    }
    estimator, prior = AcceptanceEstimator(), AcceptanceEstimator()
    learnt, guessed = Reliability(), Reliability()
    for number in range(6000):
        tenant, (kind, rates) = rng.choice(list(by_tenant.items()))
        outcome = drafted(rng, rates, num_drafts=rng.randint(5, 60))
        counts = sum(map(round, outcome.accepted)), 3 * round(outcome.num_drafts)
        if number >= 1000:
            learnt.add(estimator.expect(LANE, kind, tenant, 3).acceptance_rate, *counts)
            guessed.add(prior.expect(LANE, kind, tenant, 3).acceptance_rate, *counts)
        estimator.learn(LANE, kind, tenant, outcome)
    learnt_error, guessed_error = learnt.error(), guessed.error()
    assert learnt_error is not None
    assert guessed_error is not None
    assert learnt_error < 0.02
    assert len(learnt.bins()) >= 6  # it tells them apart, and is right of each
    assert all(abs(each.predicted - each.observed) < 0.04 for each in learnt.bins() if each.num_requests > 50)
    assert len(guessed.bins()) == 2
    assert guessed_error > 2 * learnt_error


def test_speculation_bins_hold_what_was_predicted_and_observed() -> None:
    reliability = Reliability(num_bins=4)
    assert reliability.error() is None
    reliability.add(0.1, 10, 100)
    reliability.add(0.2, 50, 100)
    reliability.add(1.0, 90, 100)
    reliability.add(0.6, 0, 0)  # no drafts
    low, high = reliability.bins()
    assert (low.low, low.high, low.draft_tokens, low.num_requests) == (0.0, 0.25, 200, 2)
    assert (low.predicted, low.observed) == pytest.approx((0.15, 0.3))
    assert (high.low, high.predicted, high.observed) == pytest.approx((0.75, 1.0, 0.9))
    assert reliability.error() == pytest.approx((200 * 0.15 + 100 * 0.1) / 300)
    with pytest.raises(ValueError, match="accepted_tokens=3"):
        reliability.add(0.5, 3, 2)
    with pytest.raises(ValueError, match="num_bins=0"):
        Reliability(0)
