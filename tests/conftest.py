"""Shared by all tests: one asyncio backend, and property tests that give the same answer every time."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: a shared machine makes single examples slow; pytest's own timeout catches a hang.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
