from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.simulation.plan import least_replicas


@given(st.integers(1, 1000), st.integers(0, 2000), st.integers(1, 1000))
def test_the_fewest_that_hold_are_found_without_asking_twice(needed: int, first: int, most: int) -> None:
    asked: list[int] = []

    def holds(replicas: int) -> bool:
        assert 1 <= replicas <= most
        asked.append(replicas)
        return replicas >= needed

    found = least_replicas(holds, first, most)
    assert found == (needed if needed <= most else None)
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(("needed", "runs"), [(10, 3), (11, 3), (9, 4)])
def test_a_near_guess_needs_few_runs(needed: int, runs: int) -> None:
    asked: list[int] = []

    def holds(replicas: int) -> bool:
        asked.append(replicas)
        return replicas >= needed

    least_replicas(holds, 10, 1000)
    assert len(asked) <= runs + 2
