"""The table from a reason to an HTTP status."""

from __future__ import annotations

import pytest

from serving.core.errors import ERROR_SHAPES, LeaseError, Reason, RefusedError, TandemError, UpstreamError

CLIENTS_MISTAKES = {
    Reason.UNKNOWN_MODEL: 404,
    Reason.BAD_REQUEST: 400,
    Reason.REQUEST_TOO_LARGE: 413,
    Reason.REQUEST_TOO_LONG: 413,
    Reason.NOT_FOUND: 404,
    Reason.METHOD_NOT_ALLOWED: 405,
    Reason.HEADERS_TOO_LARGE: 431,
}
ALL_OTHERS = {
    Reason.INVALID_API_KEY: 401,
    Reason.UPLOAD_TIMEOUT: 408,  # a network that stalled: a retry may help
    Reason.QUEUE_FULL: 429,
    Reason.TENANT_OVER_SHARE: 429,
    Reason.DEADLINE_UNREACHABLE: 429,
    Reason.SCHEDULER_UNREACHABLE: 503,
    Reason.CLIENT_CLOSED: 499,
    Reason.CLIENT_STALLED: 499,
    Reason.TOO_MANY_CONNECTIONS: 503,
    Reason.NO_REPLICA_READY: 503,
    Reason.DRAINING: 503,
    Reason.QUEUE_TIMEOUT: 504,
    Reason.UPSTREAM_BROKE: 502,
    Reason.UPSTREAM_TIMEOUT: 504,
    Reason.ENGINE_DIED: 502,
    Reason.INTERNAL: 500,
}


def test_every_reason_has_a_shape_and_is_known_to_this_file() -> None:
    assert set(ERROR_SHAPES) == set(Reason) == CLIENTS_MISTAKES.keys() | ALL_OTHERS.keys()


@pytest.mark.parametrize(("reason", "status"), (CLIENTS_MISTAKES | ALL_OTHERS).items())
def test_status(reason: Reason, status: int) -> None:
    assert ERROR_SHAPES[reason].status == status


@pytest.mark.parametrize("reason", CLIENTS_MISTAKES)
def test_a_clients_mistake_is_a_4xx_that_no_client_retries(reason: Reason) -> None:
    shape = ERROR_SHAPES[reason]
    assert 400 <= shape.status < 500
    assert shape.status not in (408, 409, 429), "OpenAI clients retry these"
    assert shape.type == "invalid_request_error"


def test_reasons_are_usable_as_header_and_label() -> None:
    for reason in Reason:
        assert str(reason) == reason.value
        assert str(reason).replace("_", "").isalpha()


def test_errors_are_one_tree_and_say_why() -> None:
    refused = RefusedError(Reason.QUEUE_FULL, "9 of 9 requests are waiting", 3)
    assert (refused.reason, refused.retry_after_s, str(refused)) == (
        Reason.QUEUE_FULL,
        3,
        "9 of 9 requests are waiting",
    )
    assert UpstreamError(Reason.UPSTREAM_BROKE, "gone").reason is Reason.UPSTREAM_BROKE
    assert all(issubclass(error, TandemError) for error in (RefusedError, UpstreamError, LeaseError))
