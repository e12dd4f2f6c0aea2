"""vLLM's schedulers, with a note of each step. Imported by vLLM in its engine's process, by name.

Each takes the place of the scheduler that vLLM would have chosen itself, and decides nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from serving.engines.steps.notes import NotesSteps


class NotingScheduler(NotesSteps, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, noting its steps."""


class NotingAsyncScheduler(NotesSteps, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, noting its steps."""


NOTING: dict[type[Any], type[Any]] = {Scheduler: NotingScheduler, AsyncScheduler: NotingAsyncScheduler}
