"""What to see in each picture, with this run's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from loadtest.judge.wording import count, number, share, time
from loadtest.lesson.measure import OperatingPoint, Queue, Scoring, StepSize, Timeline
from loadtest.lesson.teach import LeftOut
from serving.roofline import Roofline
from serving.tracing.events import Phase

NEAR_THE_ROOF = 2.0  # times the least time: a step within it is explained by memory and arithmetic


def of_scoring(scoring: Scoring) -> list[str]:
    """One pass against token by token."""
    ratio = scoring.pass_tokens_per_s / scoring.serial_tokens_per_s
    passes = "one pass" if scoring.pass_steps == 1 else f"{scoring.pass_steps} passes"
    return [
        f"Scored in {passes}, {count(scoring.scored_tokens, 'token')} took {time(scoring.pass_s)}: "
        f"{number(scoring.pass_tokens_per_s, None)} tokens/s.",
        f"Generated one after the other, {len(scoring.generated_at_s)} of them took "
        f"{time(scoring.generated_at_s[-1])}: {number(scoring.serial_tokens_per_s, None)} tokens/s, "
        f"slower by a factor of {number(ratio, None)}.",
        "Both compute the same: their log-probabilities of the generated tokens differ by "
        f"{scoring.median_difference:.1g} in the median and {scoring.largest_difference:.1g} at most, which is "
        "rounding. Generation is slow because no token can begin before the last one is known.",
    ]


def of_wall(
    sizes: Sequence[StepSize],
    lanes: Sequence[OperatingPoint],
    roofline: Roofline | LeftOut,
    load: str = "the load of the next picture",
) -> list[str]:
    """What more positions in a step cost, and why.

    Args:
        load: what the lanes worked under.
    """
    said = []
    decode = [size for size in sizes if size.phase is Phase.DECODE]
    if len(decode) > 1:
        few, many = decode[0], decode[-1]
        said.append(
            f"A step with {count(few.tokens, 'position')} took {time(few.step_s)} and one with {many.tokens} took "
            f"{time(many.step_s)}: {many.tokens / few.tokens:.3g} times the tokens in "
            f"{number(many.step_s / few.step_s, None)} times the time."
        )
    if isinstance(roofline, LeftOut):
        said.append(roofline.reason)
    else:
        megabytes = number(roofline.weights_bytes / 1e6, None)
        said.append(
            f"The grey line is the least that a step needs, an estimate: {time(roofline.read_s)} to read "
            f"{megabytes} MB of weights once, or {time(roofline.compute_s(1))} of arithmetic for each position; "
            f"they meet at {number(roofline.knee_tokens, None)} positions."
        )
        said += _beyond_the_roof(decode, roofline)
    if lanes:
        points = ", ".join(
            f"{lane.lane} {number(lane.tokens, None)} and {number(lane.tokens_per_s, None)}" for lane in lanes
        )
        said.append(
            f"Positions in a step and tokens/s of each lane under {load}, in steps without a prompt: {points}."
        )
    return said


def _beyond_the_roof(decode: Sequence[StepSize], roofline: Roofline) -> list[str]:
    """Whether the roof explains the smallest step."""
    if not decode:
        return []
    ratio = decode[0].step_s / roofline.step_s(decode[0].tokens)
    if ratio < NEAR_THE_ROOF:
        return ["Left of that memory is the limit, right of it arithmetic."]
    return [
        f"The smallest step took {number(ratio, 1)} times that: most of its time is neither reading nor "
        "arithmetic at full speed."
    ]


def of_queues(sequential: Queue, batched: Queue) -> list[str]:
    """Who waited, and what sharing a step costs."""
    last = max(sequential.waits, key=lambda wait: wait.waited_s)
    longest_s = max(wait.waited_s for wait in batched.waits)
    alone_s, shared_s = (median(wait.served_s for wait in each.waits) for each in (sequential, batched))
    return [
        f"On {sequential.lane}, request {last.number} waited {time(last.waited_s)} for {time(last.served_s)} of "
        f"work, and all {len(sequential.waits)} were done after {time(sequential.done_s)}.",
        f"On {batched.lane} none waited longer than {time(longest_s)}, and all were done after "
        f"{time(batched.done_s)}.",
        f"The price is that a step is shared: once begun, a request took {time(shared_s)} there and "
        f"{time(alone_s)} alone (medians).",
    ]


def of_each_queue(queues: Sequence[Queue]) -> list[str]:
    """Who waited, lane by lane."""
    return [
        f"On {queue.lane} the longest wait was {time(max(wait.waited_s for wait in queue.waits))}, a request took "
        f"{time(median(wait.served_s for wait in queue.waits))} once begun (median), and all were done after "
        f"{time(queue.done_s)}."
        for queue in queues
    ]


def of_drafts(batched: Timeline, speculative: Timeline) -> list[str]:
    """What the drafts saved."""
    steps = speculative.decode_steps
    drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
    cut = accepted - sum(step.kept for step in steps)
    per_step = sum(step.emitted for step in steps) / len(steps)
    said = [
        f"After the prompt {batched.lane} needed {count(len(batched.decode_steps), 'step')} and {speculative.lane} "
        f"{len(steps)}, each of {number(per_step, None)} tokens on average"
        + (
            f"; of {drafted} drafted tokens the model accepted {accepted}, {share(accepted / drafted)}"
            + (f", {cut} of them beyond the answer's end." if cut else ".")
            if drafted
            else "."
        )
    ]
    checks_s = [step.lasted_s for step in steps if step.drafted]
    if checks_s:
        plain_s = median(step.lasted_s for step in batched.decode_steps)
        said.append(
            f"A step that checks drafts took {time(median(checks_s))}, a plain one {time(plain_s)} (medians): the "
            f"tokens took {time(speculative.lasted_s)} instead of {time(batched.lasted_s)}, prompt included."
        )
    if batched.text is not None and speculative.text is not None:
        said.append(
            "Both texts are the same."
            if batched.text.startswith(speculative.text) or speculative.text.startswith(batched.text)
            else "The texts differ: where two tokens are almost equally likely, rounding decides, and steps of "
            "another size round in another way."
        )
    return said
