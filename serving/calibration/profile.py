"""A profile: what the lanes of one model were measured to do on one machine. A JSON file.

`tandem simulate` reckons with it. It says itself where, when and with what it was measured.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from serving.calibration.fit import (
    Residuals,
    StepPoint,
    fit_draft_cost,
    fit_plain,
    fit_prompt_cost,
    fit_roofline,
)
from serving.core.errors import ConfigError, TandemError
from serving.core.speculation.acceptance import Rates, checked_rates
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import (
    FREE_DRAFTS,
    FREE_PROMPTS,
    DraftCost,
    LinearStepTime,
    PromptCost,
    RooflineStepTime,
)
from serving.core.speculation.text_kind import TextKind

FORMAT = 1
LANE_NAME = re.compile(r"[a-z0-9][a-z0-9.\-]{0,62}")  # as a lab's config has it
MAX_NUM_SEQS = 4096  # likewise
MAX_DRAFTS = 64  # likewise
MAX_TOKENS = 1_000_000_000
MAX_STEP_S = 3600.0
MAX_NOISE = 10.0
DOUBTFUL_SHARE = 0.3  # half of the steps are further off than this: something else used the machine
# What the prompts of the load lab's workloads are taken for; a workload with a kind's own name is of that kind.
KIND_OF_WORKLOAD = {
    "copy": TextKind.COPY,
    "edit": TextKind.COPY,
    "story": TextKind.OPEN,
    "chat": TextKind.GROUNDED,
    "rag": TextKind.GROUNDED,
} | {str(kind): kind for kind in TextKind}


class LaneProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lane.

    Attributes:
        lane: its name.
        max_num_seqs: sequences of one step at most.
        max_step_tokens: positions of one step at most; longer prompts are computed in several (chunked prefill).
        kv_tokens: positions that its KV cache holds; None: more than its sequences can fill.
        step_time: the form that is reckoned with.
        roofline: the other form, beside it; its knee is where the machine turns from bandwidth to arithmetic.
        residuals: of `step_time`.
        num_drafts: k; 0 without speculation. Of a lane that chooses k, the most.
        draft_cost: what drafts add to a step; None without speculation.
        acceptance: by workload, rates by position, as `serving.core.speculation.acceptance` defines them; of all
            decode steps, those without a draft included.
        draft_share: by workload, the mean length of drafts over k, steps without one included; 1 where not given.
        points: what was measured.
        prompt_cost: what steps with prompts take longer; None: nothing.
        overhead_s: of a request that is alone, in no step: client, gateway, scheduler, reading and writing text.
    """

    lane: str
    max_num_seqs: int
    step_time: LinearStepTime
    residuals: Residuals
    roofline: RooflineStepTime | None = None
    max_step_tokens: int = 2048
    kv_tokens: int | None = None
    num_drafts: int = 0
    draft_cost: DraftCost | None = None
    acceptance: dict[str, Rates] = {}
    draft_share: dict[str, float] = {}
    points: tuple[StepPoint, ...] = ()
    overhead_s: float = 0.0
    prompt_cost: PromptCost | None = None

    def __post_init__(self) -> None:
        if not LANE_NAME.fullmatch(self.lane):
            raise ValueError(f"lane {self.lane!r:.100} is no name of a lane")
        bounds: dict[str, tuple[int | None, int, int]] = {
            "max_num_seqs": (self.max_num_seqs, 1, MAX_NUM_SEQS),
            "max_step_tokens": (self.max_step_tokens, 1, MAX_TOKENS),
            "kv_tokens": (self.kv_tokens, 1, MAX_TOKENS),
            "num_drafts": (self.num_drafts, 0, MAX_DRAFTS),
        }
        for name, (value, least, most) in bounds.items():
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} is {value}, must be in {least}..{most}")
        token_s, drafting_s = self.step_time.step_s(1, 0), self.cost_model.decode_step_s(1, 1, 1)
        if not (token_s > 0 and drafting_s <= MAX_STEP_S):
            raise ValueError(
                f"by step_time and draft_cost a token's step takes {token_s:g} s, with a draft {drafting_s:g} s: "
                f"must be above 0 and at most {MAX_STEP_S:g} s"
            )
        if not 0 <= self.overhead_s <= MAX_STEP_S:
            raise ValueError(f"overhead_s is {self.overhead_s:g}, must be in 0..{MAX_STEP_S:g}")
        if not 0 <= self.residuals.noise <= MAX_NOISE:
            raise ValueError(f"residuals.noise is {self.residuals.noise:g}, must be in 0..{MAX_NOISE:g}")
        for rates in self.acceptance.values():
            checked_rates(rates)
        for workload, share in self.draft_share.items():
            if not 0 <= share <= 1:
                raise ValueError(f"draft_share of {workload!r} is {share:g}, must be in 0..1")

    @property
    def is_doubtful(self) -> bool:
        """Whether its own steps are so far from the fit that nothing should be decided by it."""
        return self.residuals.median_share > DOUBTFUL_SHARE

    @property
    def cost_model(self) -> CostModel:
        return CostModel(self.step_time, self.draft_cost or FREE_DRAFTS, self.prompt_cost or FREE_PROMPTS)

    def with_passes_of_learned_drafts(self) -> LaneProfile:
        """As a learned draft costs: a file that was written before the cost of drafts said so may lack it."""
        cost = self.draft_cost
        return self if cost is None else replace(self, draft_cost=dataclasses.replace(cost, least_passes=1))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All lanes.

    Attributes:
        format: of this file.
        measured_at: with a time zone.
        model: as clients name it.
        machine: as `serving.machine.describe` has it.
        versions: as `serving.run_directory.installed_versions` has them.
    """

    format: int
    measured_at: datetime
    model: str
    machine: dict[str, Any]
    versions: dict[str, str]
    lanes: tuple[LaneProfile, ...]

    def __post_init__(self) -> None:
        if self.measured_at.tzinfo is None:
            raise ValueError(f"measured_at is {self.measured_at.isoformat()}, must have a time zone")
        names = [lane.lane for lane in self.lanes]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"lane {doubled[0]!r} is there twice")
        if not names:
            raise ValueError("there is no lane in it")

    @property
    def doubts(self) -> str:
        """In words, for whoever goes by it; empty where there are none."""
        doubtful = [lane for lane in self.lanes if lane.is_doubtful]
        if not doubtful:
            return ""
        shares = ", ".join(f"{lane.lane} {lane.residuals.median_share:.0%}" for lane in doubtful)
        return (
            f"half of the measured steps are further from the fit than: {shares} (above {DOUBTFUL_SHARE:.0%}): the "
            "machine was busy with something else; calibrate again"
        )

    def check_model(self, name: str) -> None:
        """Refuse to be used for another model.

        Raises:
            ConfigError: it was measured on another one.
        """
        if name != self.model:
            raise ConfigError(
                f"was measured on model {self.model!r}, and is used for {name!r}: calibrate that one, or set "
                "`model` in the file where both are the same"
            )

    def lane(self, name: str) -> LaneProfile:
        """The lane of that name.

        Raises:
            ConfigError: there is none.
        """
        for lane in self.lanes:
            if lane.lane == name:
                return lane
        raise ConfigError(
            f"lane {name!r} is not in the profile; it has {', '.join(lane.lane for lane in self.lanes)}"
        )


class _Head(msgspec.Struct):
    format: int


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: it is missing or not as it should be; the text names the file, the place and the value.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: cannot be read: a directory, a pipe or a device, and no regular file")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        # The number first: a file of another format has other keys, of which nobody wants to hear.
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise ConfigError(
                f"{path}: is a profile of format {head.format}; this tandem reads format {FORMAT}: calibrate again"
            )
        return msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no profile: {error}") from None


def save(profile: Profile, path: Path) -> None:
    """Write a profile, whole or not at all; through a link, to what it names.

    Raises:
        TandemError: it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
    try:
        target, fresh = _target(path)
        fresh.write_bytes(text)
        fresh.replace(target)
    except (OSError, RuntimeError) as error:
        raise TandemError(_not_written(path, error)) from None


