"""Asks the running lab for the cells of a calibration, and makes a profile of the steps that answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from statistics import fmean, median
from typing import Any

from loadtest.calibrate.design import PASSES, Cell, drafted_cells, plain_cells
from loadtest.client.lane_drafts import chooses_drafts, drafts_by, num_drafts_of
from loadtest.client.lane_models import lane_models, lanes_of_own_model
from loadtest.client.traced_lab import Question, TracedAnswer, TracedLab, TracedLabError
from loadtest.lesson.measure import NS_PER_S, busy_s, chat_of, engine_steps
from loadtest.offer.prompts import Slot, chat, copy, story
from loadtest.offer.request_body import Message
from serving import machine, run_directory
from serving.calibration.fit import StepPoint
from serving.calibration.profile import FORMAT, LaneProfile, Profile, measured_lane
from serving.config import METHODS_WITH_DRAFT
from serving.core.lane import DRAFTING, Strategy
from serving.core.speculation.cost_model import Outlook
from serving.progress import Say
from serving.tracing.events import Phase, StepEvent
from serving.tracing.step_points import draft_outcome, draft_share, step_points

MAX_STEP_TOKENS = 2048  # where the replica does not say
PROMPTS: dict[str, Callable[[Slot], tuple[Message, ...]]] = {"copy": copy, "story": story, "chat": chat}


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """One cell: its steps, as points and as they were; of requests that were alone, the time outside of them."""

    cell: Cell
    points: tuple[StepPoint, ...] = ()
    steps: tuple[StepEvent, ...] = ()
    overheads_s: tuple[float, ...] = ()

    def and_also(self, other: MeasuredCell) -> MeasuredCell:
        """The same cell, measured once more."""
        return MeasuredCell(
            self.cell,
            self.points + other.points,
            self.steps + other.steps,
            self.overheads_s + other.overheads_s,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """Output tokens/s of the steps in which a whole cell decoded, measured and reckoned by the profile."""

    cell: Cell
    context_tokens: float
    measured_tokens_per_s: float
    expected: Outlook

    @property
    def error(self) -> float:
        """Share of the measured."""
        return self.expected.tokens_per_s / self.measured_tokens_per_s - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """The profile and what it was made of."""

    profile: Profile
    compared: tuple[Compared, ...]


def calibrate(lab: TracedLab, lanes: Sequence[str], now: datetime, say: Say) -> Calibration:
    """Measure these lanes, those without drafts first, for the cost of drafts is told from them.

    Raises:
        TracedLabError: a lane cannot be calibrated, they have several models, a request failed, or the steps say
            too little.
    """
    configs = {config["name"]: config for config in lab.description["config"]["lanes"]}
    if not lanes:
        raise TracedLabError(
            "there is no lane to calibrate: name one that batches, with one replica (--lanes)"
        )
    for name in lanes:
        if lanes.count(name) > 1:
            raise TracedLabError(f"lane {name!r} is named {lanes.count(name)} times (--lanes)")
        _check(lab, configs, name)
    if all(num_drafts_of(configs[name]) for name in lanes):
        raise TracedLabError(
            f"{', '.join(lanes)} draft: what drafts cost is told from a lane of that model without them; name it "
            "too (--lanes)"
        )
    models = lane_models(lab.description["config"], ())
    # What drafts cost is told from steps without them, of the same model.
    if len(paths := {models[name].path for name in lanes}) > 1:
        raise TracedLabError(
            f"lanes {', '.join(lanes)} serve {' and '.join(sorted(paths))}: a profile is of one model"
        )
    in_order = sorted(lanes, key=lambda name: configs[name]["strategy"] in DRAFTING)
    cells = [cell for name in in_order for cell in _cells(lab, configs[name])]
    fresh = {name: count() for name in in_order}  # numbers of prompts: none is asked twice
    by_cell = {cell: MeasuredCell(cell) for cell in cells}
    num_measured, num_in_all = 0, sum(cell.passes for cell in cells)
    for number in range(PASSES):
        lane = None
        for cell in cells:
            if number < cell.passes:
                if cell.lane != lane:
                    # An engine that has had nothing to do is slower at first.
                    lane = cell.lane
                    lab.ask(_questions(replace(cell, batch=1), fresh[lane]))
                num_measured += 1
                say(f"{num_measured} of {num_in_all}: {cell.label} ({number + 1} of {cell.passes})")
                by_cell[cell] = by_cell[cell].and_also(_measure(lab, cell, fresh[cell.lane]))
    made: list[LaneProfile] = []
    compared: list[Compared] = []
    for name in in_order:
        num_drafts = num_drafts_of(configs[name])
        measured = [each for cell, each in by_cell.items() if cell.lane == name]
        plain = next((lane for lane in made if not lane.num_drafts), None)
        try:
            (replica,) = lab.replicas(name)
            profile = _lane_profile(configs[name], replica, measured, num_drafts, plain)
        except ValueError as error:
            raise TracedLabError(f"lane {name}: {error}") from None
        made.append(profile)
        compared += filter(None, (_compare(each, profile) for each in measured))
    versions = run_directory.installed_versions()
    profile_of_all = Profile(FORMAT, now, lab.model_of(lanes[0]), machine.describe(), versions, tuple(made))
    return Calibration(profile_of_all, tuple(compared))


def _check(lab: TracedLab, configs: dict[str, Any], name: str) -> None:
    if name not in configs:
        raise TracedLabError(f"there is no lane {name!r}; the lab has {', '.join(configs)}")
    if (found := len(lab.replicas(name))) != 1:
        raise TracedLabError(
            f"lane {name!r} has {found} replicas; calibration needs 1, whose steps are all of the lane's"
        )
    if why := _why_not(configs[name]):
        raise TracedLabError(f"lane {name!r} {why}")


def _why_not(config: dict[str, Any]) -> str:
    """Why acceptance at one k cannot be measured on it; empty where it can."""
    if config.get("urls"):
        return "is a server that somebody else runs, which records no steps"
    if chooses_drafts(config):
        return (
            "chooses how many tokens it drafts: calibrate a lane that always drafts as many, and name that one in "
            "speculation.profile.lane"
        )
    if drafts_by(config) == "oracle":
        return "drafts with the acceptance that its config asks for: there is nothing to measure"
    return ""


def _cells(lab: TracedLab, config: dict[str, Any]) -> list[Cell]:
    name, running = config["name"], lab.max_running(config["name"])
    if num_drafts_of(config):
        return drafted_cells(name, running)
    return plain_cells(name, running, lab.max_model_len)


def _measure(lab: TracedLab, cell: Cell, fresh: Iterator[int]) -> MeasuredCell:
    """The cell in a pass."""
    steps: list[StepEvent] = []
    points: list[StepPoint] = []
    overheads_s: list[float] = []
    for _ in range(cell.repeats):
        traced = lab.ask(_questions(cell, fresh))
        points += step_points(traced.steps)
        steps += traced.steps
        if cell.batch == 1:
            overheads_s += map(_outside_steps_s, traced.answers)
    return MeasuredCell(cell, tuple(points), tuple(steps), tuple(overheads_s))


def _outside_steps_s(answer: TracedAnswer) -> float:
    """Before its first step and after its last."""
    first, last = answer.steps[0], answer.steps[-1]
    return (first.started_ns - answer.sent_ns + answer.ended_ns - last.ended_ns) / NS_PER_S


def _questions(cell: Cell, fresh: Iterator[int]) -> list[Question]:
    return [
        # As users ask: what streaming takes of the cores is in the steps then.
        Question(cell.lane, _body(cell, next(fresh)), cell.output_tokens, is_streamed=True)
        for _ in range(cell.batch)
    ]


def _body(cell: Cell, number: int) -> dict[str, Any]:
    if cell.workload is None:
        return {"prompt": "the" + " the" * (cell.prompt_tokens - 1)}
    return chat_of(PROMPTS[cell.workload], number)


def _lane_profile(
    config: dict[str, Any],
    replica: dict[str, Any],
    measured: Sequence[MeasuredCell],
    num_drafts: int,
    plain: LaneProfile | None,
) -> LaneProfile:
    by_workload: dict[str, list[StepEvent]] = {}
    for each in measured:
        if each.cell.workload is not None:
            by_workload.setdefault(each.cell.workload, []).extend(each.steps)
    rates, shares = {}, {}
    if num_drafts:
        for workload, steps in by_workload.items():
            outcome = draft_outcome(steps, num_drafts)
            rates[workload] = outcome.rates
            shares[workload] = draft_share(steps, num_drafts) or 0.0
    return measured_lane(
        config["name"],
        [point for each in measured for point in each.points],
        max_num_seqs=config["max_num_seqs"],
        max_step_tokens=replica.get("max_step_tokens") or MAX_STEP_TOKENS,
        kv_tokens=replica.get("kv_tokens"),
        num_drafts=num_drafts,
        plain=plain,
        acceptance=rates,
        draft_share=shares,
        is_learned=drafts_by(config) in METHODS_WITH_DRAFT,
        overhead_s=median([overhead_s for each in measured for overhead_s in each.overheads_s]),
    )


def _compare(measured: MeasuredCell, lane: LaneProfile) -> Compared | None:
    """Over the steps in which all of a cell's requests decoded; None where there was none."""
    cell = measured.cell
    whole = [events for events in engine_steps(measured.steps) if _all_decode(events, cell.batch)]
    if not whole:
        return None
    spent_s = busy_s(events[0] for events in whole)
    emitted = sum(event.emitted_tokens for events in whole for event in events)
    context = _mean_context(measured.steps, whole)
    rates = lane.acceptance.get(cell.workload or "", ())
    share = lane.draft_share.get(cell.workload or "", 1.0)
    expected = lane.cost_model.decode(cell.batch, context, lane.num_drafts, rates, share)
    return Compared(cell, context, emitted / spent_s, expected)


