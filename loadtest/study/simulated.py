"""The study in virtual time, on engines that are simulated by the profile of some hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from loadtest.simulate.lanes import TextMix, mean_draft_share, mean_rates
from loadtest.simulate.offered import offered_by
from loadtest.study.analysis import Answers, Objective, StepTally, Study, objectives, tally
from loadtest.study.arms import ARMS, BATCHED, FIXED, PLACEMENT, PLUG_IN, SPECULATIVE, TABLE
from loadtest.study.schedule import KINDS, offered_load
from serving.calibration import profile as profiles
from serving.calibration.profile import LaneProfile
from serving.config import SchedulerConfig
from serving.core.speculation.acceptance import Rates, extended, tokens_per_step
from serving.core.speculation.cost_model import Lengths, Outlook
from serving.progress import Say
from serving.simulation.calibrated import LaneModel, same_drafts, table_drafts
from serving.simulation.planned_lab import Offered, PlannedLab, PlannedRun

PROFILES_DIR = Path(__file__).parent / "profiles"
PLAIN_LANE, DRAFTING_LANE = "batched", "speculative"  # of each profile
NO_DRAFTS = (0,) * len(KINDS)
MIX = TextMix(KINDS, (1 / len(KINDS),) * len(KINDS))
SPREAD = 0.4  # of the logarithm of lengths
NUM_REPLICAS = 2
TPOT_RESERVE = 0.2  # between what slots are set for and the objective: answers differ in how they are guessed
FAST_SHARE = 0.25  # of the plain lane's slots: TPOT with so many taken is what the fast objective wants
WAIT_SHARE = 0.5  # of the limit on TTFT: who waits longer is refused, so that those who are served can keep it

Fleet = list[tuple[LaneModel, int]]
Drafts = tuple[int, ...]  # k of each kind of text


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine of the study.

    Attributes:
        name: of its profile's file.
        title: in words.
        lengths: mean tokens of prompts and answers.
        ttft_limit_s: of the objective.
        step_s: how long each level of load is offered; many times as long as a request takes.
    """

    name: str
    title: str
    lengths: Lengths
    ttft_limit_s: float
    step_s: float

    @property
    def profile_file(self) -> Path:
        return PROFILES_DIR / f"{self.name}.json"


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("cpu-2-cores", "2-core CPU, a 135M model, EAGLE-3 head", Lengths(90, 48), 2.0, 40.0),
        Hardware("h200", "H200, an 8B model, EAGLE-3 head", Lengths(256, 192), 1.0, 12.0),
        Hardware("costly-draft", "H200, an 8B model, a 1B model as draft", Lengths(256, 192), 1.0, 12.0),
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is studied on one hardware.

    Attributes:
        fleets: the replicas of each arm.
        capacity_rps: of the better fixed arm, all replicas together, by the cost model.
    """

    hardware: Hardware
    objectives: tuple[Objective, ...]
    fleets: Mapping[str, Fleet]
    capacity_rps: float


def setting(hardware: Hardware) -> Setting:
    """Objectives, fleets and capacity, by the cost model.

    Relaxed is the TPOT that plain decoding needs with all of its slots taken, and `TPOT_RESERVE` more; fast that with
    `FAST_SHARE` of them taken, and as much more. Each lane has as many slots as keep all kinds of text within the
    relaxed limit less the reserve, as somebody would set it who runs that lane alone.
    """
    profile, lengths = profiles.load(hardware.profile_file), hardware.lengths
    plain, drafting = profile.lane(PLAIN_LANE), profile.lane(DRAFTING_LANE)
    context = lengths.prompt_tokens + lengths.output_tokens / 2
    full_s, fast_s = (
        slowest_tpot_s(plain, batch, lengths, NO_DRAFTS)
        for batch in (plain.max_num_seqs, max(1, round(FAST_SHARE * plain.max_num_seqs)))
    )
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
    models = {
        arm: lane_model(lane, drafts, with_slots(lane, lengths, drafts, full_s))
        for arm, lane, drafts in (
            (BATCHED, plain, (no_drafts,) * len(KINDS)),
            (SPECULATIVE, drafting, (all_drafts,) * len(KINDS)),
            (TABLE, drafting, (table,) * len(KINDS)),
            (PLUG_IN, drafting, drafts_of_kinds(drafting, context)),
        )
    }
    half = NUM_REPLICAS // 2
    capacity_rps = max(
        outlook(lane, models[arm].max_num_seqs, lengths, (lane.num_drafts,) * len(KINDS)).tokens_per_s
        for arm, lane in ((BATCHED, plain), (SPECULATIVE, drafting))
    )
    return Setting(
        hardware,
        objectives(hardware.ttft_limit_s, (1 + TPOT_RESERVE) * full_s, (1 + TPOT_RESERVE) * fast_s),
        {arm: [(model, NUM_REPLICAS)] for arm, model in models.items()}
        | {PLACEMENT: [(models[BATCHED], NUM_REPLICAS - half), (models[SPECULATIVE], half)]},
        NUM_REPLICAS * capacity_rps / lengths.output_tokens,
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
        tuple(_rates(lane)),
        lane.max_step_tokens,
        lane.kv_tokens,
        tuple(_draft_shares(lane)),
        drafts,
    )


def with_slots(
    lane: LaneProfile, lengths: Lengths, drafts_of_kinds: Sequence[Drafts], tpot_limit_s: float
) -> int:
    """As many slots as keep every kind of text within the limit; 1 where not even one does."""
    kept = (
        batch
        for batch in range(1, lane.max_num_seqs + 1)
        if slowest_tpot_s(lane, batch, lengths, tuple(own[batch] for own in drafts_of_kinds)) <= tpot_limit_s
    )
    return max(kept, default=1)


def outlook(lane: LaneProfile, batch: int, lengths: Lengths, drafts: Drafts) -> Outlook:
    """What the lane gives when so many requests, as many of each kind, always run.

    Args:
        drafts: k of each kind.
    """
    return lane.cost_model.serve(batch, lengths, *_of_mean_row(lane, drafts))


def slowest_tpot_s(lane: LaneProfile, batch: int, lengths: Lengths, drafts: Drafts) -> float:
    """TPOT then of the kind that gets the fewest tokens from a step."""
    fewest = min(tokens_per_step(extended(rates, k)) for rates, k in zip(_rates(lane), drafts, strict=True))
    return outlook(lane, batch, lengths, drafts).step_s / fewest


def drafts_of_kinds(lane: LaneProfile, context_tokens: float) -> tuple[Drafts, ...]:
    """k of each kind by batch, shape (kinds, max_num_seqs + 1): those that give most tokens a second together.

    As if the plug-in knew each row's acceptance from its first step on, of a batch with as many rows of each kind.
    """

    def best(batch: int) -> Drafts:
        # Of equals the fewest drafts: `max` keeps the first.
        return max(
            product(range(lane.num_drafts + 1), repeat=len(KINDS)),
            key=lambda drafts: lane.cost_model.decode(
                batch, context_tokens, *_of_mean_row(lane, drafts)
            ).tokens_per_s,
        )

    choices = [best(max(1, batch)) for batch in range(lane.max_num_seqs + 1)]
    return tuple(zip(*choices, strict=True))


def _of_mean_row(lane: LaneProfile, drafts: Drafts) -> tuple[int, Rates, float]:
    """The longest draft, acceptance by position and mean length over the longest, on the mean of all kinds."""
    longest = max(drafts)
    # A kind with fewer drafts accepts none beyond them.
    rows = [
        (*extended(rates, k), *(0.0,) * (longest - k)) for rates, k in zip(_rates(lane), drafts, strict=True)
    ]
    drafted = fmean(k * share for k, share in zip(drafts, _draft_shares(lane), strict=True))
    return longest, tuple(map(fmean, zip(*rows, strict=True))), drafted / longest if longest else 1.0


def _rates(lane: LaneProfile) -> list[Rates]:
    return [lane.acceptance.get(kind, ()) for kind in KINDS]


def _draft_shares(lane: LaneProfile) -> list[float]:
    return [lane.draft_share.get(kind, 1.0) for kind in KINDS]


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
    hardware: Hardware,
    *,
    repeats: int,
    seed: int,
    say: Say,
    step_s: float | None = None,
    stand_ins: Mapping[str, str] | None = None,
) -> tuple[Setting, dict[str, Study]]:
    """All arms under the same arrivals, as often as `repeats` says, each time with others; by objective.

    Args:
        step_s: of each level of load; None: the hardware's own.
        stand_ins: arms that another one runs instead of: to see that a bad one is found out.
    """
    given = setting(hardware)
    step_s = step_s or hardware.step_s
    load = offered_load(given.capacity_rps, step_s)
    tallies: dict[str, dict[str, list[tuple[StepTally, ...]]]] = {}
    for repeat in range(repeats):
        offered = offered_by(
            load,
            MIX,
            seed + repeat,
            prompt_tokens=round(hardware.lengths.prompt_tokens),
            output_tokens=round(hardware.lengths.output_tokens),
            spread=SPREAD,
        )
        for name in ARMS:
            arm = (stand_ins or {}).get(name, name)
            say(f"{hardware.title}: repeat {repeat + 1} of {repeats}, {name}, {len(offered):,} requests")
            config = scheduler_of(arm, hardware, seed + repeat)
            run = PlannedLab(config, given.fleets[arm], offered, seed=seed + repeat).run()
            answers = answers_of(run, offered)
            for objective in given.objectives:
                runs = tallies.setdefault(objective.name, {}).setdefault(name, [])
                runs.append(tally(answers, objective, step_s))
    return given, {name: Study(by_arm, FIXED, step_s) for name, by_arm in tallies.items()}
