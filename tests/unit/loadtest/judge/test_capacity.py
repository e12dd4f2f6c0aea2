from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.judge.capacity import Bracket, Capacity, CapacitySearch, Probe, SearchSettings

Server = Callable[[float, int], Probe]


def probe(rate: float, repeat: int, *, holds: bool, is_valid: bool = True) -> Probe:
    return Probe(rate, repeat, 1.0 if holds else 0.5, holds, is_valid, 3 * rate, None if holds else "ttft<2s")


def server(capacity: float, ceiling: float = math.inf) -> Server:
    """Holds up to its capacity; the client can offer rates below a ceiling."""
    return lambda rate, repeat: probe(rate, repeat, holds=rate <= capacity, is_valid=rate < ceiling)


def noisy_server(capacity: float, spread: float, seed: int) -> Server:
    """Its capacity varies from probe to probe, by so much on a log scale."""
    rng = random.Random(seed)
    return lambda rate, repeat: probe(rate, repeat, holds=rate <= capacity * math.exp(rng.gauss(0, spread)))


def search(settings: SearchSettings, ask: Server, took_s: float = 1.0) -> Capacity:
    found = CapacitySearch("batched", "copy", settings)
    for _ in range(1000):
        following = found.next_probe()
        if following is None:
            return found.result()
        found.record(ask(*following), took_s)
    raise AssertionError("the search does not end")


@given(
    capacity=st.floats(0.05, 500), first=st.floats(0.05, 500), resolution=st.sampled_from([0.05, 0.1, 0.3])
)
def test_a_known_capacity_is_found_within_the_resolution(
    capacity: float, first: float, resolution: float
) -> None:
    found = search(SearchSettings(first, resolution, max_probes=100), server(capacity))
    assert not found.is_lower_bound
    assert len(found.by_repeat) == 3
    for rate in found.by_repeat:
        assert rate <= capacity
        assert rate * (1 + resolution) > capacity * 0.99  # rates have three digits
    assert found.rate_per_s is not None
    assert found.rate_per_s.low is not None
    assert found.rate_per_s.high is not None
    assert found.rate_per_s.low <= capacity * 1.01
    assert found.rate_per_s.high >= capacity * 0.99
    assert found.binding == "ttft<2s"


