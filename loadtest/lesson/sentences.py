"""What to see in each picture, with this run's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median

from loadtest.judge.settled import ASSUMED_STAGE_SD
from loadtest.judge.wording import count, number, share, time
from loadtest.lesson.envelope import Curve, Envelope, Reckoned, best_fixed, largest_loss
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


def of_envelope(envelope: Envelope) -> list[str]:
    """Which fixed k is best where, what each gives away elsewhere, and where adaptive runs."""
    said = [
        "The band is the envelope: whichever fixed k gives most at a load. Each point was measured once, so two "
        "lanes that do the same may be some tens of percent apart on a machine that others use.",
        *of_best(envelope.curves),
    ]
    if envelope.reckoned is None:
        said += [
            _of_adaptive(envelope, name) for name in dict.fromkeys(each.name for each in envelope.adaptive)
        ]
    elif isinstance(envelope.reckoned, str):
        said.append(envelope.reckoned)
    else:
        said += _of_reckoned(envelope.reckoned)
    return said


def of_best(curves: Sequence[Curve]) -> list[str]:
    """Of the fixed ones: the best at each load, and the most that each gives away."""
    texts = list(dict.fromkeys(curve.text for curve in curves))
    by_text = {text: best_fixed(curves, text) for text in texts}
    said = []
    for text, bests in by_text.items():
        runs = _runs((best.name, best.requests) for best in bests)
        close = [
            str(best.requests)
            for best in bests
            if best.next_share is not None and best.next_share > 1 - ASSUMED_STAGE_SD
        ]
        said.append(
            f"{_begun(text)}: best is {runs}"
            + (f" (within {ASSUMED_STAGE_SD:.0%} of the next at {_listed(close)})." if close else ".")
        )
    names = list(dict.fromkeys(curve.name for curve in curves if curve.is_fixed))
    losses = {name: largest_loss(curves, name) for name in names}
    good = [name for name, loss in losses.items() if loss.share <= ASSUMED_STAGE_SD]
    given_away = " and ".join(
        f"{name} gives away {share(loss.share)} ({loss.text}, {loss.requests} at once)"
        for name, loss in losses.items()
        if name not in good
    )
    said.append(
        (
            f"Best everywhere here, or within {ASSUMED_STAGE_SD:.0%} of it: {_listed(good)}"
            if good
            else "No fixed choice is best everywhere"
        )
        + (f"; at its worst {given_away}." if given_away else ".")
    )
    return said


def _of_adaptive(envelope: Envelope, name: str) -> str:
    """What was measured of it."""
    loss = largest_loss(envelope.curves, name)
    where = f"({loss.text}, {loss.requests} at once)"
    said = (
        f"Measured, {name} is at most {share(loss.share)} below the envelope {where}"
        if loss.share > 0
        else f"Measured, {name} is never below the envelope; nearest to it {where}"
    )
    ran = [
        f"{curve.text}, {_runs((' and '.join(sorted(point.ran_on)), point.requests) for point in curve.points)}"
        for curve in envelope.adaptive
        if curve.name == name and all(point.ran_on for point in curve.points)
    ]
    loads = {point.requests for curve in envelope.curves for point in curve.points}
    missing = [
        f"{curve.text}, {_listed([str(load) for load in sorted(lacking)])} at once"
        for curve in envelope.adaptive
        if curve.name == name and (lacking := loads - {point.requests for point in curve.points})
    ]
    said += f"; its requests ran on: {'; '.join(ran)}." if ran else "."
    if missing:
        said += f" It has no point where its requests were never all under way: {'; '.join(missing)}."
    return said


def _of_reckoned(reckoned: Reckoned) -> list[str]:
    where = "; ".join(
        f"{text}, {_runs((f'k = {point.num_drafts}', point.requests) for point in points)}"
        for text, points in reckoned.points.items()
    )
    return [
        "Adaptive was not measured: no lane and no placement of this lab chooses k by load. The dotted line, with "
        "its k above, is the best as reckoned by the cost model, fitted to the steps of this picture; of the "
        f"lanes measured it is {share(reckoned.median_error)} off in the median, {share(reckoned.largest_error)} "
        "at most.",
        f"It would draft: {where}.",
    ]


def _runs(at_loads: Iterable[tuple[str, int]]) -> str:
    """`a at 1 to 8 at once and b at 16`."""
    runs = []
    for name, group in groupby(at_loads, key=lambda each: each[0]):
        loads = [load for _, load in group]
        runs.append(f"{name} at {loads[0]}" + (f" to {loads[-1]}" if len(loads) > 1 else ""))
    return f"{_listed(runs)} at once"


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _begun(text: str) -> str:
    return text[0].upper() + text[1:]
