"""A recorded trace as measurements: how long steps took by what was in them, and what became of drafts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from serving.calibration.fit import StepPoint
from serving.core.speculation.estimator import DraftOutcome
from serving.tracing.events import Phase, StepEvent


def step_points(events: Iterable[StepEvent], phase: Phase | None = None) -> list[StepPoint]:
    """Every step whose requests were all seen from their beginning, in order, of one lane's replicas.

    What a request holds in the KV cache is counted along: positions computed, less refused drafts. A prefix that
    came from a cache is not seen and not counted, so calibrate without prefix caching. Steps with drafts of several
    lengths have their mean, over the sequences that had one, rounded. One that was preempted begins anew.

    Args:
        events: all of a recording; one of a part of the requests does not know what else was in a step.
        phase: only steps that did nothing else.
    """
    points = []
    for _, of_replica in _by_replica(events):
        kv_tokens: dict[str, int] = {}
        decoding: set[str] = set()
        for _, step_events in groupby(of_replica, key=lambda event: event.step):
            step = list(step_events)
            for event in step:
                if event.phase is Phase.DECODE:
                    decoding.add(event.request_id)
                elif event.request_id not in kv_tokens or event.request_id in decoding:
                    kv_tokens[event.request_id] = 0
                    decoding.discard(event.request_id)
            is_wanted = phase is None or all(event.phase is phase for event in step)
            if is_wanted and all(event.request_id in kv_tokens for event in step):
                points.append(_point(step, sum(kv_tokens[event.request_id] for event in step)))
            for event in step:
                if event.request_id in kv_tokens:
                    refused = event.drafted_tokens - event.accepted_tokens
                    kv_tokens[event.request_id] += event.scheduled_tokens - refused
    return points


def draft_outcome(events: Iterable[StepEvent], max_drafts: int) -> DraftOutcome:
    """What became of the drafts of these decode steps, by position; a step without a draft counts as one refused.

    So the rates are of all decode steps, as a profile's are. The first token of an answer comes with its prompt and
    is no decode step.
    """
    accepted = [0] * max_drafts
    num_steps = 0
    for event in events:
        if event.phase is Phase.DECODE and event.emitted_tokens:
            num_steps += 1
            for position in range(min(event.accepted_tokens, max_drafts)):
                accepted[position] += 1
    return DraftOutcome.of_positions(num_steps, accepted)


def draft_share(events: Iterable[StepEvent], max_drafts: int) -> float | None:
    """Mean length of drafts over k, decode steps without one included; None where nothing was decoded."""
    drafted = [
        event.drafted_tokens for event in events if event.phase is Phase.DECODE and event.emitted_tokens
    ]
    return sum(drafted) / (max_drafts * len(drafted)) if drafted and max_drafts else None


def _by_replica(events: Iterable[StepEvent]) -> Iterator[tuple[str, list[StepEvent]]]:
    by_replica: dict[str, list[StepEvent]] = defaultdict(list)
    for event in events:
        by_replica[event.replica_id].append(event)
    for replica_id, of_replica in by_replica.items():
        yield replica_id, sorted(of_replica, key=lambda event: event.step)


def _point(step: Sequence[StepEvent], kv_tokens: int) -> StepPoint:
    drafts = [event.drafted_tokens for event in step if event.drafted_tokens]
    return StepPoint(
        tokens=sum(event.scheduled_tokens for event in step),
        kv_tokens=kv_tokens,
        seconds=(step[0].ended_ns - step[0].started_ns) / 1e9,
        num_drafts=max(1, round(sum(drafts) / len(drafts))) if drafts else 0,
        drafted_sequences=len(drafts),
        prompt_tokens=sum(event.scheduled_tokens for event in step if event.phase is Phase.PREFILL),
    )
