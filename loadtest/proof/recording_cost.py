"""What recording an engine's steps costs: `make bench-recording` beside a running lab.

Requests keep a replica's batch full. Windows with and without a recording take turns; the engine's own counters
give the mean step time of each. The figure is the median ratio of neighbours, with its 95 percent interval.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from loadtest.client.lab import LabError, describe_lab
from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import percentile_estimate
from serving.core.addresses import GATEWAY_URL
from serving.core.client_key import key_headers
from serving.core.exit_codes import ExitCode
from serving.core.http_get import GetError, get, post
from serving.metrics import names as metric_names
from serving.metrics.reading import sums_of
from serving.progress import progress
from serving.tracing.recording import MAX_EVENTS, RecordingError, recording

SETTLE_S = 5.0
ANSWER_TOKENS = 400
ANSWER_TIMEOUT_S = 120.0
MARGIN_S = 60.0  # how much longer than a window a recording may last


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    help="Measure what recording steps costs on the running lab. Nothing else should use it meanwhile.",
)
@click.option("--base-url", default=GATEWAY_URL)
@click.option("--lane", default="batched")
@click.option("--concurrency", type=click.IntRange(1, 64), default=8, help="Requests that run all the time.")
@click.option("--pairs", type=click.IntRange(6, 1000), default=60, help="Windows with, and as many without.")
@click.option("--window-s", type=click.FloatRange(0.2, 60), default=1.0)
def main(base_url: str, lane: str, concurrency: int, pairs: int, window_s: float) -> None:
    try:
        lab = describe_lab(base_url)
        (replica, *_) = [candidate for candidate in lab["replicas"] if candidate["lane"] == lane]
        with progress() as say, load(base_url, f"{lab['model']['name']}:{lane}", concurrency):
            say(f"{concurrency} requests at once on {lane}")
            time.sleep(SETTLE_S)
            ratios, off_s = [], []
            for number in range(pairs):
                say(f"{number} of {pairs} pairs of {window_s:g} s")
                # In turns the first and the second: a drift of the machine then favours neither.
                order = (True, False) if number % 2 else (False, True)
                mean_step_s = {on: step_s(replica["url"], window_s, is_recorded=on) for on in order}
                ratios.append(mean_step_s[True] / mean_step_s[False])
                off_s.append(mean_step_s[False])
    except ValueError:
        raise click.UsageError(f"--lane {lane}: the lab has no ready replica of it") from None
    except (LabError, GetError, RecordingError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.FAILED)
    click.echo(told(percentile_estimate(ratios, 50), percentile_estimate(off_s, 50)))


def told(ratio: Estimate | None, off_s: Estimate | None) -> str:
    assert ratio is not None
    assert off_s is not None
    interval = "" if ratio.low is None else f" [{ratio.low:.4f}, {ratio.high:.4f}]"
    plain_ms = off_s.value * 1000
    return f"step time recorded / not recorded: {ratio.value:.4f}{interval}; not recorded {plain_ms:.2f} ms"


def step_s(replica_url: str, window_s: float, *, is_recorded: bool) -> float:
    """Mean time of an engine step over a window."""
    recorded = [replica_url] if is_recorded else []
    with recording(recorded, limit_s=window_s + MARGIN_S, max_events=MAX_EVENTS) as recordings:
        before = counters(replica_url)
        time.sleep(window_s)
        after = counters(replica_url)
        for step_recording in recordings:
            step_recording.discard()
    steps, busy_s = (now - then for now, then in zip(after, before, strict=True))
    if not steps:
        raise LabError(f"{replica_url}: the engine made no step in {window_s:g} s")
    return busy_s / steps


def counters(replica_url: str) -> tuple[float, float]:
    """Steps, and the seconds they took, since the engine started."""
    names = (metric_names.ENGINE_STEPS.name, metric_names.ENGINE_BUSY.name)
    sums = sums_of(get(f"{replica_url}/metrics").decode(), names)
    return sums[names[0]], sums[names[1]]


@contextmanager
def load(base_url: str, model: str, concurrency: int) -> Iterator[None]:
    """Keep so many requests running; their last answers are waited for."""
    body = {"model": model, "prompt": "Once", "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            post(f"{base_url}/v1/completions", body, key_headers(), timeout_s=ANSWER_TIMEOUT_S)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(prog_name="bench-recording")
