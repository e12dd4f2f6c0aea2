"""What lanes give while they serve, over what their profile promises: from requests that ended. No clock, no I/O.

A profile is made in minutes on a machine that changes, and is off by some percent. Where two lanes are nearer than
that, only what they give tells them apart.

Half of what the other lanes fall short by is expected of a lane of which nothing is known: as likely the machine is
another than when it was measured as that lane's profile is wrong. The other half is its promise, and the longer it
was not asked the more of it: so a lane that disappoints is left for one that was not asked, at once or later, and
that one is learnt in turn. One whose profile is too low is only found out by requests that pin it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from serving.core.speculation.estimator import faded

MEMORY_REQUESTS = 50  # the newest weighs as much as one of so many
PROMISE_REQUESTS = 3  # the profile counts as much as so many requests
SHARED = 0.5  # of what other lanes fall short by, of a lane that was just asked or never
NEAR = 0.25  # what a request says of batches twice or half as large as its own counts so much
MIN_STEPS = 8  # of an answer: a shorter one is mostly its prompt
MOST = 4.0  # times slower or faster than promised that one request can say: a client may read as slowly as it likes
MIN_ALONE = 0.9  # share of a request's time with the cores to its replica alone


@dataclass(slots=True)
class Promise:
    """What a replica's profile has promised so far; whoever holds it brings it up to date before what runs changes.

    Attributes:
        at_s: up to when.
        steps: of the engine, while anything ran.
        batch_s: sum of the sequences over time.
        alone_s: without another replica at work on the same cores.
    """

    at_s: float = -math.inf
    steps: float = 0.0
    batch_s: float = 0.0
    alone_s: float = 0.0

    def since(self, now_s: float) -> float:
        """Seconds from the last time it was brought up to date, which it is by this."""
        elapsed_s = max(0.0, now_s - self.at_s) if math.isfinite(self.at_s) else 0.0
        self.at_s = now_s
        return elapsed_s

    def add(self, elapsed_s: float, step_s: float, batch: float, is_alone: bool) -> None:
        """So many sequences ran in steps of that length."""
        self.steps += elapsed_s / step_s
        self.batch_s += batch * elapsed_s
        self.alone_s += elapsed_s if is_alone else 0.0


class Stay:
    """A sequence on a replica, from when it came."""

    __slots__ = ("_alone_s", "_batch_s", "_came_at_s", "_promise", "_steps")

    def __init__(self, promise: Promise) -> None:
        self._promise = promise
        self._came_at_s = promise.at_s
        self._steps, self._batch_s, self._alone_s = promise.steps, promise.batch_s, promise.alone_s

    def slowness(self, promise: Promise, num_steps: float) -> tuple[float, float] | None:
        """The mean batch that it ran in, and its time over what was promised for its steps.

        None where it says nothing.
        """
        lasted_s = promise.at_s - self._came_at_s
        promised = promise.steps - self._steps
        # The replica may have come anew meanwhile, with another promise.
        if promise is not self._promise or num_steps < MIN_STEPS or lasted_s <= 0 or promised <= 0:
            return None
        if promise.alone_s - self._alone_s < MIN_ALONE * lasted_s:
            return None
        return (promise.batch_s - self._batch_s) / lasted_s, promised / num_steps


@dataclass(frozen=True, slots=True)
class Correction:
    """Of a lane at about that batch: what it gives over what its profile promises."""

    lane: str
    batch: int
    factor: float


@dataclass(slots=True)
class _Learnt:
    slowness: float = 0.0  # sum
    weight: float = 0.0
    at_s: float = 0.0


class Corrections:
    """What lanes give over what is promised, kept by the power of 2 that is nearest to the batch.

    Attributes:
        now_s: by which what was learnt fades.
    """

    def __init__(self) -> None:
        self._learnt: dict[str, dict[int, _Learnt]] = {}
        self.now_s = 0.0
        self._began_at_s = math.inf

    def learn(self, lane: str, batch: float, slowness: float, now_s: float) -> None:
        """A request took so many times what was promised, in a batch of that size on the mean."""
        learnt = self._learnt.setdefault(lane, {}).setdefault(round(_log2(batch)), _Learnt())
        kept = faded(learnt.at_s, now_s) * (1 - 1 / MEMORY_REQUESTS)
        slowness = min(MOST, max(1 / MOST, slowness))
        learnt.slowness = learnt.slowness * kept + slowness
        learnt.weight = learnt.weight * kept + 1
        learnt.at_s = self.now_s = now_s
        self._began_at_s = min(self._began_at_s, now_s)

    def factor(self, lane: str, batch: float) -> float:
        """What the lane is expected to give at that batch, over what its profile says; 1 while nothing is known."""
        weight, slowness = self._seen(lane, batch)
        others = [self._seen(other, batch) for other in self._learnt if other != lane]
        others_weight = PROMISE_REQUESTS + sum(each[0] for each in others)
        others_slowness = PROMISE_REQUESTS + sum(each[1] for each in others)
        asked_at_s = max(
            (each.at_s for each in self._learnt.get(lane, {}).values()), default=self._began_at_s
        )
        shared = SHARED * faded(asked_at_s, self.now_s)
        promise: float = PROMISE_REQUESTS * (others_slowness / others_weight) ** shared
        return (PROMISE_REQUESTS + weight) / (promise + slowness)

    def _seen(self, lane: str, batch: float) -> tuple[float, float]:
        """Of a lane at that batch: for how many requests it counts what was seen, and the sum of their slowness."""
        at = _log2(batch)
        weight = slowness = 0.0
        for level, learnt in self._learnt.get(lane, {}).items():
            left = faded(learnt.at_s, self.now_s) * NEAR ** abs(level - at)
            weight += left * learnt.weight
            slowness += left * learnt.slowness
        return weight, slowness

    def all(self) -> Iterator[Correction]:
        """Those of which something is known, by lane and batch."""
        for lane, by_level in sorted(self._learnt.items()):
            for level in sorted(by_level):
                yield Correction(lane, 2**level, self.factor(lane, 2**level))


def _log2(batch: float) -> float:
    return math.log2(max(1.0, batch))