def _all_decode(events: Sequence[StepEvent], batch: int) -> bool:
    return len(events) == batch and all(
        event.phase is Phase.DECODE and event.emitted_tokens for event in events
    )


def _mean_context(steps: Sequence[StepEvent], whole: Sequence[Sequence[StepEvent]]) -> float:
    """Mean positions in the KV cache of a sequence, over these steps: its prompt and what was emitted before."""
    held: dict[str, int] = {}
    before: dict[tuple[str, int], int] = {}
    for event in sorted(steps, key=lambda event: (event.replica_id, event.step)):
        before[event.request_id, event.step] = held.get(event.request_id, 0)
        grown = event.scheduled_tokens if event.phase is Phase.PREFILL else event.emitted_tokens
        held[event.request_id] = held.get(event.request_id, 0) + grown
    return fmean(before[event.request_id, event.step] for events in whole for event in events)


def default_lanes(lab: TracedLab) -> list[str]:
    """Lanes of the lab's model with one replica that batch, without drafts or with always as many."""
    own = lanes_of_own_model(lab.description["config"])
    return [
        str(config["name"])
        for config in lab.description["config"]["lanes"]
        if config["strategy"] in {Strategy.BATCHED, *DRAFTING}
        and len(lab.replicas(config["name"])) == 1
        and config["name"] in own
        and not _why_not(config)
    ]
