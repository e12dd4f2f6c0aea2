"""What a client may say about its scheduling, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import BandConfig, SchedulerConfig
from serving.core.errors import Reason, RefusedError
from serving.gateway.scheduling_headers import SchedulingWishes, read_wishes

CONFIG = SchedulerConfig(
    bands=(BandConfig(name="paid"), BandConfig(name="free"), BandConfig(name="batch")), default_band="free"
)


def wishes(headers: dict[str, str] | None = None, **body: Any) -> SchedulingWishes:
    return read_wishes(headers or {}, body, CONFIG)


def test_who_says_nothing_gets_the_defaults() -> None:
    assert wishes() == SchedulingWishes("default", 1, None, None)


def test_each_header_is_read() -> None:
    said = wishes(
        {
            "x-tandem-tenant": "acme",
            "x-tandem-priority": "paid",
            "x-max-queue-ms": "250",
            "x-tandem-ttft-deadline-ms": "1500",
        }
    )
    assert said == SchedulingWishes("acme", 0, 0.25, 1.5)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-tandem-tenant", ""),
        ("x-tandem-tenant", "a b"),
        ("x-tandem-tenant", "x" * 129),
        ("x-tandem-tenant", "ü"),
        ("x-tandem-priority", ""),
        ("x-tandem-priority", "PAID"),
        ("x-tandem-priority", "0"),
        ("x-max-queue-ms", ""),
        ("x-max-queue-ms", "-1"),
        ("x-max-queue-ms", "1.5"),
        ("x-max-queue-ms", "1e3"),
        ("x-max-queue-ms", " 5"),
        ("x-max-queue-ms", "²"),
        ("x-max-queue-ms", "٣"),
        ("x-max-queue-ms", "86400001"),
        ("x-max-queue-ms", "0" * 5000),
        ("x-max-queue-ms", "000000000001" + "9" * 20),
        ("x-tandem-ttft-deadline-ms", "0"),
        ("x-tandem-ttft-deadline-ms", "soon"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_header_value_and_bound(header: str, value: str) -> None:
    with pytest.raises(RefusedError) as caught:
        wishes({header: value})
    assert caught.value.reason is Reason.BAD_REQUEST
    text = str(caught.value)
    assert text.startswith(f"{header} must be ")
    assert repr(value)[:50] in text
    assert len(text) < 300


@pytest.mark.parametrize(
    ("header", "value", "seconds"),
    [
        ("x-max-queue-ms", "0", 0),
        ("x-max-queue-ms", "86400000", 86_400),
        ("x-max-queue-ms", "007", 0.007),
        ("x-tandem-ttft-deadline-ms", "1", 0.001),
    ],
)
def test_the_bounds_themselves_are_allowed(header: str, value: str, seconds: float) -> None:
    said = wishes({header: value})
    assert (said.max_queue_s if header == "x-max-queue-ms" else said.ttft_deadline_s) == seconds


def test_a_refused_band_lists_those_there_are() -> None:
    with pytest.raises(RefusedError, match="one of paid, free, batch, got 'gold'"):
        wishes({"x-tandem-priority": "gold"})


@pytest.mark.parametrize(
    ("user", "tenant"),
    [
        ("u-1", "u-1"),
        ("", "default"),
        ("a b", "default"),
        (5, "default"),
        (None, "default"),
        ("ü", "default"),
    ],
)
def test_the_bodys_user_pays_when_no_header_says_who(user: Any, tenant: str) -> None:
    assert wishes(user=user).tenant == tenant
    assert wishes({"x-tandem-tenant": "acme"}, user=user).tenant == "acme"


@given(st.text(max_size=20), st.sampled_from(["x-max-queue-ms", "x-tandem-ttft-deadline-ms"]))
def test_any_text_is_a_bounded_time_or_refused(value: str, header: str) -> None:
    try:
        said = wishes({header: value})
    except RefusedError:
        return
    assert 0 <= (said.max_queue_s or said.ttft_deadline_s or 0) <= 86_400
