"""When requests are due: a load is turned into instants before it starts, from a seed.

One rule makes every shape. A process of one arrival per unit of *work* is laid out first; the instant of an
arrival is where the rate, summed over time, reaches its place. A steady rate, steps, ramps and spikes differ
only in that sum.

    8 | closed:8 | closed:8,think=2s            users in a closed loop
    poisson:2/s | poisson:2/s,90s               a rate; constant and gamma likewise
    gamma:2/s,burstiness=0.5                    below 1 comes in bursts, above 1 is more even
    poisson:steps=1-2-4/s,30s                   each step 30 s
    poisson:ramp=0.5-4/s,120s                   in a straight line
    poisson:spike=1-8/s,60s                     the middle third at the peak
    trace:PATH | trace:PATH,speed=2,60s         a recorded trace, here twice as fast and for 60 s at most
    trace:PATH,from=2h,60s                      a window of it; no more is read than that
    trace:PATH,unit=ms                          where the layout leaves the unit of time open
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Literal, cast

from loadtest.offer.load import Arrival, ClosedLoop, Load, OpenLoop, Process, RateSegment, TraceReplay
from loadtest.offer.recorded_trace import SECONDS_OF_UNIT, RecordedTrace, read_recorded_trace

DEFAULT_DURATION_S = 60.0  # of a rate, of each step, of a whole ramp or spike
MAX_DURATION_S = 86_400.0
MAX_FROM_S = 366 * 86_400.0  # traces of months are published
MAX_RATE_PER_S = 100_000.0
MAX_REQUESTS = 1_000_000  # of one schedule, which is laid out in memory
MAX_USERS = 100_000

_FORMS = (
    "8, closed:8,think=2s, poisson:2/s,60s, gamma:2/s,burstiness=0.5, poisson:steps=1-2-4/s,30s, "
    "poisson:ramp=0.5-4/s,120s, poisson:spike=1-8/s,60s, trace:PATH,from=2h,60s,speed=2,unit=ms"
)
_PROCESSES: tuple[Process, ...] = ("constant", "poisson", "gamma")
_NUMBER = r"\d+(?:\.\d+)?|\.\d+"
_DURATION = re.compile(rf"({_NUMBER})(ms|s|min|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
# A path may hold commas: options of a trace are taken from its end.
_REPLAY_OPTION = re.compile(rf",((?:speed|from|unit)=[^,]*|{_DURATION.pattern})$")


def schedule(load: OpenLoop | TraceReplay, seed: str) -> tuple[Arrival, ...]:
    """Every arrival of a load, in order, in seconds since its start.

    Args:
        seed: decides the gaps of `poisson` and `gamma`; `constant` and a trace have nothing to draw.

    Raises:
        ValueError: the trace cannot be read.
    """
    if isinstance(load, TraceReplay):
        return _replay(load)
    gaps = _gaps(load, random.Random(seed))
    return tuple(Arrival(at_s) for at_s in _instants(load.segments, gaps))


def _gaps(load: OpenLoop, rng: random.Random) -> Iterator[float]:
    """Gaps with a mean of 1, endless.

    The first is drawn as one that was under way when the load began (an equilibrium renewal process);
    else a bursty load would hold more arrivals than its rate says.
    """
    if load.process == "constant":
        yield 0.5
        yield from repeat(1.0)
    shape = load.burstiness if load.process == "gamma" else 1.0
    yield rng.random() * rng.gammavariate(shape + 1, 1 / shape)
    while True:
        yield rng.gammavariate(shape, 1 / shape)


def _instants(segments: tuple[RateSegment, ...], gaps: Iterator[float]) -> Iterator[float]:
    """Where the rate summed over time reaches each arrival's place."""
    place = next(gaps)
    started_at_s = 0.0
    requests_before = 0.0
    for segment in segments:
        requests_after = requests_before + segment.requests
        while place < requests_after:
            yield started_at_s + _time_until_s(segment, place - requests_before)
            place += next(gaps)
        started_at_s += segment.duration_s
        requests_before = requests_after


def _time_until_s(segment: RateSegment, requests: float) -> float:
    """Time into a segment at which that many requests are due: the root of rate*t + slope*t*t/2 = requests."""
    slope_per_s2 = (segment.to_per_s - segment.from_per_s) / segment.duration_s
    # A sum under the root that rounding took below 0 is 0: the very end of a ramp down to nothing.
    rate_then_per_s = math.sqrt(max(0.0, segment.from_per_s**2 + 2 * slope_per_s2 * requests))
    mean_rate_per_s = (segment.from_per_s + rate_then_per_s) / 2
    return min(segment.duration_s, requests / mean_rate_per_s) if requests > 0 else 0.0


def _replay(load: TraceReplay) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(row.at_s / load.speed, row.prompt_tokens, row.output_tokens) for row in _recorded(load).rows
    )


def _recorded(load: TraceReplay) -> RecordedTrace:
    length_s = math.inf if load.max_duration_s is None else load.max_duration_s * load.speed
    return read_recorded_trace(Path(load.path), unit=load.unit, from_s=load.from_s, length_s=length_s)


def notes(load: Load) -> tuple[str, ...]:
    """What of a recorded trace is not sent, a line each.

    Raises:
        ValueError: the trace cannot be read.
    """
    return _recorded(load).notes if isinstance(load, TraceReplay) else ()


def parse_load(text: str) -> Load:
    """Read a load as it is typed; the forms are at the top of this module.

    Raises:
        ValueError: with the text, the value and what it should be.
    """
    try:
        kind, colon, rest = text.strip().partition(":")
        if not colon:
            return _closed(kind)
        if kind == "closed":
            return _closed(rest)
        if kind == "trace":
            return _trace_replay(rest)
        for process in _PROCESSES:
            if kind == process:
                return _open(process, rest)
        raise ValueError(f"{kind!r} is none of closed, {', '.join(_PROCESSES)}, trace")
    except ValueError as error:
        raise ValueError(f"load {text!r}: {error}; loads look like {_FORMS}") from None


