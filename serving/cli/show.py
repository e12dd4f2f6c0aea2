"""Verbs that show a running lab: `status` and `watch`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from serving.cli import watch
from serving.cli.options import Number, base_url_option, running_url
from serving.cli.outcome import end
from serving.core.addresses import server_root
from serving.core.errors import NotRunningError
from serving.core.exit_codes import ExitCode
from serving.lab import control
from serving.progress import progress

MAX_REFUSALS_SHOWN = 5
MAX_GROUPS_SHOWN = 12
MAX_CHOICES_SHOWN = 5


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def status(as_json: bool) -> None:
    """Show the lab's lanes and replicas. Exit code 0 only when it is ready; see `tandem --help`."""
    standing = control.look()
    if as_json:
        click.echo(json.dumps(standing, indent=2))
    else:
        _show_status(standing)
    if standing["state"] in ("not_running", "died", "unreachable"):
        end(ExitCode.NOT_RUNNING)
    if standing["state"] != "ready":
        end(ExitCode.FAILED)


def _show_status(standing: dict[str, Any]) -> None:
    state = standing["state"]
    if state == "not_running":
        click.echo("no lab is running; `tandem up --detach` starts one")
    elif state == "died":
        click.echo(f"the lab's supervisor (pid {standing['pid']}) died; `tandem down` cleans up what it left")
    else:
        click.echo(f"{state}, up for {standing['age_s']:.0f} s, {standing['url']}, {standing['config_path']}")
        if state != "ready":
            click.echo(standing["progress"])
    if standing["scheduler"] is not None:
        show_scheduler(standing["scheduler"])


def show_scheduler(scheduler: dict[str, Any]) -> None:
    """The gateway's answer to GET /scheduler, readable at a glance."""
    console = Console()
    console.print(lane_table(scheduler))
    if scheduler["waiting"]:
        console.print()
        console.print(waiting_table(scheduler))
    console.print(
        f"\norder {scheduler['order']}, placement {scheduler['placement']}, "
        f"{len(scheduler['gateways'])} gateway(s), {scheduler['leases']} running, {scheduler['waiting']} waiting"
        + (", DRAINING" if scheduler["draining"] else "")
    )
    if adaptive := scheduler.get("adaptive"):
        _show_choices(console, adaptive)
    for lane in scheduler["lanes"]:
        for absent in lane.get("absent", ()):
            console.print(f"away: lane {lane['lane']}, {absent['url']}: {absent['why']}", markup=False)
    for title, counts in (
        ("waiting by band", scheduler["waiting_by_band"]),
        ("refused so far", scheduler["refusals"]),
        ("leaving", dict.fromkeys(scheduler["leaving_replicas"], "until its streams end")),
    ):
        if any(counts.values()):
            console.print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    for note in scheduler["last_refusals"][:MAX_REFUSALS_SHOWN]:
        lane = note["lane"] or "any lane"
        console.print(f"  {note['seconds_ago']:.0f} s ago: {note['reason']}, tenant {note['tenant']}, {lane}")


def _show_choices(console: Console, adaptive: dict[str, Any]) -> None:
    """How often each lane was chosen for which kind of text, and what the last choices were made from."""
    if adaptive["choices"]:
        console.print()
        console.print(
            "chosen so far: "
            + ", ".join(
                f"{each['lane']} for {each['kind']} ({each['why']}) {each['requests']}"
                for each in adaptive["choices"]
            ),
            markup=False,
        )
    if adaptive["last_choices"]:
        console.print(_choices_table(adaptive["last_choices"][:MAX_CHOICES_SHOWN]))