@given(
    capacity=st.floats(0.1, 100),
    first=st.floats(0.01, 1000),
    spread=st.floats(0, 1),
    ceiling=st.floats(0.05, 200),
    max_probes=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_no_search_makes_more_probes_than_it_may_nor_one_stage_twice(
    capacity: float, first: float, spread: float, ceiling: float, max_probes: int, seed: int
) -> None:
    noisy = noisy_server(capacity, spread, seed)

    def ask(rate: float, repeat: int) -> Probe:
        answer = noisy(rate, repeat)
        return probe(rate, repeat, holds=answer.holds, is_valid=rate < ceiling)

    found = search(SearchSettings(first, max_probes=max_probes), ask)
    assert len(found.probes) <= max_probes
    stages = [(each.rate_per_s, each.repeat) for each in found.probes]
    assert len(set(stages)) == len(stages)
    # What is reported was seen to hold, by a valid probe.
    held = {each.rate_per_s for each in found.probes if each.holds and each.is_valid}
    assert set(found.by_repeat) <= held


def test_noise_is_in_the_interval() -> None:
    hits = 0
    for seed in range(60):
        found = search(SearchSettings(1.0, max_probes=100), noisy_server(20.0, 0.1, seed))
        assert found.rate_per_s is not None
        assert found.rate_per_s.low is not None
        assert found.rate_per_s.high is not None
        hits += found.rate_per_s.low <= 20.0 <= found.rate_per_s.high
        assert 20 / 1.5 < found.rate_per_s.value < 20 * 1.5
    assert hits >= 54


def test_an_invalid_probe_neither_holds_nor_fails() -> None:
    # Only the first of each stage is disturbed: what is found is what an undisturbed client finds.
    seen: set[float] = set()

    def disturbed(rate: float, repeat: int) -> Probe:
        is_valid = rate in seen
        seen.add(rate)
        return probe(rate, repeat, holds=rate <= 13.0 if is_valid else rate > 13.0, is_valid=is_valid)

    settings = SearchSettings(2.0, max_probes=100)
    assert search(settings, disturbed).by_repeat[0] == search(settings, server(13.0)).by_repeat[0]


def test_a_client_that_cannot_offer_more_gives_a_lower_bound() -> None:
    found = search(SearchSettings(2.0, repeats=1), server(50.0, ceiling=10.0))
    assert found.is_lower_bound
    assert found.by_repeat == (8.0,)
    assert found.binding is None
    assert [(each.rate_per_s, each.repeat) for each in found.probes] == [
        (2.0, 0), (4.0, 0), (8.0, 0), (16.0, 0), (16.0, 1),
    ]  # fmt: skip


def test_a_first_guess_that_cannot_be_offered_is_lowered() -> None:
    found = search(SearchSettings(40.0, repeats=1), server(50.0, ceiling=30.0))
    assert (found.is_lower_bound, found.by_repeat) == (True, (20.0,))


def test_no_rate_holds() -> None:
    found = search(SearchSettings(8.0, max_probes=5), server(0.0))
    assert (found.rate_per_s, found.by_repeat, found.is_lower_bound) == (None, (), False)
    assert [each.rate_per_s for each in found.probes] == [8.0, 4.0, 2.0, 1.0, 0.5]


def test_no_rate_below_the_lowest_is_tried() -> None:
    found = search(SearchSettings(8.0, lowest_rate_per_s=2.0), server(0.0))
    assert [each.rate_per_s for each in found.probes] == [8.0, 4.0, 2.0]


def test_a_repeat_begins_with_a_small_step_and_widens_it() -> None:
    bracket = Bracket(10.0, step=1.1, resolution=0.1)
    rates: list[float] = []
    while len(rates) < 6:
        rate = bracket.next_rate()
        assert rate is not None
        rates.append(rate)
        bracket.record(probe(rate, 0, holds=True))
    assert rates == [10.0, 11.0, 13.3, 19.5, 39.0, 78.0]  # times 1.1, 1.1^2, 1.1^4, then 2


@pytest.mark.parametrize(
    ("max_s", "took_s"),
    [(34.0, 7.0), (28.0, 7.0), (1.0, 0.25)],  # a fifth would end at 35 s, at 35 s, at 1.25 s
)
def test_the_budget_of_time_is_kept(max_s: float, took_s: float) -> None:
    found = search(SearchSettings(1.0, max_s=max_s, max_probes=100), server(9.0), took_s=took_s)
    assert len(found.probes) == 4
    # Cut in its first repeat, it still says what it saw: 8 held, and nothing above was tried.
    assert found.is_lower_bound
    assert found.rate_per_s is not None
    assert found.rate_per_s.value == pytest.approx(8.0)
    assert found.rate_per_s.low is None


def test_requests_in_flight_are_those_at_the_capacity() -> None:
    found = search(SearchSettings(4.0, repeats=1), server(4.1))
    assert found.mean_in_flight == pytest.approx(3 * found.by_repeat[0])


def test_a_foreign_probe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"probe of 3.0 requests/s: the search asks for 4.0"):
        CapacitySearch("batched", "copy", SearchSettings(4.0)).record(probe(3.0, 0, holds=True))


@pytest.mark.parametrize("resolution", [0.02, 1.0])
def test_both_ends_of_the_resolution_are_allowed(resolution: float) -> None:
    assert SearchSettings(1.0, resolution).resolution == resolution


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_rate_per_s": 0}, "first_rate_per_s=0 must be above 0"),
        ({"first_rate_per_s": math.nan}, "must be above 0"),
        ({"first_rate_per_s": 1, "resolution": 0.001}, "resolution=0.001 must be in 0.02..1"),
        ({"first_rate_per_s": 1, "resolution": 1.5}, "resolution=1.5 must be in 0.02..1"),
        ({"first_rate_per_s": 1, "repeats": 0}, "repeats=0 must be at least 1"),
        ({"first_rate_per_s": 1, "max_probes": 0}, "max_probes=0 must be at least 1"),
        ({"first_rate_per_s": 1, "max_s": 0}, "max_s=0 must be above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchSettings(**settings)  # type: ignore[arg-type]
