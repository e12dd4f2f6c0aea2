"""The study in virtual time, on engines that are simulated by the profile of some hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.simulate.lanes import mean_draft_share, mean_rates
from loadtest.simulate.offered import offered_by
from loadtest.study.analysis import Answers, Objective, StepTally, Study, by_step, tally
from loadtest.study.arms import ARMS, BATCHED, FIXED, PLACEMENT, PLUG_IN, SPECULATIVE, TABLE
from loadtest.study.reckon import (
    MIX,
    Drafts,
    capacity_rps,
    draft_shares,
    drafts_of_kinds,
    objectives_of,
    rates_of_kinds,
    slots_within,
    tpot_limits_s,
)
from loadtest.study.schedule import KINDS, offered_load, rise_and_fall
from serving.calibration import profile as profiles
from serving.calibration.profile import LaneProfile
from serving.config import SchedulerConfig
from serving.core.speculation.cost_model import Lengths
from serving.core.speculation.text_kind import TextKind
from serving.progress import Say
from serving.simulation.calibrated import LaneModel, same_drafts, table_drafts
from serving.simulation.planned_lab import Offered, PlannedLab, PlannedRun

PROFILES_DIR = Path(__file__).parent / "profiles"
PLAIN_LANE, DRAFTING_LANE = "batched", "speculative"  # of each profile
TEXT_KINDS = (TextKind.COPY, TextKind.OPEN)  # what the gateway takes them for
SPREAD = 0.4  # of the logarithm of lengths
WAIT_SHARE = 0.5  # of the limit on TTFT: who waits longer is refused, so that who is served can keep it

Fleet = list[tuple[LaneModel, int]]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine of the study.

    Attributes:
        name: of its profile's file.
        title: in words.
        lengths: mean tokens of prompts and answers.
        ttft_limit_s: of the objective.
        step_s: how long each level of load is offered; many times as long as a request takes.
        num_machines: each runs one engine, or, where the engines share its cores, one of each lane.
        shares_cores: adaptive placement chooses between engines that take turns on one machine; else half of the
            machines run each lane.
    """

    name: str
    title: str
    lengths: Lengths
    ttft_limit_s: float
    step_s: float
    num_machines: int
    shares_cores: bool = False

    @property
    def profile_file(self) -> Path:
        return PROFILES_DIR / f"{self.name}.json"

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """By what plain decoding needs on it."""
        plain = profiles.load(self.profile_file).lane(PLAIN_LANE)
        return objectives_of(plain, self.lengths, self.ttft_limit_s)