def _choices_table(choices: Sequence[dict[str, Any]]) -> Table:
    """The last choices, and what each lane's score was made from; the chosen lane has a mark."""
    table = _table("Last choices, tokens/s gained")
    for heading in ("for", "why", "lane"):
        table.add_column(heading, no_wrap=True)
    for heading in ("gains", "k", "tok/step", "batch", "ctx", "turns", "x prof"):
        table.add_column(heading, no_wrap=True, justify="right")
    for choice in choices:
        first = (choice["kind"], choice["why"])
        for score in choice["scores"]:
            table.add_row(
                *first,
                score["lane"] + (" <" if score["lane"] == choice["lane"] else ""),
                f"{score['score']:.1f}",
                f"{score['num_drafts']}",
                f"{score['tokens_per_step']:.2f}",
                f"{score['batch']:.1f}",
                f"{score['context_tokens']:.0f}",
                f"{score['num_sharing']}",
                f"{score['correction']:.2f}",
            )
            first = ("", "")
    return table


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def lane_table(scheduler: dict[str, Any]) -> Table:
    """One row per replica; a lane without any has a row too.

    Column `waiting`: requests pinned to the lane, without those that any lane may serve. Column `tokens`:
    outstanding tokens, reserved by the requests running on the replica.
    """
    table = _table()
    for heading in ("lane", "strategy", "waiting", "replica", "ready", "running", "tokens"):
        table.add_column(heading, no_wrap=True)
    for lane in scheduler["lanes"]:
        own = (lane["lane"], lane["strategy"], str(sum(group["requests"] for group in lane["waiting"])))
        for replica in lane["replicas"]:
            running = f"{replica['running']} of {replica['max_running']}"
            ready = "yes" if replica["breaker"] == "closed" else f"breaker {replica['breaker']}"
            tokens = str(replica["outstanding_tokens"])
            table.add_row(*own, replica["replica"], ready, running, tokens)
        if not lane["replicas"]:
            table.add_row(*own, "-", "no", "-", "-")
    return table


def waiting_table(scheduler: dict[str, Any]) -> Table:
    """One row per lane, band and tenant that has requests waiting, the most first; tokens are reserved ones."""
    groups = [(lane["lane"], group) for lane in scheduler["lanes"] for group in lane["waiting"]]
    groups += [("any lane", group) for group in scheduler["waiting_any"]]
    groups.sort(key=lambda row: row[1]["requests"], reverse=True)
    table = _table()
    for heading in ("waiting for", "band", "tenant", "requests", "tokens"):
        table.add_column(heading, no_wrap=True)
    for lane, group in groups[:MAX_GROUPS_SHOWN]:
        table.add_row(lane, group["band"], group["tenant"], str(group["requests"]), str(group["tokens"]))
    if rest := [group["requests"] for _, group in groups[MAX_GROUPS_SHOWN:]]:
        table.add_row(f"{len(rest)} more", "", "", str(sum(rest)), "")
    return table


@click.command(name="watch")
@base_url_option
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--seconds",
    type=Number(1, 3600),
    help=f"What rates and percentiles are over.  [default: {watch.WINDOW_S:g}, with --once {watch.ONCE_S:g}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print frames as JSON, a line each.")
def watch_verb(base_url: str | None, once: bool, seconds: float | None, as_json: bool) -> None:
    """Show each lane's headline figures, anew each second.

    `q` or Ctrl-C ends it.
    """
    url = server_root(base_url or running_url())
    try:
        with watch.key_q() as wait:
            fetch = control.reader(url)
            shown: Iterable[watch.Frame]
            if once:
                window_s = seconds or watch.ONCE_S
                with progress() as say:
                    say(f"counting for {window_s:g} s")
                    shown = [watch.one_frame(url, fetch, wait, window_s=window_s)]
            else:
                shown = watch.frames(url, fetch, wait, window_s=seconds or watch.WINDOW_S)
            if as_json:
                for frame in shown:
                    click.echo(watch.as_json(frame))
            elif once:
                for frame in shown:
                    Console().print(watch.picture(frame, url))
            else:
                watch.show(shown, url, Console())
    except (OSError, ValueError) as error:
        raise NotRunningError(f"{url} does not answer as a lab does: {error}") from error
