"""How many streams this client holds, against a server that does nothing but send.

    python -m loadtest.proof.hold_streams --streams 1000 --tokens-per-s 20 --processes 2 --duration-s 20

opens them from several processes and prints how that went.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import click
import gevent
import psutil

from loadtest.client import noop_server
from loadtest.client.ceiling import ask_noop
from loadtest.client.health import HealthMonitor
from loadtest.client.record import ClientReason, RequestRecord
from loadtest.client.sse_client import ClientSettings, StreamingClient
from serving.core.latency import percentile

# Each stream lasts so long and is followed by another, so that requests start under full load.
ANSWER_S = 10.0
LIMIT_DISPATCH_LAG_S = 0.05
HELD_SHARE = 0.98
BUSY_SHARE = 0.9
NOT_WORK = ("idle", "iowait", "guest", "guest_nice")  # guests are counted under user as well


@dataclass(frozen=True, slots=True)
class Part:
    """What one client process held. Lags in seconds.

    Attributes:
        tokens: read while all streams were to be open.
        held: streams open, at instants all through that time.
        dispatch_lags_s: of the requests that were due in it.
        read_lags_s: of each request its longest.
        failures: reasons of requests that did not complete.
    """

    tokens: int
    held: list[int]
    dispatch_lags_s: list[float]
    read_lags_s: list[float]
    failures: list[str]
    cpu_share: float
    loop_lag_p99_s: float


def hold(url: str, streams: int, tokens_per_s: float, duration_s: float) -> Part:
    """Hold this many streams for `duration_s`, after the time it takes to open them evenly.

    An open loop: a request is due every `ANSWER_S / streams`, each answer lasts `ANSWER_S`.
    """
    free: list[StreamingClient] = []
    clients: list[StreamingClient] = []
    records: list[RequestRecord] = []

    def ask(due_at_s: float) -> None:
        if not free:
            clients.append(StreamingClient(ClientSettings(url)))
            free.append(clients[-1])
        client = free.pop()
        records.append(ask_noop(client, round(ANSWER_S * tokens_per_s), due_at_s))
        free.append(client)

    began_at_s = time.perf_counter()
    from_s, until_s = began_at_s + ANSWER_S, began_at_s + ANSWER_S + duration_s
    monitor = HealthMonitor()
    has_begun = False
    running = []
    for number in range(round((ANSWER_S + duration_s) * streams / ANSWER_S)):
        due_at_s = began_at_s + number * ANSWER_S / streams
        if (wait_s := due_at_s - time.perf_counter()) > 0:
            gevent.sleep(wait_s)
        if not has_begun and due_at_s >= from_s:
            has_begun = True
            monitor.start()
        running.append(gevent.spawn(ask, due_at_s))
    gevent.sleep(max(0.0, until_s - time.perf_counter()))
    health = monitor.stop()
    for client in clients:
        client.cancel(ClientReason.INTERRUPTED)
    gevent.joinall(running, raise_error=True)
    return Part(
        tokens=sum(from_s <= at_s < until_s for record in records for at_s in record.chunk_at_s),
        held=[
            sum((record.sent_at_s or at_s) < at_s <= record.finished_at_s for record in records)
            for at_s in (from_s + duration_s * (step + 0.5) / 20 for step in range(20))
        ],
        dispatch_lags_s=[
            record.dispatched_at_s - record.scheduled_at_s
            for record in records
            if record.dispatched_at_s is not None and record.scheduled_at_s >= from_s
        ],
        read_lags_s=[record.read_lag_s for record in records if record.read_lag_s is not None],
        failures=[
            str(record.reason)
            for record in records
            if not record.is_completed and record.reason != ClientReason.INTERRUPTED
        ],
        cpu_share=health.cpu_share,
        loop_lag_p99_s=health.loop_lag_p99_s,
    )


def _run_parts(
    url: str, server_pid: int, streams: int, tokens_per_s: float, processes: int, duration_s: float
) -> tuple[list[Part], float, float]:
    """What each client process held; the server's share of a core meanwhile, and that of everything else."""
    command = [sys.executable, "-m", "gevent.monkey", "--module", "loadtest.proof.hold_streams", "--url", url]
    command += ["--tokens-per-s", str(tokens_per_s), "--duration-s", str(duration_s), "--streams"]
    shares = [streams * (n + 1) // processes - streams * n // processes for n in range(processes)]
    parts = [subprocess.Popen([*command, str(share)], stdout=subprocess.PIPE, text=True) for share in shares]
    try:
        time.sleep(ANSWER_S + 1)
        before_s, all_before_s = _processor_s(server_pid), _machine_s()
        time.sleep(duration_s - 1)
        server_share = (_processor_s(server_pid) - before_s) / (duration_s - 1)
        all_share = (_machine_s() - all_before_s) / (duration_s - 1)
        rows = [part.communicate()[0] for part in parts]
    finally:
        for part in parts:
            part.kill()
            part.wait()
    held = [Part(**json.loads(row)) for row in rows]
    return held, server_share, max(0.0, all_share - server_share - sum(part.cpu_share for part in held))


def _processor_s(pid: int) -> float:
    """Processor time of a process and its children, in seconds."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _machine_s() -> float:
    """Processor time of all processes and of the kernel, in seconds."""
    times: dict[str, float] = psutil.cpu_times()._asdict()
    return sum(value for name, value in times.items() if name not in NOT_WORK)


def _text(
    parts: list[Part],
    server_share: float,
    other_share: float,
    streams: int,
    tokens_per_s: float,
    duration_s: float,
) -> str:
    dispatch_lags_s = [lag_s for part in parts for lag_s in part.dispatch_lags_s]
    read_lags_s = [lag_s for part in parts for lag_s in part.read_lags_s]
    held = [sum(counts) for counts in zip(*(part.held for part in parts), strict=True)]
    failures = [reason for part in parts for reason in part.failures]
    received_per_s = sum(part.tokens for part in parts) / duration_s
    offered_per_s = streams * tokens_per_s
    lag_p99_s = percentile(dispatch_lags_s, 99) or 0.0
    is_whole = received_per_s >= HELD_SHARE * offered_per_s and not failures
    has_held = is_whole and lag_p99_s < LIMIT_DISPATCH_LAG_S

    def milliseconds(lags_s: list[float], q: float) -> str:
        value_s = percentile(lags_s, q)
        return "not known" if value_s is None else f"{value_s * 1000:.1f} ms"

    lines = [
        f"streams open       {min(held)} to {max(held)} of {streams}",
        f"tokens read        {received_per_s:,.0f}/s of {offered_per_s:,.0f}/s over {duration_s:g} s",
        f"requests begun     {len(dispatch_lags_s)}; dispatch lag p50 {milliseconds(dispatch_lags_s, 50)}, "
        f"p99 {milliseconds(dispatch_lags_s, 99)}",
        f"read lag           {milliseconds(read_lags_s, 50)} p50, {milliseconds(read_lags_s, 99)} p99 "
        "(of each request's longest)",
        *(
            f"client process {n}   {part.cpu_share:.0%} of a core, loop lag p99 {part.loop_lag_p99_s * 1000:.1f} ms"
            for n, part in enumerate(parts, start=1)
        ),
        f"no-op server       {server_share:.0%} of a core",
        f"everything else    {other_share:.0%} of a core, of {psutil.cpu_count()} cores; "
        f"load average {psutil.getloadavg()[0]:.1f}",
        f"failures           {len(failures)} {sorted(set(failures)) if failures else ''}",
        "held" if has_held else f"not held: {_limit(parts, server_share)}",
    ]
    return "\n".join(lines)


def _limit(parts: list[Part], server_share: float) -> str:
    if max(part.cpu_share for part in parts) >= BUSY_SHARE:
        return "a client process had no processor time left"
    if server_share >= BUSY_SHARE:
        return "the no-op server had no processor time left"
    return "no process of this test was busy throughout; it did not get a core when it needed one"


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--streams", type=click.IntRange(1), default=1000, show_default=True)
@click.option(
    "--tokens-per-s", type=click.FloatRange(0.1), default=20, show_default=True, help="Of each stream."
)
@click.option(
    "--processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Client processes."
)
@click.option("--duration-s", type=click.FloatRange(2), default=20, show_default=True, help="With all open.")
@click.option("--url", hidden=True, help="Be one client process against this server, and print JSON.")
def main(streams: int, tokens_per_s: float, processes: int, duration_s: float, url: str | None) -> None:
    if url is not None:
        click.echo(json.dumps(asdict(hold(url, streams, tokens_per_s, duration_s))))
        return
    if processes > streams:
        raise click.UsageError(f"--processes {processes} is above --streams {streams}")
    server, url = noop_server.start(tokens_per_s)
    try:
        parts, server_share, other_share = _run_parts(
            url, server.pid, streams, tokens_per_s, processes, duration_s
        )
    finally:
        noop_server.stop(server)
    click.echo(_text(parts, server_share, other_share, streams, tokens_per_s, duration_s))


if __name__ == "__main__":
    main(prog_name="python -m loadtest.proof.hold_streams")
