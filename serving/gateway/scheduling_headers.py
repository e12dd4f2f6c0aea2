"""What a client may say about how its request is scheduled: four headers, each checked and bounded.

`x-tandem-tenant`            who pays (else the body's `user`, else `default`)
`x-tandem-priority`          name of a band of scheduler.bands
`x-max-queue-ms`             longest wait; 0: run now or be refused
`x-tandem-ttft-deadline-ms`  when the first token is wanted, from arrival
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.config import SchedulerConfig
from serving.core.errors import Reason, RefusedError
from serving.core.request import DEFAULT_TENANT, TENANT_NAME

MILLISECONDS = re.compile(r"[0-9]{1,9}")
MAX_MS = 86_400_000  # a day


@dataclass(frozen=True, slots=True)
class SchedulingWishes:
    """The headers' meaning, for `SchedulingRequest`."""

    tenant: str
    band: int
    max_queue_s: float | None
    ttft_deadline_s: float | None


def read_wishes(
    headers: Mapping[str, str], body: Mapping[str, Any], config: SchedulerConfig
) -> SchedulingWishes:
    """Read the headers.

    Raises:
        RefusedError: a value is not what it should be; the text names header, value and bound.
    """
    return SchedulingWishes(
        tenant=_tenant(headers, body),
        band=_band(headers, config),
        max_queue_s=_seconds(headers, "x-max-queue-ms", lowest=0),
        ttft_deadline_s=_seconds(headers, "x-tandem-ttft-deadline-ms", lowest=1),
    )


def _tenant(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    given = headers.get("x-tandem-tenant")
    if given is None:
        user = body.get("user")
        # The engine checks `user` itself; here an odd one only means that nobody in particular pays.
        return user if isinstance(user, str) and TENANT_NAME.fullmatch(user) else DEFAULT_TENANT
    if not TENANT_NAME.fullmatch(given):
        raise _bad("x-tandem-tenant", given, "1 to 128 printable ASCII characters without spaces")
    return given


def _band(headers: Mapping[str, str], config: SchedulerConfig) -> int:
    name = headers.get("x-tandem-priority", config.default_band)
    index = config.band_index(name)
    if index is None:
        raise _bad("x-tandem-priority", name, f"one of {', '.join(band.name for band in config.bands)}")
    return index


def _seconds(headers: Mapping[str, str], name: str, lowest: int) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    if not (MILLISECONDS.fullmatch(given) and lowest <= int(given) <= MAX_MS):
        raise _bad(name, given, f"a whole number of milliseconds in {lowest}..{MAX_MS}")
    return int(given) / 1000


def _bad(header: str, value: str, wanted: str) -> RefusedError:
    return RefusedError(Reason.BAD_REQUEST, f"{header} must be {wanted}, got {value!r:.100}")
