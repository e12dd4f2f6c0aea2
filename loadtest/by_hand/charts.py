"""Charts of TTFT, TPOT and E2E on Locust's own page, at /latency. Locust's Charts tab shows only its totals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gevent
from markupsafe import Markup

SAMPLE_EVERY_S = 5.0
MAX_SAMPLES = 720  # an hour
CHARTED = ("TTFT", "TPOT", "E2E")
PATH = "/latency"
WIDTH, HEIGHT, MARGIN = 640, 180, 48  # pixels

PAGE = Markup("""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>Latency</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 14px system-ui; max-width: 720px; margin: 2em auto; padding: 0 1em }}
svg {{ width: 100%; height: auto }} text {{ fill: currentColor; font-size: 11px }}
polyline {{ fill: none; stroke-width: 2 }}
.p50 {{ stroke: #2a9d5c }} .p95 {{ stroke: #d9822b }} .axis {{ stroke: #888 }}
</style><p><a href="./">Locust</a></p><h1>Latency</h1>
<p>Each point: requests that ended in the {every:g} s before it.
<span style="color:#2a9d5c">p50</span>, <span style="color:#d9822b">p95</span>.</p>{charts}</html>""")

CHART = Markup("""<h2>{title}</h2><svg viewBox="0 0 {width} {height}" role="img" aria-label="{title} over time">
<line class="axis" x1="{left}" y1="{bottom}" x2="{width}" y2="{bottom}"/><line class="axis" x1="{left}" y1="8"
 x2="{left}" y2="{bottom}"/><text x="{left}" y="{height}">{first}</text>
<text x="{width}" y="{height}" text-anchor="end">{last}</text>
<text x="{before}" y="16" text-anchor="end">{top:.4g} ms</text>
<text x="{before}" y="{bottom}" text-anchor="end">0</text>
<polyline class="p50" points="{p50}"/><polyline class="p95" points="{p95}"/></svg>""")


@dataclass(frozen=True, slots=True)
class Point:
    """Percentiles, in ms, of the requests between two samples."""

    at_s: float
    p50_ms: float
    p95_ms: float


@dataclass(slots=True)
class History:
    """What each row's percentiles were over time, by (lane and workload, TTFT or TPOT or E2E)."""

    rows: dict[tuple[str, str], deque[Point]] = field(default_factory=dict)
    _seen: dict[tuple[str, str], dict[float, int]] = field(default_factory=dict)

    def sample(self, entries: Iterable[Any], now_s: float) -> None:
        """Note what was added to Locust's rows since the last sample."""
        for entry in entries:
            if entry.name not in CHARTED:
                continue
            key = (str(entry.method), str(entry.name))
            counts, before = dict(entry.response_times), self._seen.get(key, {})
            if sum(counts.values()) < sum(before.values()):
                before = {}  # Locust's statistics were reset
            fresh = {ms: count - before.get(ms, 0) for ms, count in counts.items()}
            self._seen[key] = counts
            if any(fresh.values()):
                point = Point(now_s, _percentile(fresh, 0.50), _percentile(fresh, 0.95))
                self.rows.setdefault(key, deque(maxlen=MAX_SAMPLES)).append(point)

    def page(self) -> str:
        """The page, as HTML."""
        order = sorted(self.rows, key=lambda key: (key[0], CHARTED.index(key[1])))
        charts = Markup("").join(_chart(f"{key[1]}, {key[0]}", list(self.rows[key])) for key in order)
        return str(
            PAGE.format(
                every=SAMPLE_EVERY_S, charts=charts or Markup("<p>Nothing has been measured yet.</p>")
            )
        )


def add_charts(environment: Any) -> None:
    """Serve the page, link it from Locust's own, and keep its history."""
    history = History()

    def keep_sampling() -> None:
        while True:
            gevent.sleep(SAMPLE_EVERY_S)
            history.sample(environment.stats.entries.values(), time.time())

    def link(response: Any) -> Any:
        """Locust's page takes tabs with tables only; a link in its corner leads to the charts."""
        if response.mimetype == "text/html" and b'id="root"' in response.get_data():
            anchor = (
                f'<a href=".{PATH}" style="position:fixed;right:1em;bottom:1em">TTFT, TPOT, E2E charts</a>'
            )
            response.set_data(response.get_data().replace(b"</body>", anchor.encode() + b"</body>"))
        return response

    environment.web_ui.app.add_url_rule(PATH, "latency", history.page)
    environment.web_ui.app.after_request(link)
    gevent.spawn(keep_sampling)


def _percentile(counts: Mapping[float, int], share: float) -> float:
    """The smallest value that at least `share` of the counted ones do not exceed."""
    wanted, seen = share * sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return float(value)
    raise ValueError("no counts")


def _clock_time(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _chart(title: str, points: list[Point]) -> Markup:
    left, bottom = MARGIN + 8, HEIGHT - 16
    top = max(point.p95_ms for point in points) or 1.0
    first, last = points[0].at_s, points[-1].at_s
    length = (last - first) or 1.0

    def line(values: Iterable[tuple[float, float]]) -> str:
        return " ".join(
            f"{left + (WIDTH - left) * (at - first) / length:.1f},{bottom - (bottom - 16) * ms / top:.1f}"
            for at, ms in values
        )

    return CHART.format(
        title=title, width=WIDTH, height=HEIGHT, left=left, before=left - 4, bottom=bottom, top=top,
        first=_clock_time(first), last=_clock_time(last),
        p50=line((point.at_s, point.p50_ms) for point in points),
        p95=line((point.at_s, point.p95_ms) for point in points),
    )  # fmt: skip
