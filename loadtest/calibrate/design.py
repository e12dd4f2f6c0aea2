"""What a calibration asks of a lane: so many requests at once, so long, of such a text. Pure.

Step times need several batches, each at several lengths of context, else what a step, a token and a token in the KV
cache cost cannot be told apart. Acceptance needs texts; what drafts cost, several batches of them.

All is measured in passes, minutes apart: a machine that others use as well is faster in one minute than in another.
"""

from __future__ import annotations

from dataclasses import dataclass

PASSES = 2
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_TOKENS = 32
LONG_TOKENS = 1024
PLAIN_ANSWER_TOKENS = 24
WORKLOADS = ("copy", "story", "chat")
DRAFTED_BATCHES = (1, 4, 16, 64, 256)
DRAFTED_ANSWER_TOKENS = 64
MIN_REQUESTS = 8  # of a workload in all passes: acceptance differs from text to text


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests that are asked together, `repeats` times in each of the first `passes` passes.

    Attributes:
        prompt_tokens: size of each prompt where no workload gives the text.
        workload: whose prompts; None for a word again and again.
    """

    lane: str
    batch: int
    output_tokens: int
    prompt_tokens: int = 0
    workload: str | None = None
    repeats: int = 1
    passes: int = PASSES

    @property
    def label(self) -> str:
        """For a line of progress."""
        text = self.workload or f"{self.prompt_tokens} tokens of context"
        return f"{self.lane}: {self.batch} at once, {text}"


def plain_cells(lane: str, max_running: int, max_model_len: int) -> list[Cell]:
    """For the step time of a lane without drafts: each batch at a short and at a long context.

    The longest in one pass only: its prompts take most of the time.
    """
    longest = min(LONG_TOKENS, max_model_len - PLAIN_ANSWER_TOKENS - 1)
    contexts = sorted({min(SHORT_TOKENS, longest), longest // 4, longest})
    return [
        Cell(
            lane,
            batch,
            PLAIN_ANSWER_TOKENS,
            prompt_tokens=context,
            passes=1 if context == longest else PASSES,
        )
        for context in contexts
        if context > 0
        for batch in BATCHES
        if batch <= max_running
    ]


def drafted_cells(lane: str, max_running: int) -> list[Cell]:
    """For what drafts cost and how many are accepted: each kind of text at a few batches."""
    return [
        Cell(
            lane,
            batch,
            DRAFTED_ANSWER_TOKENS,
            workload=workload,
            repeats=MIN_REQUESTS // PASSES if batch == 1 else 1,
        )
        for workload in WORKLOADS
        for batch in DRAFTED_BATCHES
        if batch <= max_running
    ]
