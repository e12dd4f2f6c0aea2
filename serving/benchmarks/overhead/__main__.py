"""`make bench-overhead`: a real engine bare and through our gateway, interleaved and repeated.

Exit codes: 0 it was measured, whatever the targets say; 1 not; 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import click

from serving import machine, run_directory
from serving.benchmarks.client import EventReader, Load, measure
from serving.benchmarks.overhead.engines import Side, both_here, elsewhere
from serving.benchmarks.overhead.figures import (
    BARE,
    OURS,
    Measured,
    Sample,
    alternating,
    comparison_table,
    judge,
    sides_table,
)
from serving.core.errors import ConfigError, StartFailedError
from serving.core.exit_codes import SIGNALLED, ExitCode
from serving.core.latency import percentile
from serving.progress import Say, progress

VERB = "bench-overhead"
NUM_PROMPTS = 64
STARTS_MIN = 10
SETTLE_S = 1.0  # after a measurement, for the engine to drop the answers that were cut off


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--levels", default="1,4,8", help="Users at once, with commas.")
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=6, help="Even: each side goes first as often."
)
@click.option("--window-s", type=click.FloatRange(1, 600), default=10.0, help="Measured time of each.")
@click.option("--warm-up-s", type=click.FloatRange(0, 600), default=3.0, help="Before it.")
@click.option("--answer-tokens", type=click.IntRange(2, 4096), default=64)
@click.option("--bare-url", help="A running engine; with --url, nothing is started here.")
@click.option("--url", help="The gateway before such an engine.")
@click.option("--bare-model", help="What to ask the engine for; else the first model that it lists.")
@click.option("--model", help="What to ask the gateway for, such as NAME:LANE; else the first that it lists.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=run_directory.RUNS_DIR / VERB
)
def main(
    levels: str,
    repeats: int,
    window_s: float,
    warm_up_s: float,
    answer_tokens: int,
    bare_url: str | None,
    url: str | None,
    bare_model: str | None,
    model: str | None,
    out: Path,
) -> None:
    """Measure what the gateway costs on top of a real engine."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)  # what was started must be ended
    if (bare_url is None) != (url is None):
        raise click.UsageError("--bare-url and --url belong together")
    users = _levels(levels)
    lasts_min = repeats * 2 * len(users) * (warm_up_s + window_s + 2) / 60
    more = 0 if url else STARTS_MIN
    click.echo(
        f"{len(users)} levels, {repeats} repeats: about {lasts_min:.0f} minutes and the starts, at most "
        f"{lasts_min + more:.0f} in all",
        err=True,
    )

    @contextlib.contextmanager
    def sides(scratch: str, say: Say) -> Iterator[tuple[Side, Side]]:
        if bare_url is not None and url is not None:
            yield elsewhere(bare_url, bare_model, is_ours=False), elsewhere(url, model, is_ours=True)
        else:
            with both_here(max(16, *users), Path(scratch), say) as found:
                yield found

    try:
        with (
            tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch,
            progress() as say,
            sides(scratch, say) as (bare, ours),
        ):
            samples = []
            for repeat in range(1, repeats + 1):
                for level in users:
                    for side in alternating(repeat):
                        say(f"repeat {repeat} of {repeats}: {level} users: {side}")
                        asked = {BARE: bare, OURS: ours}[side]
                        load = _load(asked, level, answer_tokens, warm_up_s, window_s)
                        samples.append(_sample(side, level, repeat, load))
            say("stopping")
    except (StartFailedError, ConfigError) as error:
        click.echo(str(error), err=True)
        sys.exit(ExitCode.FAILED)
    measured = Measured(samples)
    verdicts = judge(measured, users)
    text = "\n\n".join(
        [
            f"Answers of {answer_tokens} tokens; window {window_s:g} s after {warm_up_s:g} s, {repeats} repeats: "
            "median (least..most).",
            sides_table(measured, users),
            comparison_table(measured, users),
            "Targets:\n\n" + "\n".join(f"- {verdict}" for verdict in verdicts),
        ]
    )
    click.echo(text)
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "verb": VERB,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sides": {BARE: {"url": bare.url, "model": bare.model}, OURS: {"url": ours.url, "model": ours.model}},
        "window_s": window_s,
        "warm_up_s": warm_up_s,
        "answer_tokens": answer_tokens,
        **asdict(measured),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "machine": machine.describe(),
        "versions": run_directory.installed_versions(),
    }
    (out / f"{VERB}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / f"{VERB}.md").write_text(text + "\n", encoding="utf-8")
    click.echo(out / f"{VERB}.json", err=True)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(SIGNALLED + number)


def _levels(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--levels {text!r}: numbers with commas between them") from None
    if not all(1 <= level <= 1024 for level in found):
        raise click.UsageError(f"--levels {text!r}: each in 1..1024")
    return found


def _bodies(model: str, answer_tokens: int) -> Sequence[bytes]:
    """Prompts that differ, so that no cache of prefixes answers for the engine; answers of one length."""
    return [
        json.dumps(
            {
                "model": model,
                "messages": [
                    {"role": "user", "content": f"{number}: tell a story of a tandem in {number} words."}
                ],
                "max_tokens": answer_tokens,
                "min_tokens": answer_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for number in range(100, 100 + NUM_PROMPTS)
    ]


def _load(side: Side, users: int, answer_tokens: int, warm_up_s: float, window_s: float) -> Load:
    return Load(
        [side.url],
        _bodies(side.model, answer_tokens),
        EventReader,
        users,
        answer_tokens,
        warm_up_s=warm_up_s,
        window_s=window_s,
        headers=side.headers,
    )


def _sample(side: str, users: int, repeat: int, load: Load) -> Sample:
    counts = measure(load)
    time.sleep(SETTLE_S)
    ttft_s, tpot_s = percentile(counts.ttft_s, 50), percentile(counts.tpot_s, 50)
    return Sample(
        side,
        users,
        repeat,
        counts.tokens_per_s,
        None if ttft_s is None else 1000 * ttft_s,
        None if tpot_s is None else 1000 * tpot_s,
        counts.answers,
        dict(counts.failures),
    )


if __name__ == "__main__":
    main()
