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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Totals = defaultdict[tuple[str, str], float]  # by metric and lane
Buckets = defaultdict[float, float]  # observations at or below each upper edge in seconds

_HISTOGRAMS = (names.TTFT.name, names.TPOT.name)
_GAUGES = (names.REPLICA_READY.name, names.WANTED_REPLICAS.name, names.RUNNING.name, names.WAITING.name)
_COUNTERS = (
    names.REFUSALS.name,
    names.VLLM_GENERATED_TOKENS,
    names.VLLM_DRAFT_TOKENS,
    names.VLLM_ACCEPTED_TOKENS,
)
_SUMMED = (*_GAUGES, *_COUNTERS)
_WANTED = (*_SUMMED, *(f"{name}_bucket" for name in _HISTOGRAMS))


@dataclass(frozen=True, slots=True)
class Page:
    """What one process counted by one instant.

    Attributes:
        totals: by metric and lane.
        buckets: cumulative counts by metric, lane and upper edge in seconds.
    """

    totals: Mapping[tuple[str, str], float]
    buckets: Mapping[tuple[str, str], Mapping[float, float]]


NOTHING_COUNTED = Page({}, {})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the lab's processes counted by one instant.

    Attributes:
        at_s: monotonic.
        pages: of each process that is listed, by a name of its own; None for one that could not be read.
        faults: those processes, and why.
    """

    at_s: float
    pages: Mapping[str, Page | None] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


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
    """What is shown at once.

    Attributes:
        waiting_any: requests that pinned no lane, as those of `refusals_any_per_s`.
        faults: processes that cannot be read now, and why.
        left_out: processes that were read only once in the window, so no rate can have them.
    """

    window_s: float
    lanes: tuple[LaneFigures, ...]
    waiting_any: int
    refusals_any_per_s: float
    faults: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def read_page(text: str, lane_of_process: str) -> Page:
    """One process's `/metrics`; a sample without a lane is of the process's.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    totals: Totals = defaultdict(float)
    buckets: defaultdict[tuple[str, str], Buckets] = defaultdict(lambda: defaultdict(float))
    for sample in samples_of(text, _WANTED):
        lane = sample.labels.get("lane", lane_of_process)
        if sample.name in _SUMMED:
            totals[sample.name, lane] += sample.value
        else:
            buckets[sample.name.removesuffix("_bucket"), lane][float(sample.labels["le"])] += sample.value
    return Page(totals, buckets)


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
    at_s = clock()
    pages: dict[str, Page | None] = {}
    faults = []
    with ThreadPoolExecutor(MAX_READS_AT_ONCE) as readers:
        texts = list(readers.map(lambda target: _text(fetch, target[0]), targets))
    for (address, labels), text in zip(targets, texts, strict=True):
        process = f"{labels['role']} at {address}"
        pages[process] = None
        try:
            if isinstance(text, OSError):
                raise text
            pages[process] = read_page(text.decode(), labels.get("lane", ""))
        except (OSError, ValueError) as error:
            faults.append(f"{process}: {error}")
    return Snapshot(at_s, pages, tuple(faults))


def _text(fetch: Fetch, address: str) -> bytes | OSError:
    try:
        return fetch(f"http://{address}/metrics")
    except OSError as error:
        return error


def frame(snapshots: Sequence[Snapshot]) -> Frame:
    """The figures of a window.

    Args:
        snapshots: of the window, oldest first, at least one.
    """
    last = snapshots[-1]
    window_s = last.at_s - snapshots[0].at_s
    now = [page.totals for page in last.pages.values() if page is not None]
    grown: Totals = defaultdict(float)
    buckets: defaultdict[tuple[str, str], Buckets] = defaultdict(lambda: defaultdict(float))
    left_out = []
    for process in dict.fromkeys(name for snapshot in snapshots for name in snapshot.pages):
        growth = _growth(process, snapshots)
        if growth is None:
            # Of one that cannot be read now, the fault says it.
            if last.pages.get(process) is not None and window_s > 0:
                left_out.append(process)
            continue
        for key, value in growth.totals.items():
            grown[key] += value
        for key, edges in growth.buckets.items():
            for edge_s, count in edges.items():
                buckets[key][edge_s] += count

    def gauge(metric: str, lane: str) -> int:
        return int(sum(totals.get((metric, lane), 0.0) for totals in now))

    def increase(metric: str, lane: str) -> float:
        return grown.get((metric, lane), 0.0)

    def rate(metric: str, lane: str) -> float:
        return increase(metric, lane) / window_s if window_s > 0 else 0.0

    def percentile(metric: str, lane: str, share: float) -> float | None:
        return quantile_s(share, buckets.get((metric, lane), {}))

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

    lanes = dict.fromkeys(
        lane for totals in now for metric, lane in totals if metric == names.WANTED_REPLICAS.name
    )
    return Frame(
        window_s,
        tuple(map(figures, lanes)),
        gauge(names.WAITING.name, ANY_LANE),
        rate(names.REFUSALS.name, ANY_LANE),
        last.faults,
        tuple(left_out),
    )


def _growth(process: str, snapshots: Sequence[Snapshot]) -> Page | None:
    """How much a process counted while it was listed; None where it was read less than twice.

    Before its first reading and after its last one it is taken to have counted as fast as in between. What it had
    counted before the first one is unknown: it may be new, or have been out of reach.
    """
    listed_at_s = [snapshot.at_s for snapshot in snapshots if process in snapshot.pages]
    readings = [
        (snapshot.at_s, page) for snapshot in snapshots if (page := snapshot.pages.get(process)) is not None
    ]
    if len(readings) < 2 or readings[-1][0] <= readings[0][0]:
        return None
    (from_s, before), (until_s, after) = readings[0], readings[-1]
    if _has_gone_back(before, after):
        before = NOTHING_COUNTED  # another process under the same name
    scale = (listed_at_s[-1] - listed_at_s[0]) / (until_s - from_s)
    totals = {
        key: scale * (value - before.totals.get(key, 0.0))
        for key, value in after.totals.items()
        if key[0] in _COUNTERS
    }
    buckets = {}
    for key, edges in after.buckets.items():
        earlier = before.buckets.get(key, {})
        buckets[key] = {edge_s: scale * (count - earlier.get(edge_s, 0.0)) for edge_s, count in edges.items()}
    return Page(totals, buckets)


def _has_gone_back(before: Page, after: Page) -> bool:
    return any(
        after.totals.get(key, 0.0) < value for key, value in before.totals.items() if key[0] in _COUNTERS
    ) or any(
        after.buckets.get(key, {}).get(edge_s, 0.0) < count
        for key, edges in before.buckets.items()
        for edge_s, count in edges.items()
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
        yield frame(kept)


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
    return frame((first, read_snapshot(base_url, fetch, clock)))


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
    below += [f"read only once, so in no rate yet: {process}" for process in shown.left_out]
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
