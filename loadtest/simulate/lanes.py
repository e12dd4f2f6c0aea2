"""Lanes to choose from: those of a profile, and those that speculate with a k that follows the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.calibration.profile import LaneProfile, Profile
from serving.core.errors import ConfigError
from serving.core.speculation.acceptance import Rates, extended
from serving.core.speculation.cost_model import BatchRange, Lengths
from serving.simulation.calibrated import LaneModel, same_drafts, table_drafts

BY_BATCH = "/by-batch"  # no lane's own name has a slash
MAX_SHARE = 1e6  # of a kind of text, before they are divided by their sum


@dataclass(frozen=True, slots=True)
class TextMix:
    """Kinds of text, by the names of the workloads that acceptance was measured with, and their shares."""

    names: tuple[str, ...]
    shares: tuple[float, ...]

    @property
    def in_words(self) -> str:
        return ", ".join(
            f"{name} {100 * share:.0f}%" for name, share in zip(self.names, self.shares, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A lane to simulate.

    Attributes:
        name: what it is called in tables.
        capacity_rps: of one replica, by the cost model.
        table: k by batch; one entry where it is the same for all.
    """

    name: str
    model: LaneModel
    capacity_rps: float
    table: tuple[BatchRange, ...]


def parse_text_mix(text: str | None, profile: Profile) -> TextMix:
    """Read `story` or `story=0.7,copy=0.3`; without it, all kinds that the profile knows, alike.

    Raises:
        ConfigError: a kind or a share is not as it should be; the text names it.
    """
    known = sorted({kind for lane in profile.lanes for kind in lane.acceptance})
    if text is None:
        names = known or ["any"]
        return TextMix(tuple(names), (1 / len(names),) * len(names))
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in known:
            raise ConfigError(
                f"--text {text!r}: acceptance on {name!r} is not in the profile; it has "
                f"{', '.join(known) or 'none'}"
            )
        try:
            share = float(value) if equals else 1.0
        except ValueError:
            share = -1.0
        if not 0 < share <= MAX_SHARE or name in shares:
            raise ConfigError(
                f"--text {text!r}: {part.strip()!r} must be a kind, once, with a share above 0 and at most "
                f"{MAX_SHARE:,.0f}"
            )
        shares[name] = share
    total = sum(shares.values())
    return TextMix(tuple(shares), tuple(share / total for share in shares.values()))


def candidates(profile: Profile, names: Sequence[str], mix: TextMix, lengths: Lengths) -> list[Candidate]:
    """The lanes of those names, or all; after each that speculates, the same with k by batch.

    Args:
        names: of lanes; with `BY_BATCH` behind it, only the one with k by batch.
        lengths: means of the requests, which k by batch and capacities are reckoned for.

    Raises:
        ConfigError: a lane is not in the profile, drafts nothing and is wanted by batch, or lacks acceptance on a
            kind of text.
    """
    found: dict[str, Candidate] = {}
    for name in names or [lane.lane for lane in profile.lanes]:
        lane = profile.lane(name.removesuffix(BY_BATCH))
        chosen = [] if name.endswith(BY_BATCH) else [_fixed(lane, mix, lengths)]
        if lane.num_drafts:
            chosen.append(_by_batch(lane, mix, lengths))
        if not chosen:
            raise ConfigError(f"--lanes {name!r}: lane {lane.lane!r} drafts nothing, so it has no k by batch")
        found |= {candidate.name: candidate for candidate in chosen}
    return list(found.values())


def _fixed(lane: LaneProfile, mix: TextMix, lengths: Lengths) -> Candidate:
    drafts = same_drafts(lane.num_drafts, lane.max_num_seqs)
    table = (BatchRange(1, lane.max_num_seqs, lane.num_drafts),)
    return _candidate(lane.lane, lane, drafts, table, mix, lengths)


def _by_batch(lane: LaneProfile, mix: TextMix, lengths: Lengths) -> Candidate:
    context = lengths.context_tokens
    table = lane.cost_model.batch_table(
        context, mean_rates(lane, mix), lane.num_drafts, lane.max_num_seqs, mean_draft_share(lane, mix)
    )
    drafts = table_drafts(table, lane.max_num_seqs)
    return _candidate(f"{lane.lane}{BY_BATCH}", lane, drafts, table, mix, lengths)


def _candidate(
    name: str,
    lane: LaneProfile,
    drafts: tuple[int, ...],
    table: tuple[BatchRange, ...],
    mix: TextMix,
    lengths: Lengths,
) -> Candidate:
    model = LaneModel(
        name,
        lane.cost_model,
        drafts,
        tuple(_rates(lane, kind) for kind in mix.names),
        lane.max_step_tokens,
        lane.kv_tokens,
        tuple(lane.draft_share.get(kind, 1.0) for kind in mix.names),
        overhead_s=lane.overhead_s,
        step_noise=lane.residuals.noise,
    )
    capacity_rps = lane.cost_model.capacity_rps(
        lane.max_num_seqs, lengths, drafts[-1], mean_rates(lane, mix), mean_draft_share(lane, mix)
    )

    return Candidate(name, model, capacity_rps, table)


def mean_rates(lane: LaneProfile, mix: TextMix) -> Rates:
    """Acceptance over the whole mix: what a batch of it gives is the mean of what its sequences give."""
    by_kind = [extended(_rates(lane, kind), lane.num_drafts) for kind in mix.names]
    return tuple(
        sum(share * rates[position] for share, rates in zip(mix.shares, by_kind, strict=True))
        for position in range(lane.num_drafts)
    )


def mean_draft_share(lane: LaneProfile, mix: TextMix) -> float:
    """Mean length of drafts over k, over the whole mix."""
    return sum(
        share * lane.draft_share.get(kind, 1.0) for kind, share in zip(mix.names, mix.shares, strict=True)
    )


def _rates(lane: LaneProfile, kind: str) -> Rates:
    if not lane.num_drafts:
        return ()
    if kind not in lane.acceptance:
        raise ConfigError(
            f"lane {lane.lane!r} drafts, but its acceptance on {kind!r} is not in the profile: calibrate it, or "
            "choose other text (--text)"
        )
    return lane.acceptance[kind]
