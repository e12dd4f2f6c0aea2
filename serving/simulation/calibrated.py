"""A replica by its profile: continuous batching, chunked prefill and drafts, a stretch of equal steps at a time.

Between two events the batch stays as it is, and only the KV cache grows, evenly: all those steps are one event.
A million requests of hundreds of tokens are then a few million events.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple

from serving.core.speculation.acceptance import Rates, extended, tokens_per_step, tokens_variance
from serving.core.speculation.cost_model import BatchRange, CostModel

MIN_TOKENS = 0.01  # that a sequence with a step to go still lacks, at least
ROUNDING = 1e-9  # of a step: the instant of its end, computed anew, is not within it


@dataclass(frozen=True, slots=True)
class LaneModel:
    """What the replicas of a lane do.

    Attributes:
        drafts_by_batch: k by the sequences that decode, index 0 for none; one longer than `max_num_seqs`.
        acceptance: of each kind of text, rates by position.
        draft_share: of each kind, the mean length of drafts over k; 1 for kinds beyond its end.
        overhead_s: of each request, in no step.
        max_step_tokens: positions of one step at most.
        kv_tokens: that fit into the KV cache; None: more than is ever needed.
        step_noise: standard deviation of a step's time, as a share of it.
    """

    name: str
    cost: CostModel
    drafts_by_batch: tuple[int, ...]
    acceptance: tuple[Rates, ...]
    max_step_tokens: int = 2048
    kv_tokens: int | None = None
    draft_share: tuple[float, ...] = ()
    drafts_by_kind: tuple[tuple[int, ...], ...] = ()
    overhead_s: float = 0.0
    step_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"lane {self.name!r}: drafts_by_batch needs an entry for 0 and for 1 sequence")
        if not self.acceptance:
            raise ValueError(f"lane {self.name!r}: acceptance needs one kind of text at least")
        for drafts in self.drafts_by_kind:
            if len(drafts) != len(self.drafts_by_batch):
                raise ValueError(
                    f"lane {self.name!r}: drafts_by_kind has {len(drafts)} entries for a kind of text, "
                    f"drafts_by_batch {len(self.drafts_by_batch)}"
                )

    def drafts_at(self, batch: int) -> tuple[int, ...]:
        """k of each kind of text when so many sequences decode."""
        own = tuple(drafts[batch] for drafts in self.drafts_by_kind)
        return own + (self.drafts_by_batch[batch],) * (len(self.acceptance) - len(own))

    @property
    def max_num_seqs(self) -> int:
        return len(self.drafts_by_batch) - 1


def same_drafts(num_drafts: int, max_num_seqs: int) -> tuple[int, ...]:
    """`drafts_by_batch` with the same k at every load."""
    return (num_drafts,) * (max_num_seqs + 1)


def table_drafts(table: Sequence[BatchRange], max_num_seqs: int) -> tuple[int, ...]:
    """`drafts_by_batch` by a table that covers 1..max_num_seqs."""
    by_batch = {batch: part.num_drafts for part in table for batch in range(part.first, part.last + 1)}
    return (by_batch[1], *(by_batch[batch] for batch in range(1, max_num_seqs + 1)))


@dataclass(frozen=True, slots=True)
class _Pace:
    """Tokens that a decode step gives a sequence: their mean, variance and most; and positions that it computes."""

    mean: float
    variance: float
    most: int
    positions: float

    @property
    def overshoot(self) -> float:
        """Tokens that the last step makes beyond the answer's end, on average."""
        return ((self.variance + self.mean**2) / self.mean - 1) / 2

    def num_steps(self, tokens: float, rng: random.Random) -> int:
        """Draw how many steps make so many tokens, >= 1: a renewal process, by its normal limit.

        Mean (m + overshoot) / E, variance m V / E^3, of m tokens. Source: Feller, volume 2, chapter XI.
        A part of a token is left over on average only: it costs a step as often as it is there.
        """
        if self.most == 1:
            return max(1, math.floor(tokens + rng.random()))
        steps = (tokens + self.overshoot) / self.mean
        if self.variance:
            steps = rng.gauss(steps, math.sqrt(tokens * self.variance / self.mean**3))
        return max(1, math.ceil(tokens / self.most), min(math.ceil(tokens), round(steps)))


