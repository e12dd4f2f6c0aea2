"""What is noted of a step of vLLM, on a scheduler that plays its part. The real one: tests/e2e/test_trace.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engines.steps.log import PATH_VARIABLE, StepLog
from serving.engines.steps.notes import NotesSteps
from serving.tracing.events import Phase, StepEvent


class Played:
    """Gives what it is told to, and cuts an answer in place as vLLM does."""

    def __init__(self) -> None:
        self.current_step = 0
        self.requests = {"a": SimpleNamespace(num_prompt_tokens=10)}
        self.next: Any = None
        self.limit = 100

    def schedule(self) -> Any:
        self.current_step += 1
        return self.next

    def update_from_output(self, _: Any, made: Any) -> Any:
        outputs = []
        for name, place in made.req_id_to_index.items():
            tokens = made.sampled_token_ids[place] if made.sampled_token_ids else []
            del tokens[self.limit :]
            if tokens:
                outputs.append(SimpleNamespace(request_id=name, new_token_ids=tokens))
        return {0: SimpleNamespace(outputs=outputs)}


def scheduled(computed: int, tokens: int, drafts: tuple[int, ...] = (), is_new: bool = False) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id="a")] if is_new else [],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[] if is_new else ["a"], num_computed_tokens=[] if is_new else [computed]
        ),
        scheduled_spec_decode_tokens={"a": list(drafts)} if drafts else {},
        num_scheduled_tokens={"a": tokens} if tokens else {},
    )


def sampled(*tokens: int) -> Any:
    return SimpleNamespace(sampled_token_ids=[list(tokens)], req_id_to_index={"a": 0})


class Scene:
    def __init__(self, log: StepLog) -> None:
        class Noting(NotesSteps, Played):
            pass

        self.log = log
        self.scheduler: Any = Noting()

    def schedule(self, output: Any) -> Any:
        self.scheduler.next = output
        return self.scheduler.schedule()

    def step(self, output: Any, made: Any) -> None:
        self.scheduler.update_from_output(self.schedule(output), made)

    def events(self) -> list[StepEvent]:
        return list(self.log.events("r"))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    log = StepLog()
    monkeypatch.setenv(PATH_VARIABLE, log.path)
    scene = Scene(log)
    log.start(100, with_token_ids=True)
    yield scene
    log.close()


def test_a_prompt_in_two_parts_and_its_answer(scene: Scene) -> None:
    scene.step(scheduled(0, 6, is_new=True), sampled())
    scene.step(scheduled(6, 4), sampled(5))
    scene.step(scheduled(10, 1), sampled(6))
    found = [(one.step, one.phase, one.scheduled_tokens, one.emitted_ids) for one in scene.events()]
    assert found == [
        (1, Phase.PREFILL, 6, ()),
        (2, Phase.PREFILL, 4, (5,)),
        (3, Phase.DECODE, 1, (6,)),
    ]


@pytest.mark.parametrize(
    ("made", "limit", "accepted", "emitted"),
    [((7, 8, 9), 100, 2, 3), ((3,), 100, 0, 1), ((7, 8, 1, 2, 4), 100, 4, 5), ((7, 8, 1, 2, 4), 2, 4, 2)],
)
def test_drafts_are_counted_before_the_answer_is_cut(
    scene: Scene, made: tuple[int, ...], limit: int, accepted: int, emitted: int
) -> None:
    scene.scheduler.limit = limit
    scene.step(scheduled(10, 5, drafts=(7, 8, 1, 2)), sampled(*made))
    (event,) = scene.events()
    assert (event.phase, event.drafted_tokens) == (Phase.DECODE, 4)
    assert (event.accepted_tokens, event.emitted_tokens) == (accepted, emitted)
    assert (event.drafted_ids, event.emitted_ids) == ((7, 8, 1, 2), made[:limit])


def test_drafts_that_stay_in_the_worker_are_counted_and_not_named(scene: Scene) -> None:
    scene.step(scheduled(10, 3, drafts=(-1, -1)), sampled(4, 5))
    (event,) = scene.events()
    assert (event.drafted_tokens, event.drafted_ids, event.emitted_ids) == (2, None, (4, 5))


def test_what_is_computed_again_after_a_preemption_is_a_prefill(scene: Scene) -> None:
    scene.step(scheduled(12, 5), sampled(4))
    assert scene.events()[0].phase is Phase.PREFILL


def test_steps_scheduled_early_do_not_overlap(scene: Scene) -> None:
    first = scene.schedule(scheduled(10, 1))
    second = scene.schedule(scheduled(11, 1))
    for output in (first, second):
        scene.scheduler.update_from_output(output, sampled(4))
    one, two = scene.events()
    assert (one.step, two.step) == (1, 2)
    assert one.started_ns < one.ended_ns <= two.started_ns < two.ended_ns


def test_an_empty_step_and_one_that_was_under_way_at_the_start_are_left_out(scene: Scene) -> None:
    scene.step(scheduled(0, 0), sampled())
    scene.log.stop()
    early = scene.schedule(scheduled(10, 1))
    scene.log.start(100, with_token_ids=False)
    scene.scheduler.update_from_output(early, sampled(4))
    scene.step(scheduled(11, 1), sampled(4))
    (event,) = scene.events()
    assert (event.step, event.emitted_tokens, event.emitted_ids) == (3, 1, None)


def test_an_aborted_request_got_nothing_of_its_step(scene: Scene) -> None:
    output = scene.schedule(scheduled(10, 3, drafts=(7, 8)))
    made = sampled(7, 8, 9)
    scene.scheduler.limit = 0  # vLLM gives no output for it
    scene.scheduler.update_from_output(output, made)
    (event,) = scene.events()
    assert (event.accepted_tokens, event.emitted_tokens) == (0, 0)
