"""What a lab's lanes take from profiles: step costs of adaptive lanes, and tables from batch to draft length."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from serving.calibration import profile
from serving.calibration.profile import LaneProfile
from serving.config import METHODS_WITH_DRAFT, LabConfig, LaneConfig, ProfileUse, SpeculationConfig, StepCosts
from serving.core.errors import ConfigError
from serving.core.speculation.acceptance import Rates, extended
from serving.core.speculation.cost_model import BatchRange, CostModel
from serving.core.speculation.step_time import FREE_DRAFTS, DraftCost, LinearStepTime


def with_profiles(lab: LabConfig, folder: Path) -> LabConfig:
    """The same lab with what its profiles say written out, so that pages, runs and other nodes have it.

    That of `scheduler.profile`, which is read when the lab is started, gets its whole path.

    Args:
        folder: that of the config, where relative paths begin.

    Raises:
        ConfigError: a profile cannot be read or lacks what is wanted; the text names file, lane and setting.
    """
    lanes = tuple(
        _with_profile(lane, lane.model.name if lane.model else lab.model.name, folder) for lane in lab.lanes
    )
    update: dict[str, object] = {"lanes": lanes}
    if (given := lab.scheduler.profile) is not None:
        path = os.path.abspath(folder / Path(given).expanduser())
        update["scheduler"] = lab.scheduler.model_copy(update={"profile": path})
    return lab.model_copy(update=update)


def _with_profile(lane: LaneConfig, model: str | None, folder: Path) -> LaneConfig:
    speculation = lane.speculation
    if speculation is None or (use := speculation.profile) is None:
        return lane
    wants_table = speculation.num_speculative_tokens_per_batch_size == "auto"
    wants_costs = speculation.method == "adaptive" and speculation.costs is None
    if not (wants_table or wants_costs):
        return lane
    path = folder / Path(use.path).expanduser()
    try:
        whole = profile.load(path)
        if model is not None:  # a model without a name of its own is not one that a profile could name
            whole.check_model(model)
        measured = whole.lane(use.lane or lane.name)
    except ConfigError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(f"lanes[{lane.name}].speculation.profile: {text}") from None
    try:
        if wants_costs:
            update: dict[str, object] = {"costs": step_costs(measured, speculation)}
        else:
            ranges = batch_table(measured, speculation, use, lane.max_num_seqs)
            table = tuple((each.first, each.last, each.num_drafts) for each in ranges)
            update = {"num_speculative_tokens_per_batch_size": table}
    except ValueError as error:
        raise ConfigError(
            f"lanes[{lane.name}].speculation.profile: {path}: lane {measured.lane!r} {error}"
        ) from None
    return lane.model_copy(update={"speculation": speculation.model_copy(update=update)})


def paths_of(lab: LabConfig, folder: Path) -> list[Path]:
    """The lab's profiles, each once."""
    uses = [lane.speculation.profile for lane in lab.lanes if lane.speculation and lane.speculation.profile]
    given = [use.path for use in uses] + [path for path in (lab.scheduler.profile,) if path is not None]
    return list(dict.fromkeys(Path(os.path.abspath(folder / Path(path).expanduser())) for path in given))


def doubts(paths: Sequence[Path]) -> list[str]:
    """Why profiles should not be gone by, a line each: they can be read, and fit badly.

    One that cannot be read is not named: who needs it says so, and a table by hand needs none.
    """
    found = []
    for path in paths:
        with suppress(ConfigError):
            if text := profile.load(path).doubts:
                found.append(f"{path}: {text}")
    return found


def tables_in_words(lab: LabConfig) -> list[str]:
    """What lanes with a table draft, a line each: one that comes out the same everywhere is a fixed number."""
    lines = []
    for lane in lab.lanes:
        table = lane.speculation.num_speculative_tokens_per_batch_size if lane.speculation else None
        if isinstance(table, tuple):
            rows = ", ".join(f"{drafts} at {first} to {last} sequences" for first, last, drafts in table)
            lines.append(f"lane {lane.name} drafts {rows}")
    return lines


def step_costs(measured: LaneProfile, speculation: SpeculationConfig) -> StepCosts:
    """What a step costs the lane by what was measured.

    Raises:
        ValueError: of a learned draft was not measured what it costs.
    """
    is_learned = speculation.drafts_by in METHODS_WITH_DRAFT
    if is_learned and measured.draft_cost is None:
        raise ValueError(
            f"makes no drafts, and {speculation.drafts_by} costs time: name a lane that drafts so (profile.lane)"
        )
    step, draft = measured.step_time, measured.draft_cost or FREE_DRAFTS
    return StepCosts(
        fixed_s=step.fixed_s,
        token_s=step.token_s,
        kv_token_s=step.kv_token_s,
        draft_step_s=draft.step_s,
        draft_pass_s=draft.pass_s,
        draft_pass_sequence_s=draft.pass_sequence_s,
    )


def cost_model(costs: StepCosts, drafts_by: str) -> CostModel:
    """What an adaptive lane decides by.

    Args:
        drafts_by: the method that makes the drafts: a learned draft has a pass in every step, wanted or not.
    """
    return CostModel(
        LinearStepTime(costs.fixed_s, costs.token_s, costs.kv_token_s),
        DraftCost(
            costs.draft_step_s,
            costs.draft_pass_s,
            costs.draft_pass_sequence_s,
            least_passes=int(drafts_by in METHODS_WITH_DRAFT),
        ),
    )


def batch_table(
    measured: LaneProfile, speculation: SpeculationConfig, use: ProfileUse, max_batch: int
) -> tuple[BatchRange, ...]:
    """The best length of a draft for each batch, by the mean acceptance of the workloads.

    Raises:
        ValueError: what it needs was not measured.
    """
    rates, share = _acceptance(measured, use.workload)
    if (wanted := speculation.num_speculative_tokens) > measured.num_drafts:
        raise ValueError(
            f"was measured with {measured.num_drafts} drafts a step, so nobody knows what the last of {wanted} "
            "gives (num_speculative_tokens): draft fewer, or calibrate with as many"
        )
    model = cost_model(step_costs(measured, speculation), speculation.drafts_by)
    return model.batch_table(use.context_tokens, rates, speculation.num_speculative_tokens, max_batch, share)


def _acceptance(measured: LaneProfile, workload: str | None) -> tuple[Rates, float]:
    """Rates by position and share of drafts: of one workload, or the mean of all."""
    if not measured.acceptance:
        raise ValueError("has no acceptance: it makes no drafts; name a lane that does (profile.lane)")
    if workload is not None and workload not in measured.acceptance:
        raise ValueError(
            f"has no workload {workload!r} (profile.workload); it has {', '.join(sorted(measured.acceptance))}"
        )
    names = list(measured.acceptance) if workload is None else [workload]
    every = [extended(measured.acceptance[name], measured.num_drafts) for name in names]
    rates = tuple(fmean(at) for at in zip(*every, strict=True))
    return rates, fmean(measured.draft_share.get(name, 1.0) for name in names)
