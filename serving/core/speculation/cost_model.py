"""When drafts pay: what a lane gives at a load, with so many drafts, by its step time and what drafts cost.

A step with k drafts computes k + 1 positions for each sequence, reads its KV cache once, and gives it
`tokens_per_step` tokens. Drafts pay where these outweigh the longer step.

A method that does not always find a draft, such as n-gram, verifies fewer: `draft_share` is its mean length over k,
steps without a draft included. The rates are then of all steps, too.

Source: goodput of SmartSpec (arXiv 2406.14066); the choice of k in vLLM's adaptive verification has the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.speculation.acceptance import Rates, extended, tokens_per_step
from serving.core.speculation.step_time import FREE_DRAFTS, FREE_PROMPTS, DraftCost, PromptCost, StepTime

BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a lane at a load.

    Attributes:
        batch: sequences that run at once.
        num_drafts: k.
        tokens_per_step: that a decoding sequence gets.
        step_s: of the mean step.
        tpot_s: time per output token after the first, of each sequence.
        tokens_per_s: output tokens of all sequences.
    """

    batch: float
    num_drafts: int
    tokens_per_step: float
    step_s: float
    tpot_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of requests, in tokens; the answer has at least 1."""

    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.output_tokens < 1:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens:g} must be at least 0, output_tokens={self.output_tokens:g} "
                "at least 1"
            )

    @property
    def context_tokens(self) -> float:
        """Of a request in the KV cache, on the mean while it is answered."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class BatchRange:
    """From so many sequences to so many, both included, draft so many tokens."""

    first: int
    last: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """A lane's engine in figures."""

    step_time: StepTime
    draft_cost: DraftCost = FREE_DRAFTS
    prompt_cost: PromptCost = FREE_PROMPTS

    def decode_step_s(
        self, batch: float, context_tokens: float, num_drafts: int, draft_share: float = 1.0
    ) -> float:
        """Seconds of a step in which `batch` sequences of that context decode, each with k drafts."""
        positions = batch * (1 + num_drafts * draft_share)
        verify_s = self.step_time.step_s(positions, batch * context_tokens)
        return verify_s + self.draft_cost.draft_s(num_drafts, batch * draft_share)

    def decode(
        self, batch: float, context_tokens: float, num_drafts: int, rates: Rates, draft_share: float = 1.0
    ) -> Outlook:
        """Pure decoding: no prompts to compute.

        Args:
            rates: acceptance by position; carried on where it has fewer positions than drafts.
        """
        step_s = self.decode_step_s(batch, context_tokens, num_drafts, draft_share)
        tokens = tokens_per_step(extended(rates, num_drafts))
        return Outlook(batch, num_drafts, tokens, step_s, step_s / tokens, batch * tokens / step_s)

    def serve(
        self, batch: float, lengths: Lengths, num_drafts: int, rates: Rates, draft_share: float = 1.0
    ) -> Outlook:
        """`serve_at` with the tokens per step of drafts that are accepted so.

        Args:
            rates: acceptance by position; carried on where it has fewer positions than drafts.
        """
        return self.serve_at(
            batch, lengths, num_drafts, tokens_per_step(extended(rates, num_drafts)), draft_share
        )

    def serve_at(
        self, batch: float, lengths: Lengths, num_drafts: int, tokens: float, draft_share: float = 1.0
    ) -> Outlook:
        """Requests that come and go: `batch` always run, as users of a closed loop without think time do.

        A request takes one step for its prompt, which gives its first token, and (output - 1) / tokens_per_step
        more; each step holds the mean of what its sequences are at. Prompts longer than a step takes in one go, and
        the chance of several in one step, are left out.

        Args:
            tokens: that a step gives a sequence.
        """
        decode_steps = (lengths.output_tokens - 1) / tokens
        steps = 1 + decode_steps
        positions = (lengths.prompt_tokens + decode_steps * (1 + num_drafts * draft_share)) / steps
        decoding = batch * decode_steps / steps
        step_s = self.step_time.step_s(batch * positions, batch * lengths.context_tokens)
        step_s += self.draft_cost.draft_s(num_drafts, decoding * draft_share)
        # A step in which none of them is at its prompt has nothing of what prompts cost.
        step_s += self.prompt_cost.step_s * (1 - (1 - 1 / steps) ** batch)
        step_s += self.prompt_cost.token_s * batch * lengths.prompt_tokens / steps
        step_s += self.prompt_cost.alone_s * (1 / steps) ** batch
        return Outlook(
            batch,
            num_drafts,
            tokens,
            step_s,
            step_s / tokens,
            batch * lengths.output_tokens / (steps * step_s),
        )

    def best_num_drafts(
        self, batch: float, context_tokens: float, rates: Rates, max_drafts: int, draft_share: float = 1.0
    ) -> int:
        """The k in 0..max_drafts that gives most tokens a second; the fewest drafts of those that give as many."""
        return max(
            range(max_drafts + 1),
            key=lambda k: (self.decode(batch, context_tokens, k, rates, draft_share).tokens_per_s, -k),
        )

    def crossover_batch(
        self, context_tokens: float, num_drafts: int, rates: Rates, max_batch: int, draft_share: float = 1.0
    ) -> int | None:
        """The batch from which on k drafts give fewer tokens a second than a lane without; None if they pay at
        `max_batch`.

        1 where they never pay. Below it they may lose as well: at few sequences a costly draft has little to share
        its cost between.
        """
        plain = CostModel(self.step_time)
        for batch in range(max_batch, 0, -1):
            drafted = self.decode(batch, context_tokens, num_drafts, rates, draft_share)
            if drafted.tokens_per_s >= plain.decode(batch, context_tokens, 0, ()).tokens_per_s:
                return None if batch == max_batch else batch + 1
        return 1

    def batch_table(
        self, context_tokens: float, rates: Rates, max_drafts: int, max_batch: int, draft_share: float = 1.0
    ) -> tuple[BatchRange, ...]:
        """The best k for every batch of 1..max_batch, equal neighbours joined.

        As vLLM's `num_speculative_tokens_per_batch_size` wants it: begins at 1, no gaps, no overlaps.
        """
        ranges: list[BatchRange] = []
        for batch in range(1, max_batch + 1):
            best = self.best_num_drafts(batch, context_tokens, rates, max_drafts, draft_share)
            if ranges and ranges[-1].num_drafts == best:
                ranges[-1] = BatchRange(ranges[-1].first, batch, best)
            else:
                ranges.append(BatchRange(batch, batch, best))
        return tuple(ranges)

    def capacity_rps(
        self, max_batch: int, lengths: Lengths, num_drafts: int, rates: Rates, draft_share: float = 1.0
    ) -> float:
        """Requests/s that are served when `max_batch` always run."""
        return (
            self.serve(max_batch, lengths, num_drafts, rates, draft_share).tokens_per_s
            / lengths.output_tokens
        )

    def at_rate(
        self,
        requests_per_s: float,
        max_batch: int,
        lengths: Lengths,
        num_drafts: int,
        rates: Rates,
        draft_share: float = 1.0,
    ) -> Outlook | None:
        """What a steady rate of requests finds; None where it is above `capacity_rps`.

        By Little's law the batch is the rate times how long a request stays, which grows with the batch: this is
        their fixed point. Requests that come in bursts find more.

        Source: "effective batch size" of arXiv 2605.15051.
        """
        if requests_per_s > self.capacity_rps(max_batch, lengths, num_drafts, rates, draft_share):
            return None
        low, high = 0.0, float(max_batch)
        for _ in range(BISECTIONS):
            batch = (low + high) / 2
            served = (
                self.serve(batch, lengths, num_drafts, rates, draft_share).tokens_per_s
                / lengths.output_tokens
            )
            low, high = (batch, high) if served < requests_per_s else (low, batch)
        return self.serve(high, lengths, num_drafts, rates, draft_share)


def free_draft_crossover(knee_tokens: float, num_drafts: int, rates: Sequence[float]) -> float:
    """Batch at which free drafts stop paying on a roofline without KV: knee * tokens_per_step / (k + 1).

    Up to knee / (k + 1) sequences drafts are verified for nothing; from there the step grows with them.
    """
    return knee_tokens * tokens_per_step(rates) / (num_drafts + 1)