@cache
def _pace(rates: Rates, draft_share: float, num_drafts: int) -> _Pace:
    used = extended(rates, num_drafts)
    return _Pace(tokens_per_step(used), tokens_variance(used), num_drafts + 1, 1 + num_drafts * draft_share)


class SimulatedSequence:
    """A request inside a replica.

    Attributes:
        number: which one of the run.
        left: positions of its prompt still to compute.
        finish_step: the replica's decode step that gives it its last token.
        first_step: the replica's step that gave it its first.
        per_step: tokens that it gets from each decode step until then, on average.
        overshoot: that its last step makes beyond its end, on average.
        decode_steps: that `per_step` was drawn for.
    """

    __slots__ = (
        "decode_steps",
        "finish_step",
        "first_step",
        "kind",
        "left",
        "number",
        "output_tokens",
        "overshoot",
        "per_step",
        "prompt_tokens",
    )

    def __init__(self, number: int, prompt_tokens: int, output_tokens: int, kind: int) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.kind = kind
        self.left = max(1, prompt_tokens)
        self.per_step = self.overshoot = 0.0
        self.first_step = self.finish_step = self.decode_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps that gave it tokens, once it has them all."""
        return 1 + self.finish_step - self.first_step


class Ended(NamedTuple):
    """What became of sequences at the end of a stretch."""

    first_tokens: list[SimulatedSequence]
    finished: list[SimulatedSequence]


class CalibratedReplica:
    """The engine's state between stretches of steps. The caller keeps the time.

    `start` begins a stretch and says when it ends; `join` may change that to the end of the step under way;
    `end` at that instant says what it gave. A sequence takes part from the next stretch on.

    The batch is that of vLLM: decoding goes before prompts, and prompts share what is left of `max_step_tokens`. A
    sequence runs only when the KV cache has room for it to its end, so nothing is preempted.

    Attributes:
        ends_at_s: of the stretch under way; None where there is none.
        busy_s: time in steps so far.
        num_steps: so far.
    """

    __slots__ = (
        "_base_s",
        "_began_at_s",
        "_chunks",
        "_decoding",
        "_factor",
        "_growth",
        "_growth_s",
        "_k",
        "_kv",
        "_lane",
        "_num_of_kind",
        "_paces",
        "_positions",
        "_prefilling",
        "_promised_kv",
        "_rng",
        "_serial",
        "_steps",
        "_waiting",
        "busy_s",
        "ends_at_s",
        "num_steps",
    )

    def __init__(self, lane: LaneModel, rng: random.Random) -> None:
        self._lane = lane
        self._rng = rng
        self._waiting: deque[SimulatedSequence] = deque()
        self._prefilling: deque[SimulatedSequence] = deque()
        self._decoding: list[tuple[int, int, SimulatedSequence]] = []  # a heap, by the step of the last token
        self._serial = 0
        self._k = (0,) * len(lane.acceptance)  # of each kind of text
        self._num_of_kind = [0] * len(lane.acceptance)  # sequences that decode
        self._paces = self._paces_of(self._k)
        self._kv = 0.0  # positions in the KV cache
        self._growth = 0.0  # of it in each decode step
        self._positions = 0.0  # that a step computes for those who decode
        self._promised_kv = 0  # positions that all who run will have taken at their end
        self._began_at_s = 0.0
        self._steps = 0  # of the stretch
        self._base_s = 0.0  # of its first step
        self._growth_s = 0.0  # by which each step is longer than the one before it
        self._factor = 1.0  # of noise, that is in both
        self._chunks: list[tuple[SimulatedSequence, int]] = []
        self.ends_at_s: float | None = None
        self.busy_s = 0.0
        self.num_steps = 0

    def join(self, sequence: SimulatedSequence, now_s: float) -> None:
        """A request arrives."""
        self._waiting.append(sequence)
        if self.ends_at_s is not None and self._steps > 1 and self._has_room(sequence):
            steps = self._steps_by(now_s)
            if steps < self._steps:
                self._steps = steps
                self.ends_at_s = self._cut_at_s(now_s)

    def start(self, now_s: float) -> float | None:
        """Begin a stretch; the instant of its end, or None when there is nothing to do."""
        while self._waiting and self._has_room(self._waiting[0]):
            sequence = self._waiting.popleft()
            self._promised_kv += sequence.prompt_tokens + sequence.output_tokens
            self._prefilling.append(sequence)
        num_decoding = len(self._decoding)
        if not num_decoding and not self._prefilling:
            self._kv = self._growth = self._positions = 0.0  # what rounding left
            self.ends_at_s = None
            return None
        self._retune(self._lane.drafts_at(num_decoding))
        positions = self._positions
        prompt_tokens = 0
        self._steps = 1
        if self._prefilling:
            prompt_tokens = self._take_chunks(max(1, self._lane.max_step_tokens - round(positions)))
            positions += prompt_tokens
        else:
            self._steps = self._decoding[0][0] - self.num_steps
        cost = self._lane.cost
        self._base_s = cost.step_time.step_s(positions, self._kv) + self._draft_s()
        self._base_s += cost.prompt_cost.prompt_s(prompt_tokens, are_alone=not num_decoding)
        self._growth_s = 0.0
        if self._steps > 1:
            # Both forms of a step's time are linear in the KV cache.
            self._growth_s = cost.step_time.step_s(positions, self._kv + self._growth) - (
                cost.step_time.step_s(positions, self._kv)
            )
        if self._lane.step_noise:
            self._factor = self._noise(self._steps)
            self._base_s *= self._factor
            self._growth_s *= self._factor
        self._began_at_s = now_s
        self.ends_at_s = now_s + self._lasts_s(self._steps)
        return self.ends_at_s

    def end(self) -> Ended:
        """The stretch is over; those that are done have left."""
        assert self.ends_at_s is not None, "a stretch is under way"
        self.busy_s += self.ends_at_s - self._began_at_s
        self.num_steps += self._steps
        self._kv += self._growth * self._steps
        finished: list[SimulatedSequence] = []
        decoding = self._decoding
        while decoding and decoding[0][0] <= self.num_steps:
            sequence = heapq.heappop(decoding)[2]
            self._growth -= sequence.per_step
            self._positions -= self._paces[sequence.kind].positions
            self._num_of_kind[sequence.kind] -= 1
            self._leave(sequence)
            finished.append(sequence)
        first_tokens: list[SimulatedSequence] = []
        for sequence, tokens in self._chunks:
            sequence.left -= tokens
            self._kv += tokens
            if not sequence.left:
                self._kv += 1
                first_tokens.append(sequence)
                sequence.first_step = sequence.finish_step = self.num_steps
                if sequence.output_tokens > 1:
                    self._decode(sequence, sequence.output_tokens - 1)
                else:
                    self._leave(sequence)
                    finished.append(sequence)
        self._chunks = []
        self.ends_at_s = None
        return Ended(first_tokens, finished)

    def _has_room(self, sequence: SimulatedSequence) -> bool:
        num_running = len(self._decoding) + len(self._prefilling)
        if num_running >= self._lane.max_num_seqs:
            return False
        kv_tokens = self._lane.kv_tokens
        wanted = self._promised_kv + sequence.prompt_tokens + sequence.output_tokens
        # One that is larger than the whole cache runs alone: the engine would have refused it.
        return kv_tokens is None or wanted <= kv_tokens or not num_running

    def _take_chunks(self, budget: int) -> int:
        """Give prompts their part of the step, first come, first served; the positions taken."""
        taken = 0
        while self._prefilling and taken < budget:
            sequence = self._prefilling[0]
            tokens = min(sequence.left, budget - taken)
            self._chunks.append((sequence, tokens))
            taken += tokens
            if tokens < sequence.left:
                break
            self._prefilling.popleft()
        return taken

    def _decode(self, sequence: SimulatedSequence, tokens: float) -> None:
        pace = self._paces[sequence.kind]
        steps = pace.num_steps(tokens, self._rng)
        self._positions += pace.positions
        sequence.per_step = tokens / steps
        sequence.overshoot = pace.overshoot
        sequence.decode_steps = steps
        sequence.finish_step = self.num_steps + steps
        self._growth += sequence.per_step
        self._num_of_kind[sequence.kind] += 1
        self._serial += 1
        heapq.heappush(self._decoding, (sequence.finish_step, self._serial, sequence))

    def _leave(self, sequence: SimulatedSequence) -> None:
        self._kv -= max(1, sequence.prompt_tokens) + sequence.output_tokens
        self._promised_kv -= sequence.prompt_tokens + sequence.output_tokens

    def _noise(self, steps: int) -> float:
        """Draw by what so many steps take longer than on average: lognormal, of steps that differ by themselves."""
        variance = math.log1p(self._lane.step_noise**2 / steps)
        return self._rng.lognormvariate(-variance / 2, math.sqrt(variance))

    def _cut_at_s(self, now_s: float) -> float:
        """When the stretch ends that is cut to the step under way: who waits for that one has one step's noise."""
        whole_s = self._lasts_s(self._steps)
        if not self._lane.step_noise:
            return self._began_at_s + whole_s
        before_s = self._lasts_s(self._steps - 1)
        last_s = (whole_s - before_s) / self._factor * self._noise(1)
        return max(now_s, self._began_at_s + before_s + last_s)

    def _draft_s(self) -> float:
        """Of a step: as many passes as the longest drafts take, each with those whose drafts are that long.

        A learned draft has its first with all who decode, whether they get a draft or not.
        """
        cost, num_decoding = self._lane.cost.draft_cost, len(self._decoding)
        longest = max((k for k, count in zip(self._k, self._num_of_kind, strict=True) if count), default=0)
        if not longest:
            return cost.draft_s(0, num_decoding)
        # Each who decodes has one position of its own, and its drafts.
        return cost.draft_s(longest, (self._positions - num_decoding) / longest)

    def _retune(self, num_drafts: tuple[int, ...]) -> None:
        """Go on with another k: who decodes needs more steps from here, or fewer."""
        if num_drafts == self._k:
            return
        self._k = num_drafts
        self._paces = self._paces_of(num_drafts)
        decoding, self._decoding = self._decoding, []
        self._growth = self._positions = 0.0
        self._num_of_kind = [0] * len(self._num_of_kind)
        for finish_step, _, sequence in decoding:
            left = finish_step - self.num_steps
            # The overshoot comes with the last step: the steps so far have made more than their part of the answer.
            ahead = sequence.overshoot * (1 - left / sequence.decode_steps)
            lacks = max(MIN_TOKENS, left * sequence.per_step - ahead)
            self._kv += left * sequence.per_step - lacks
            self._decode(sequence, lacks)

    def _paces_of(self, num_drafts: tuple[int, ...]) -> list[_Pace]:
        lane = self._lane
        shares = chain(lane.draft_share, repeat(1.0))
        return [
            _pace(rates, share, k)
            for rates, share, k in zip(lane.acceptance, shares, num_drafts, strict=False)
        ]

    def _lasts_s(self, steps: int) -> float:
        return steps * self._base_s + self._growth_s * (steps * (steps - 1) / 2)

    def _steps_by(self, now_s: float) -> int:
        """Steps of the stretch that have begun by then, >= 1: the least whose end is not before `now_s`."""
        elapsed_s = now_s - self._began_at_s
        slope = self._growth_s / 2
        linear = self._base_s - slope
        if slope:
            # The root of slope n^2 + linear n = elapsed, in the form that does not cancel.
            steps = 2 * elapsed_s / (linear + math.sqrt(linear * linear + 4 * slope * elapsed_s))
        else:
            steps = elapsed_s / linear
        return max(1, math.ceil(steps - ROUNDING))
