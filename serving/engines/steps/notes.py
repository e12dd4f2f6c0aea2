"""What is noted of each step, by a class that stands before a scheduler of vLLM. It does not import vLLM itself."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from serving.engines.steps.log import PATH_VARIABLE, RequestStep, StepWriter

# Steps that are under way at once: one, or two with asynchronous scheduling; more with pipeline stages.
MAX_OPEN_STEPS = 16

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class NotesSteps(_Base):  # type: ignore[misc]
    """Stands before a scheduler of vLLM: stamps what is scheduled, and writes it down when its tokens are there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._writer = StepWriter(os.environ[PATH_VARIABLE])
        self._open_steps: deque[tuple[Any, int, int, frozenset[str]]] = deque(maxlen=MAX_OPEN_STEPS)
        self._last_ended_ns = 0

    def schedule(self, *args: Any, **options: Any) -> Any:
        if not self._writer.is_on:
            return super().schedule(*args, **options)
        started_ns = time.monotonic_ns()
        output = super().schedule(*args, **options)
        if output.total_num_scheduled_tokens:
            self._open_steps.append((output, self.current_step, started_ns, self._prefilling(output)))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not self._writer.is_on:
            return super().update_from_output(scheduler_output, model_runner_output)
        ended_ns = time.monotonic_ns()
        sampled = _num_sampled(model_runner_output)  # vLLM cuts the lists themselves where an answer stops
        made = super().update_from_output(scheduler_output, model_runner_output)
        for entry in self._open_steps:
            if entry[0] is scheduler_output:
                _, step, started_ns, prefilling = entry
                self._open_steps.remove(entry)
                # With asynchronous scheduling a step is scheduled while the one before it runs.
                started_ns = max(started_ns, self._last_ended_ns)
                rows = self._rows(scheduler_output, sampled, made, prefilling)
                self._writer.write(step, started_ns, ended_ns, rows)
                break
        self._last_ended_ns = ended_ns
        return made

    def _prefilling(self, output: Any) -> frozenset[str]:
        """The requests of a step whose prompt was not whole before it, or is computed again after a preemption."""
        prefilling = {new.req_id for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if (
                computed < self.requests[request_id].num_prompt_tokens
                or output.num_scheduled_tokens[request_id] > 1 + drafts
            ):
                prefilling.add(request_id)
        return frozenset(prefilling)

    def _rows(
        self, output: Any, sampled: dict[str, int], made: Any, prefilling: frozenset[str]
    ) -> list[RequestStep]:
        emitted_by_id = {
            answer.request_id: answer.new_token_ids for answers in made.values() for answer in answers.outputs
        }
        wants_ids = self._writer.wants_token_ids
        rows = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            emitted = emitted_by_id.get(request_id, ())
            # As vLLM counts: before a stop cuts the answer.
            accepted = max(sampled.get(request_id, 0) - 1, 0) if drafts and emitted else 0
            # With asynchronous scheduling the scheduler has placeholders: the drafts stay in the worker.
            knows_drafts = wants_ids and (not drafts or drafts[0] >= 0)
            rows.append(
                RequestStep(
                    request_id,
                    request_id in prefilling,
                    scheduled,
                    len(drafts),
                    accepted,
                    len(emitted),
                    tuple(drafts) if knows_drafts else None,
                    tuple(emitted) if wants_ids else None,
                )
            )
        return rows


def _num_sampled(output: Any) -> dict[str, int]:
    """Tokens that the model gave each request of a step; none of those whose prompt is not whole."""
    tokens = output.sampled_token_ids
    return {name: len(tokens[place]) for name, place in output.req_id_to_index.items()} if tokens else {}
