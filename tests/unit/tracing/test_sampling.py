from __future__ import annotations

import random

import pytest

from serving.tracing.sampling import is_sampled


def gateway_ids(count: int) -> list[str]:
    rng = random.Random(5)
    return [f"my-id-{rng.getrandbits(48):012x}" for _ in range(count)]


@pytest.mark.parametrize(
    "around", ["chatcmpl-{}-1a2b3c4d", "cmpl-{}-0-1a2b3c4d", "{}-again", "chatcmpl-{}-again-99887766"]
)
def test_all_that_is_put_around_an_id_changes_nothing(around: str) -> None:
    ids = gateway_ids(400)
    chosen = [is_sampled(one, 0.3) for one in ids]
    assert [is_sampled(around.format(one), 0.3) for one in ids] == chosen
    assert 0 < sum(chosen) < 400


def test_a_client_s_id_does_not_choose() -> None:
    """One that looks like the gateway's part, the same in all requests."""
    ids = [f"aaaaaaaaaaaa-{one.rpartition('-')[2]}" for one in gateway_ids(400)]
    assert 80 < sum(is_sampled(one, 0.3) for one in ids) < 160


def test_the_share_is_that_of_the_requests() -> None:
    ids = gateway_ids(10_000)
    for share in (0.01, 0.1, 0.5):
        found = sum(is_sampled(one, share) for one in ids) / 10_000
        assert found == pytest.approx(share, abs=5 * (share * (1 - share) / 10_000) ** 0.5)
    assert all(is_sampled(one, 1.0) for one in ids)


def test_a_greater_share_holds_a_smaller_one() -> None:
    ids = gateway_ids(1000)
    small, great = ({one for one in ids if is_sampled(one, share)} for share in (0.1, 0.4))
    assert small < great


def test_an_id_without_a_gateway_s_part_is_hashed_whole() -> None:
    assert 200 < sum(is_sampled(f"warm-up-{number}", 0.3) for number in range(1000)) < 400
