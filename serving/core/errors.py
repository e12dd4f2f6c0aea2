"""The error tree, and the one table from a reason to an HTTP status.

TandemError
  ConfigError            bad setting: file, key, value, bound
  RefusedError           the scheduler said no, with a `Reason`
  UpstreamError          an engine replica broke
  LeaseError             a lease was released twice, or never granted
  AlreadyRunningError    a second lab of one user
  StartFailedError       the lab did not become ready
  NotRunningError        no lab runs, or none that answers
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_SHOWN_CHARS = 100  # of a wrong value, key, phrase or path in an error


class Reason(StrEnum):
    """Why a request was not answered in full. Header `x-tandem-reason`, error code, metric label."""

    QUEUE_FULL = "queue_full"
    TENANT_OVER_SHARE = "tenant_over_share"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    REQUEST_TOO_LONG = "request_too_long"
    SCHEDULER_UNREACHABLE = "scheduler_unreachable"
    NO_REPLICA_READY = "no_replica_ready"
    DRAINING = "draining"
    QUEUE_TIMEOUT = "queue_timeout"
    UNKNOWN_MODEL = "unknown_model"
    BAD_REQUEST = "bad_request"
    INVALID_API_KEY = "invalid_api_key"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TOO_LARGE = "request_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UPLOAD_TIMEOUT = "upload_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    CLIENT_CLOSED = "client_closed"
    CLIENT_STALLED = "client_stalled"
    UPSTREAM_BROKE = "upstream_broke"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    ENGINE_DIED = "engine_died"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """HTTP status and the `type` of the OpenAI error object."""

    status: int
    type: str


# 499 is never sent: it names, in logs and metrics, a client that left, or that took nothing of its answer.
ERROR_SHAPES: dict[Reason, ErrorShape] = {
    Reason.QUEUE_FULL: ErrorShape(429, "rate_limit_error"),
    Reason.TENANT_OVER_SHARE: ErrorShape(429, "rate_limit_error"),
    Reason.DEADLINE_UNREACHABLE: ErrorShape(429, "rate_limit_error"),
    Reason.REQUEST_TOO_LONG: ErrorShape(413, "invalid_request_error"),
    Reason.SCHEDULER_UNREACHABLE: ErrorShape(503, "service_unavailable_error"),
    Reason.NO_REPLICA_READY: ErrorShape(503, "service_unavailable_error"),
    Reason.DRAINING: ErrorShape(503, "service_unavailable_error"),
    Reason.QUEUE_TIMEOUT: ErrorShape(504, "timeout_error"),
    Reason.UNKNOWN_MODEL: ErrorShape(404, "invalid_request_error"),
    Reason.BAD_REQUEST: ErrorShape(400, "invalid_request_error"),
    Reason.INVALID_API_KEY: ErrorShape(401, "authentication_error"),
    Reason.NOT_FOUND: ErrorShape(404, "invalid_request_error"),
    Reason.METHOD_NOT_ALLOWED: ErrorShape(405, "invalid_request_error"),
    Reason.REQUEST_TOO_LARGE: ErrorShape(413, "invalid_request_error"),
    Reason.HEADERS_TOO_LARGE: ErrorShape(431, "invalid_request_error"),
    Reason.UPLOAD_TIMEOUT: ErrorShape(408, "invalid_request_error"),
    Reason.TOO_MANY_CONNECTIONS: ErrorShape(503, "service_unavailable_error"),
    Reason.CLIENT_CLOSED: ErrorShape(499, "client_closed_request"),
    Reason.CLIENT_STALLED: ErrorShape(499, "client_closed_request"),
    Reason.UPSTREAM_BROKE: ErrorShape(502, "upstream_error"),
    Reason.UPSTREAM_TIMEOUT: ErrorShape(504, "timeout_error"),
    Reason.ENGINE_DIED: ErrorShape(502, "upstream_error"),
    Reason.INTERNAL: ErrorShape(500, "internal_error"),
}


# What the scheduler refuses with; all are exported as counters from the start, at 0.
SCHEDULER_REASONS = (
    Reason.QUEUE_FULL,
    Reason.TENANT_OVER_SHARE,
    Reason.DEADLINE_UNREACHABLE,
    Reason.REQUEST_TOO_LONG,
    Reason.NO_REPLICA_READY,
    Reason.DRAINING,
    Reason.QUEUE_TIMEOUT,
)


class TandemError(Exception):
    """Base of every error Tandem raises on purpose."""


class ConfigError(TandemError):
    """A setting is unknown or out of bounds; the text names file, key, value and bound."""


class RefusedError(TandemError):
    """A request was refused; `reason` says why and `retry_after_s` when to come back (None: no advice)."""

    def __init__(self, reason: Reason, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class UpstreamError(TandemError):
    """An engine replica could not be reached, fell silent, or broke off.

    Attributes:
        blames_replica: False where it says nothing of the replica.
        is_final: the request is not run again: another replica would do no better, or break by it too.
        is_answer: the replica's server is there and said that it failed.
        was_begun: the engine may have begun with the request, so that the request may be why it broke.
        quoted: the engine's own words, which may repeat the client's: told to that client, and to no log.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        blames_replica: bool = True,
        is_final: bool = False,
        is_answer: bool = False,
        was_begun: bool = False,
        quoted: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.blames_replica = blames_replica
        self.is_final = is_final
        self.is_answer = is_answer
        self.was_begun = was_begun
        self.quoted = quoted

    @property
    def told(self) -> str:
        """The text for the client whose request it was."""
        return f"{self}: {self.quoted}" if self.quoted else str(self)


class LeaseError(TandemError):
    """A lease was released twice, or was never granted."""


class AlreadyRunningError(TandemError):
    """A lab of this user is running already."""


class StartFailedError(TandemError):
    """The lab did not become ready."""


class NotRunningError(TandemError):
    """No lab is running, or it does not answer."""
