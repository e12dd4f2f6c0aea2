"""A figure that is not known exactly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval; `low` and `high` are None where too little was measured for one."""

    value: float
    low: float | None = None
    high: float | None = None