def check_writable(path: Path) -> None:
    """See that `save` could write there, before minutes are spent on what it writes.

    Raises:
        TandemError: it could not.
    """
    try:
        _, fresh = _target(path)
        fresh.touch()
        fresh.unlink()
    except (OSError, RuntimeError) as error:
        raise TandemError(_not_written(path, error)) from None


def _target(path: Path) -> tuple[Path, Path]:
    """Where a profile goes, and where it is written first.

    Raises:
        TandemError: something is there that is no file.
    """
    target = path.resolve()
    if not target.name or (target.exists() and not target.is_file()):
        raise TandemError(f"{path}: cannot be written: it is there, and is no file")
    return target, target.with_name(f".{target.name}.new")


def _not_written(path: Path, error: OSError | RuntimeError) -> str:
    return f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"


def measured_lane(
    lane: str,
    points: Sequence[StepPoint],
    *,
    max_num_seqs: int,
    max_step_tokens: int,
    kv_tokens: int | None = None,
    num_drafts: int = 0,
    plain: LaneProfile | None = None,
    acceptance: Mapping[str, Rates] | None = None,
    draft_share: Mapping[str, float] | None = None,
    overhead_s: float = 0.0,
    is_learned: bool = False,
) -> LaneProfile:
    """A lane's profile from its measured steps.

    A lane that drafts verifies with the model of the lane without drafts, so its step time is that lane's, and what
    its steps take beyond that is the cost of drafts.

    Args:
        plain: of a lane without drafts, of the same model on the same machine; needed by a lane that drafts.
        is_learned: its drafts come from a model, which has a pass in every step.

    Raises:
        ValueError: the steps say too little, or `plain` is missing.
    """
    roofline: RooflineStepTime | None
    draft_cost: DraftCost | None
    if num_drafts == 0:
        fit, prompt_cost = fit_plain(points)
        step_time, residuals = fit.form, fit.residuals
        roofline, draft_cost = fit_roofline(points).form, None
    elif plain is None:
        raise ValueError(
            f"lane {lane!r} drafts: what its drafts cost is told from a lane without drafts, which was not measured"
        )
    else:
        drafts = fit_draft_cost(points, plain.step_time)
        step_time, roofline = plain.step_time, plain.roofline
        prompt_cost = fit_prompt_cost(points, plain.cost_model)
        residuals = drafts.residuals
        draft_cost = dataclasses.replace(drafts.form, least_passes=int(is_learned))
    return LaneProfile(
        lane,
        max_num_seqs,
        step_time,
        residuals,
        roofline,
        max_step_tokens,
        kv_tokens,
        num_drafts,
        draft_cost,
        dict(acceptance or {}),
        dict(draft_share or {}),
        tuple(points),
        overhead_s,
        prompt_cost,
    )