def _closed(text: str) -> ClosedLoop:
    users, *options = text.split(",")
    if not re.fullmatch(r"\d{1,9}", users.strip()):
        raise ValueError(f"users {users.strip()!r} is not a whole number in 1..{MAX_USERS}")
    _in_range("users", int(users), 1, MAX_USERS)
    think_time_s = 0.0
    for name, value in _options(options):
        if name != "think":
            raise ValueError(f"{_shown(name, value)!r} is not known here; a closed loop has think")
        think_time_s = _duration_s(value, lowest_s=0)
    return ClosedLoop(int(users), think_time_s)


def _open(process: Process, text: str) -> OpenLoop:
    shape_text, *options = text.split(",")
    duration_s = DEFAULT_DURATION_S
    burstiness = 1.0
    for name, value in _options(options):
        if not name:
            duration_s = _duration_s(value)
        elif name == "burstiness" and process == "gamma":
            burstiness = _number("burstiness", value)
            _in_range("burstiness", burstiness, 0.01, 1000)
        else:
            known = "a duration and burstiness" if process == "gamma" else "a duration"
            raise ValueError(f"{_shown(name, value)!r} is not known here; {process} has {known}")
    shape, is_shaped, rates_text = shape_text.strip().rpartition("=")
    rates = _rates_per_s(rates_text)
    segments = _segments(shape if is_shaped else "rate", rates, duration_s)
    burst = f", burstiness {burstiness:g}" if process == "gamma" else ""
    # A rate is the same load however long it is offered; how long a ramp or a step takes is part of the load.
    length = f", {duration_s:g} s{' each' if shape == 'steps' else ''}" if is_shaped else ""
    name = f"{process} {shape + ' ' if shape else ''}{rates_text.removesuffix('/s')} req/s{burst}{length}"
    load = OpenLoop(segments, process, burstiness, name)
    _in_range("duration in s", load.duration_s, 0, MAX_DURATION_S)
    _in_range("requests expected", load.requests, 0, MAX_REQUESTS)
    return load


def _segments(shape: str, rates: tuple[float, ...], duration_s: float) -> tuple[RateSegment, ...]:
    match shape, rates:
        case "rate", (rate,):
            return (RateSegment(duration_s, rate, rate),)
        case "steps", (_, _, *_):
            return tuple(RateSegment(duration_s, rate, rate) for rate in rates)
        case "ramp", (low, high):
            return (RateSegment(duration_s, low, high),)
        case "spike", (base, peak):
            return tuple(RateSegment(duration_s / 3, rate, rate) for rate in (base, peak, base))
    wanted = {"rate": "one rate", "steps": "two rates or more", "ramp": "two rates", "spike": "two rates"}
    if shape not in wanted:
        raise ValueError(f"{shape!r} is not a shape; there are steps, ramp, spike")
    raise ValueError(f"{shape} takes {wanted[shape]}, got {len(rates)}")


def _trace_replay(text: str) -> TraceReplay:
    given: dict[str, str] = {}
    while (option := _REPLAY_OPTION.search(text)) is not None:
        text = text[: option.start()]
        name, value = _option(option[1])
        if name in given:
            raise ValueError(f"{name or 'duration'} is given twice")
        given[name] = value
    if not text:
        raise ValueError("a trace needs the path of its file")
    speed = _number("speed", given["speed"]) if "speed" in given else 1.0
    _in_range("speed", speed, 0.0001, 10_000)
    unit = given.get("unit", "")
    if "unit" in given and unit not in SECONDS_OF_UNIT:
        raise ValueError(f"unit {unit!r} must be one of {', '.join(SECONDS_OF_UNIT)}")
    return TraceReplay(
        text,
        speed,
        _duration_s(given[""]) if "" in given else None,
        _duration_s(given["from"], 0, MAX_FROM_S) if "from" in given else 0.0,
        cast(Literal["", "us", "ms", "s"], unit),
    )


def _options(parts: list[str]) -> list[tuple[str, str]]:
    """Name and value of each; a bare one is a duration and has no name."""
    options = [_option(part.strip()) for part in parts]
    names = [name for name, _ in options]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name or 'duration'} is given twice")
    return options


def _option(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    return (name, value) if equals else ("", part)


def _shown(name: str, value: str) -> str:
    return f"{name}={value}" if name else value


def _rates_per_s(text: str) -> tuple[float, ...]:
    if not text.endswith("/s"):
        raise ValueError(f"rate {text!r} has no unit; write it as 2/s")
    rates = tuple(_number("rate", part) for part in text.removesuffix("/s").split("-"))
    for rate in rates:
        _in_range("rate in req/s", rate, 0, MAX_RATE_PER_S)
    return rates


def _duration_s(text: str, lowest_s: float = 0.001, highest_s: float = MAX_DURATION_S) -> float:
    match = _DURATION.fullmatch(text)
    if not match:
        raise ValueError(f"duration {text!r} is not a number with ms, s, min or h, such as 60s")
    duration_s = float(match[1]) * _SECONDS[match[2]]
    _in_range("duration in s", duration_s, lowest_s, highest_s)
    return duration_s


def _number(name: str, text: str) -> float:
    if not re.fullmatch(_NUMBER, text):
        raise ValueError(f"{name} {text!r} is not a plain number, such as 0.5")
    return float(text)


def _in_range(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ValueError(f"{name}: {value:g} must be in {lowest:g}..{highest:g}")
