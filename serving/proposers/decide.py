"""How many tokens to draft for each row of a batch, by how its own drafts fared and by what a step costs. Pure.

A row's draft pays while what it is expected to give, over what verifying it adds to the step, is more than the step
gives without it. So rows differ: one that copies a text gets whole drafts beside one that gets none.

Source: goodput of SmartSpec (arXiv 2406.14066), here for each row instead of all rows together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.speculation.cost_model import CostModel

FIRST_CHANCE = 0.5  # that a draft token is accepted, of a row of which nothing is known
FIRST_WEIGHT = 2.0  # draft tokens that this guess counts for
KEPT = 0.8  # of what was seen, with each further draft: a row's last 3 drafts are half of what is known
PROBE_CHANCE = 0.8  # at which a row that long had no draft is taken, for one token


@dataclass(slots=True)
class RowHistory:
    """How the drafts of one row fared; old ones count less and less.

    Attributes:
        tried, accepted: draft tokens that were reached, all before them accepted, and those of them accepted.
        drafted: tokens of the draft that is being verified.
        idle_steps: steps in a row in which a draft could be had and none was given.
    """

    tried: float = FIRST_WEIGHT
    accepted: float = FIRST_WEIGHT * FIRST_CHANCE
    drafted: int = 0
    idle_steps: int = 0

    @property
    def chance(self) -> float:
        """That a draft token is accepted where all before it were, in 0..1."""
        return self.accepted / self.tried

    def learn(self, num_tokens: int) -> None:
        """A step gave the row so many tokens, 1 or more: its own and what was accepted of the draft."""
        if not self.drafted:
            return
        accepted = min(num_tokens - 1, self.drafted)
        self.tried = KEPT * self.tried + accepted + (accepted < self.drafted)
        self.accepted = KEPT * self.accepted + accepted
        self.drafted = 0

    def give(self, num_drafts: int, available: int) -> None:
        """So many of the available tokens are drafted for its next step."""
        self.drafted = num_drafts
        if num_drafts:
            self.idle_steps = 0
        elif available:
            self.idle_steps += 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that may get a draft.

    Attributes:
        chance: of each of its tokens to be accepted where all before it were, in 0..1.
        available: tokens that can be drafted for it.
    """

    chance: float
    available: int


def drafts_of_rows(cost: CostModel, rows: Sequence[Candidate], kv_tokens: float) -> list[int]:
    """Tokens to draft for each row so that the step gives most tokens a second; the fewest that do.

    The longest draft says what drafting takes, so each length is looked at. Under it the best set of so many tokens
    is that of the likeliest, and a token is never likelier than those before it in its row: tokens are lined up by
    their chance and taken while they add more a second than the step gives without them.

    Args:
        kv_tokens: positions in the KV cache of all rows together.
    """
    batch = len(rows)
    line = sorted(
        (-(row.chance**position), position, place)
        for place, row in enumerate(rows)
        for position in range(1, row.available + 1)
    )
    best = [0] * batch
    if not batch:
        return best
    best_rate = batch / cost.decode_step_s(batch, kv_tokens / batch, 0)
    drafting = cost.draft_cost
    # The passes of a learned draft hold all rows; other drafts cost the rows that have one.
    token_s = 0.0 if drafting.least_passes else drafting.pass_sequence_s
    for longest in range(1, max((row.available for row in rows), default=0) + 1):
        draft_s = drafting.draft_s(longest, batch) - token_s * longest * batch
        chosen = [0] * batch
        tokens, positions = float(batch), batch
        rate = tokens / (cost.step_time.step_s(batch, kv_tokens) + draft_s)
        for minus_chance, position, place in line:
            if position > longest:
                continue
            verify_s = cost.step_time.step_s(positions + 1, kv_tokens) + token_s * (positions + 1 - batch)
            further = (tokens - minus_chance) / (verify_s + draft_s)
            if further <= rate:
                break
            tokens, positions, rate = tokens - minus_chance, positions + 1, further
            chosen[place] = position
        if rate > best_rate:
            best_rate, best = rate, chosen
    return best


@dataclass(frozen=True, slots=True)
class Policy:
    """What is decided by.

    Attributes:
        cost: of a step and of drafts.
        max_drafts: tokens of a draft at most.
        probe_steps: a row without a draft for so many steps is tried with one token, as if it were guessed
            well (`PROBE_CHANCE`): where even then it does not pay, as in a large batch, it waits on.
    """

    cost: CostModel
    max_drafts: int
    probe_steps: int

    def choose(
        self, histories: Sequence[RowHistory], available: Sequence[int], kv_tokens: float
    ) -> list[int]:
        """Tokens to draft for each row, shape (rows,); the histories note it.

        Args:
            available: tokens that can be drafted for each row, shape (rows,).
            kv_tokens: positions in the KV cache of all rows together.
        """
        rows = [
            Candidate(PROBE_CHANCE, min(1, most))
            if history.idle_steps >= self.probe_steps
            else Candidate(history.chance, min(most, self.max_drafts))
            for history, most in zip(histories, available, strict=True)
        ]
        chosen = drafts_of_rows(self.cost, rows, kv_tokens)
        for history, num_drafts, most in zip(histories, chosen, available, strict=True):
            history.give(num_drafts, most)
        return chosen
