"""`tandem watch`: the headline figures of a running lab in a terminal, from its processes' own `/metrics`.

No Prometheus is needed. Rates and percentiles are over a window, or since it began; a frame says how long that is.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import termios
import time
import tty
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serving.core.lane import ANY_LANE
from serving.metrics import names
from serving.metrics.reading import samples_of

WINDOW_S = 30.0  # that slides, unless another is asked for
ONCE_S = 10.0  # of a single frame: requests take seconds, so in one second most rates are 0
REFRESH_S = 1.0
MAX_READS_AT_ONCE = 8

Fetch = Callable[[str], bytes]
Buckets = defaultdict[float, float]  # observations at or below each upper edge in seconds

_HISTOGRAMS = (names.TTFT.name, names.TPOT.name)
_SUMMED = (
    names.REPLICA_READY.name,
    names.WANTED_REPLICAS.name,
    names.RUNNING.name,
    names.WAITING.name,
    names.REFUSALS.name,
    names.VLLM_GENERATED_TOKENS,
    names.VLLM_DRAFT_TOKENS,
    names.VLLM_ACCEPTED_TOKENS,
)
_WANTED = (*_SUMMED, *(f"{name}_bucket" for name in _HISTOGRAMS))


@dataclass(slots=True)
class Snapshot:
    """What the lab counted by one instant, summed over its processes.

    Attributes:
        at_s: monotonic.
        totals: by metric and lane.
        buckets: cumulative counts by metric, lane and upper edge in seconds.
        faults: processes that could not be read, and why.
    """

    at_s: float
    totals: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[tuple[str, str], Buckets] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def add_page(self, text: str, lane_of_process: str) -> None:
        """Add one process's `/metrics`; a sample without a lane is of the process's.

        Raises:
            ValueError: the text is not in Prometheus' format.
        """
        for sample in samples_of(text, _WANTED):
            lane = sample.labels.get("lane", lane_of_process)
            if sample.name in _SUMMED:
                self.totals[sample.name, lane] += sample.value
            else:
                key = (sample.name.removesuffix("_bucket"), lane)
                edges = self.buckets.setdefault(key, defaultdict(float))
                edges[float(sample.labels["le"])] += sample.value


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """One lane over the window; None where nothing happened that could be measured."""

    lane: str
    replicas_ready: int
    replicas_wanted: int
    running: int
    waiting: int
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    acceptance_rate: float | None
    refusals_per_s: float


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown at once. `waiting_any` and `refusals_any_per_s` are of requests that pinned no lane."""

    window_s: float
    lanes: tuple[LaneFigures, ...]
    waiting_any: int
    refusals_any_per_s: float
    faults: tuple[str, ...]


def read_snapshot(base_url: str, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> Snapshot:
    """Read every process that `/targets` lists.

    Raises:
        OSError: the gateway does not answer.
        ValueError: what answers is no gateway.
    """
    groups = json.loads(fetch(f"{base_url}/targets"))
    try:
        targets = [
            (address, group["labels"]) for group in groups for address in group["targets"]
            if group["labels"]["role"] != "ray"
        ]  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"{base_url}/targets: not a list of targets: {error!r}") from error
    snapshot, faults = Snapshot(clock()), []
    with ThreadPoolExecutor(MAX_READS_AT_ONCE) as readers:
        pages = list(readers.map(lambda target: _page(fetch, target[0]), targets))
    for (address, labels), page in zip(targets, pages, strict=True):
        try:
            if isinstance(page, OSError):
                raise page
            snapshot.add_page(page.decode(), labels.get("lane", ""))
        except (OSError, ValueError) as error:
            faults.append(f"{labels['role']} at {address}: {error}")
    snapshot.faults = tuple(faults)
    return snapshot


def _page(fetch: Fetch, address: str) -> bytes | OSError:
    try:
        return fetch(f"http://{address}/metrics")
    except OSError as error:
        return error


def frame(first: Snapshot, last: Snapshot) -> Frame:
    """The figures between two snapshots; a counter that went back belongs to a process that is gone."""
    window_s = last.at_s - first.at_s

    def gauge(metric: str, lane: str) -> int:
        return int(last.totals.get((metric, lane), 0))

    def increase(metric: str, lane: str) -> float:
        key = (metric, lane)
        return max(0.0, last.totals.get(key, 0.0) - first.totals.get(key, 0.0))

    def rate(metric: str, lane: str) -> float:
        return increase(metric, lane) / window_s if window_s > 0 else 0.0

    def percentile(metric: str, lane: str, share: float) -> float | None:
        before: Mapping[float, float] = first.buckets.get((metric, lane), {})
        now: Mapping[float, float] = last.buckets.get((metric, lane), {})
        return quantile_s(share, {edge: count - before.get(edge, 0.0) for edge, count in now.items()})

    def figures(lane: str) -> LaneFigures:
        drafted = increase(names.VLLM_DRAFT_TOKENS, lane)
        return LaneFigures(
            lane=lane,
            replicas_ready=gauge(names.REPLICA_READY.name, lane),
            replicas_wanted=gauge(names.WANTED_REPLICAS.name, lane),
            running=gauge(names.RUNNING.name, lane),
            waiting=gauge(names.WAITING.name, lane),
            tokens_per_s=rate(names.VLLM_GENERATED_TOKENS, lane),
            ttft_p50_s=percentile(names.TTFT.name, lane, 0.5),
            ttft_p95_s=percentile(names.TTFT.name, lane, 0.95),
            tpot_p50_s=percentile(names.TPOT.name, lane, 0.5),
            acceptance_rate=increase(names.VLLM_ACCEPTED_TOKENS, lane) / drafted if drafted else None,
            refusals_per_s=rate(names.REFUSALS.name, lane),
        )

    lanes = [lane for metric, lane in last.totals if metric == names.WANTED_REPLICAS.name]
    return Frame(
        window_s,
        tuple(map(figures, lanes)),
        gauge(names.WAITING.name, ANY_LANE),
        rate(names.REFUSALS.name, ANY_LANE),
        last.faults,
    )