_CPU = Hardware(
    "cpu-2-cores", "2-core CPU, a 135M model, EAGLE-3 head", Lengths(90, 48), 2.0, 40.0, 1, shares_cores=True
)
_H200 = Hardware("h200", "2 x H200, an 8B model, EAGLE-3 head", Lengths(256, 192), 1.0, 6.0, 2)
_COSTLY = Hardware(
    "costly-draft", "2 x H200, an 8B model, a 1B model as draft", Lengths(256, 192), 1.0, 12.0, 2
)
HARDWARE = {hardware.name: hardware for hardware in (_CPU, _H200, _COSTLY)}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is studied on one hardware under one objective.

    Attributes:
        fleets: the replicas of each arm.
        capacity_rps: of the better fixed arm, all replicas together, by the cost model.
    """

    hardware: Hardware
    objective: Objective
    fleets: Mapping[str, Fleet]
    capacity_rps: float


def setting(hardware: Hardware, objective: Objective) -> Setting:
    """Fleets and capacity, by the cost model.

    Each lane has as many slots as keep all kinds of text within the objective's TPOT less `TPOT_RESERVE`, as
    somebody would set it who runs that lane alone for this objective.
    """
    profile, lengths = profiles.load(hardware.profile_file), hardware.lengths
    plain, drafting = profile.lane(PLAIN_LANE), profile.lane(DRAFTING_LANE)
    context = lengths.context_tokens
    table = table_drafts(
        drafting.cost_model.batch_table(
            context,
            mean_rates(drafting, MIX),
            drafting.num_drafts,
            drafting.max_num_seqs,
            mean_draft_share(drafting, MIX),
        ),
        drafting.max_num_seqs,
    )
    no_drafts, all_drafts = (same_drafts(lane.num_drafts, lane.max_num_seqs) for lane in (plain, drafting))
    limits_s = tpot_limits_s(objective)
    models = {
        arm: lane_model(lane, drafts, slots_within(lane, lengths, drafts, limits_s))
        for arm, lane, drafts in (
            (BATCHED, plain, (no_drafts,) * len(KINDS)),
            (SPECULATIVE, drafting, (all_drafts,) * len(KINDS)),
            (TABLE, drafting, (table,) * len(KINDS)),
            (PLUG_IN, drafting, drafts_of_kinds(drafting, context)),
        )
    }
    per_replica_rps = capacity_rps(
        [(plain, models[BATCHED].max_num_seqs), (drafting, models[SPECULATIVE].max_num_seqs)], lengths
    )
    count = hardware.num_machines
    each = count if hardware.shares_cores else count // 2
    return Setting(
        hardware,
        objective,
        {arm: [(model, count)] for arm, model in models.items()}
        | {PLACEMENT: [(models[BATCHED], each), (models[TABLE], each)]},
        count * per_replica_rps,
    )


def lane_model(lane: LaneProfile, drafts_of_kinds: Sequence[Drafts], max_num_seqs: int) -> LaneModel:
    """The lane as its replicas are simulated.

    Args:
        drafts_of_kinds: k of each kind by the sequences that decode, up to `max_num_seqs` or beyond.
    """
    drafts = tuple(own[: max_num_seqs + 1] for own in drafts_of_kinds)
    return LaneModel(
        lane.lane,
        lane.cost_model,
        drafts[0],
        tuple(rates_of_kinds(lane)),
        lane.max_step_tokens,
        lane.kv_tokens,
        tuple(draft_shares(lane)),
        drafts,
        lane.overhead_s,
        lane.residuals.noise,
    )


def scheduler_of(arm: str, hardware: Hardware, seed: int) -> SchedulerConfig:
    """Its settings: alike for all arms but for the placement."""
    settings: dict[str, object] = {
        "max_queue_wait_s": WAIT_SHARE * hardware.ttft_limit_s,
        "max_waiting_requests": 1_000_000,
        "max_waiting_tokens": 10**9,
        "seed": seed,
    }
    if arm == PLACEMENT:
        settings |= {"placement": "adaptive", "profile": str(hardware.profile_file)}
    return SchedulerConfig.model_validate(settings)


def answers_of(run: PlannedRun, offered: Sequence[Offered]) -> Answers:
    """What the study looks at of a simulated run."""
    lanes = tuple(dict.fromkeys(replica.lane for replica in run.replicas))
    of_replica = np.array([lanes.index(replica.lane) for replica in run.replicas])
    return Answers(
        np.array([request.at_s for request in offered]),
        np.array([request.kind for request in offered]),
        run.ttft_s,
        run.tpot_s,
        run.e2e_s,
        np.where(np.isfinite(run.e2e_s), of_replica[run.served_by], -1),
        lanes,
    )


def study(
    given: Setting,
    *,
    repeats: int,
    seed: int,
    say: Say,
    step_s: float | None = None,
    stand_ins: Mapping[str, str] | None = None,
) -> Study:
    """All arms under the same arrivals, as often as `repeats` says, each time with others.

    Args:
        step_s: of each level of load; None: the hardware's own.
        stand_ins: arms that another one runs instead of: to see that a bad one is found out.
    """
    hardware = given.hardware
    step_s = step_s or hardware.step_s
    load = offered_load(given.capacity_rps, step_s)
    tallies: dict[str, list[tuple[StepTally, ...]]] = {}
    for repeat in range(repeats):
        offered = offered_by(
            load,
            MIX,
            seed + repeat,
            prompt_tokens=round(hardware.lengths.prompt_tokens),
            output_tokens=round(hardware.lengths.output_tokens),
            spread=SPREAD,
        )
        say(
            f"{hardware.name}, {given.objective.name}: repeat {repeat + 1} of {repeats}, {len(offered):,} requests"
        )
        for name in ARMS:
            arm = (stand_ins or {}).get(name, name)
            run = PlannedLab(
                scheduler_of(arm, hardware, seed + repeat),
                given.fleets[arm],
                offered,
                seed=seed + repeat,
                text_kinds=TEXT_KINDS,
                shares_cores=hardware.shares_cores,
            ).run()
            steps = by_step(answers_of(run, offered), step_s, len(rise_and_fall()))
            tallies.setdefault(name, []).append(tuple(tally(step, given.objective) for step in steps))
    return Study(tallies, FIXED, step_s)
