"""What a run may stop on a cluster."""

from __future__ import annotations

import pytest

from serving.core.cluster_record import Record, claimed


@pytest.mark.parametrize(
    ("serve", "serve_now", "has_lab"),
    [
        ("s1", "s1", True),
        ("s1", "s2", False),  # `serve shutdown`, and then somebody's `serve deploy`
        ("s1", None, False),
        (None, "s1", False),  # killed before it had deployed
        (None, None, False),
    ],
)
def test_a_lab_is_in_the_serve_it_was_deployed_in_and_in_no_other(
    serve: str | None, serve_now: str | None, has_lab: bool
) -> None:
    assert Record("a", True, serve).has_lab(serve_now) is has_lab


@pytest.mark.parametrize(
    ("before", "serve_now", "is_owned"),
    [
        (None, None, True),
        (None, "theirs", False),
        (Record("a", True, "s1"), "s1", True),  # of a run that did not get to stop it
        (Record("a", True, None), "s1", True),
        (Record("a", True, "s1"), "theirs", False),
        (Record("a", False, "theirs"), "theirs", False),
    ],
)
def test_serve_is_owned_by_the_runs_that_started_it(
    before: Record | None, serve_now: str | None, is_owned: bool
) -> None:
    record = claimed("b", before, serve_now)
    assert (record.run_id, record.serve) == ("b", serve_now)
    assert record.owns_serve(serve_now) is is_owned


def test_it_survives_the_cluster() -> None:
    record = Record("a", True, None)
    assert Record.from_json(record.to_json()) == record


def test_a_record_of_a_release_that_writes_more_can_be_read() -> None:
    record = Record("a", starts_serve=True, serve="1")
    text = record.to_json().replace(b"{", b'{"more": 1, ')
    assert Record.from_json(text) == record