def quantile_s(share: float, cumulative: Mapping[float, float]) -> float | None:
    """Quantile of a histogram, linear within a bucket, as Prometheus' `histogram_quantile` has it.

    Args:
        share: 0 to 1.
        cumulative: observations at or below each upper edge, the infinite one among them.

    Returns:
        None without observations; the highest finite edge for what lies above it.
    """
    edges = sorted(cumulative)
    if not edges or cumulative[edges[-1]] <= 0:
        return None
    rank = share * cumulative[edges[-1]]
    lower_s, below = 0.0, 0.0
    for edge_s in edges:
        if cumulative[edge_s] >= rank:
            if math.isinf(edge_s):
                return lower_s
            inside = cumulative[edge_s] - below
            return lower_s + (edge_s - lower_s) * ((rank - below) / inside if inside else 1.0)
        lower_s, below = edge_s, cumulative[edge_s]
    return lower_s


def frames(
    base_url: str,
    fetch: Fetch,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
    window_s: float = WINDOW_S,
) -> Iterator[Frame]:
    """A frame each second, over the last `window_s`, until `wait` (given seconds) says that it is enough.

    Raises:
        OSError, ValueError: as `read_snapshot`.
    """
    kept = deque([read_snapshot(base_url, fetch, clock)])
    while not wait(REFRESH_S):
        kept.append(read_snapshot(base_url, fetch, clock))
        while kept[-1].at_s - kept[0].at_s > window_s and len(kept) > 2:
            kept.popleft()
        yield frame(kept[0], kept[-1])


def one_frame(
    base_url: str,
    fetch: Fetch,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
    window_s: float = ONCE_S,
) -> Frame:
    """A single frame, over `window_s` from now on, or as long as `wait` waits.

    Raises:
        OSError, ValueError: as `read_snapshot`.
    """
    first = read_snapshot(base_url, fetch, clock)
    wait(window_s)
    return frame(first, read_snapshot(base_url, fetch, clock))


HEADINGS = ("lane", "ready", "run", "wait", "tok/s", "TTFT p50", "p95", "TPOT p50", "accept", "refuse/s")


def picture(shown: Frame, base_url: str) -> Group:
    """The frame as a table that fits 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True, justify="left" if heading == "lane" else "right")
    for lane in shown.lanes:
        is_short = lane.replicas_ready < lane.replicas_wanted
        table.add_row(
            lane.lane,
            Text(f"{lane.replicas_ready}/{lane.replicas_wanted}", style="bold red" if is_short else ""),
            str(lane.running),
            str(lane.waiting),
            f"{lane.tokens_per_s:.1f}",
            _seconds(lane.ttft_p50_s),
            _seconds(lane.ttft_p95_s),
            _seconds(lane.tpot_p50_s),
            "-" if lane.acceptance_rate is None else f"{lane.acceptance_rate:.0%}",
            f"{lane.refusals_per_s:.1f}",
        )
    below = [f"{base_url}, last {shown.window_s:.0f} s"]
    if shown.waiting_any or shown.refusals_any_per_s:
        below.append(f"for any lane: {shown.waiting_any} waiting, {shown.refusals_any_per_s:.1f} refused/s")
    below += [f"cannot read {fault}" for fault in shown.faults]
    return Group(table, Text("\n".join(below), style="dim"))


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.2f} s"


def as_json(shown: Frame) -> str:
    """The frame as one line of JSON, times in seconds."""
    return json.dumps(asdict(shown))


def show(shown: Iterable[Frame], base_url: str, console: Console) -> None:
    """Draw frames in place until there are no more."""
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for next_frame in shown:
            live.update(picture(next_frame, base_url), refresh=True)


@contextmanager
def key_q() -> Iterator[Callable[[float], bool]]:
    """A wait that ends early, and with True, when `q` is pressed; without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _wait_for_q
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _wait_for_q(seconds: float) -> bool:
    give_up_at_s = time.monotonic() + seconds
    while (left_s := give_up_at_s - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left_s)
        # Not through Python's own buffer, which `select` cannot see into.
        if ready and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False
