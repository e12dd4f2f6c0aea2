"""How many replicas a lane wants."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from serving.autoscaling import METRIC, ScaleByOutstandingTokens, wanted_replicas


@pytest.mark.parametrize(
    ("outstanding", "wanted"), [(0, 1), (1, 1), (100, 1), (101, 2), (200, 2), (1000, 10)]
)
def test_enough_that_none_has_more_than_the_target(outstanding: int, wanted: int) -> None:
    assert wanted_replicas(outstanding, target_tokens=100) == wanted


def test_the_policy_adds_up_what_the_replicas_report() -> None:
    policy = ScaleByOutstandingTokens(target_tokens=100)
    context = SimpleNamespace(
        aggregated_metrics={METRIC: {"r1": 150.0, "r2": 60.0}, "other": {"r1": 9e9}}, target_num_replicas=7
    )
    assert policy(context) == (3, {})


@pytest.mark.parametrize("reported", [None, {}, {METRIC: {}}])
def test_without_a_report_nothing_changes(reported: dict[str, dict[str, float]] | None) -> None:
    context = SimpleNamespace(aggregated_metrics=reported, target_num_replicas=7)
    assert ScaleByOutstandingTokens(100)(context) == (7, {})
