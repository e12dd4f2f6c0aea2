"""Verbs of a lab's life on this machine: `up`, `down`, `prepare`, `doctor` and `demo`, which is all of them."""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serving import config, doctor, hub, machine, model_store
from serving.cli import attach, clients
from serving.cli.options import Number, config_option, find_config, find_shipped, load_lab, naming
from serving.cli.outcome import end, say_err
from serving.config import LabConfig
from serving.core.errors import AlreadyRunningError, ConfigError, NotRunningError, TandemError
from serving.core.exit_codes import ExitCode
from serving.doctor import Check, Status
from serving.engines import vllm_check
from serving.gateway import api_keys
from serving.hub import HubUnreachableError
from serving.lab import control, supervisor
from serving.lab import state as lab_state
from serving.progress import progress
from serving.proposers import from_profile
from serving.scheduler.lane_costs import lane_costs_of

if TYPE_CHECKING:
    from serving.deployments import RayLab

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
STOP_MARGIN_S = 30.0
# How much longer a detached start is waited for than the supervisor gives itself: it stops what it started.
DETACHED_MARGIN_S = 60.0
DEMO_EXPERIMENT = Path("deploy/experiments/demo.yaml")
# Of a lab with other lanes than the default one's: all of them.
DEMO_FLAGS = ("--concurrency", "1,4,8", "--repeats", "3", "--output-tokens", "24", "--name", "demo")


@click.command()
@config_option
@click.option("--detach", is_flag=True, help="Return when every lane is ready; the lab runs on.")
@click.option(
    "--timeout-s",
    type=Number(1, 7200),
    default=START_TIMEOUT_S,
    show_default=True,
    help="Give up a start that takes longer.",
)
@click.option("--host", help="Address the gateway listens on, instead of the config's gateway.host.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port of the gateway, instead of the config's gateway.port."
)
@click.option(
    "--address",
    metavar="auto|HOST:PORT",
    help="Deploy on the Ray cluster that runs there, instead of starting Ray on this machine.",
)
@click.option(
    "--attach",
    "attached_urls",
    metavar="URL",
    multiple=True,
    help="No config: a lab of one lane of servers that run already and speak the OpenAI API. Can be repeated.",
)
@click.option(
    "--api-key-env", metavar="NAME", help="With --attach: environment variable with the servers' key."
)
@click.option("--run-id", hidden=True, help="Set by --detach: the mark of the lab's processes.")
def up(
    config_file: Path | None,
    detach: bool,
    timeout_s: float,
    host: str | None,
    port: int | None,
    address: str | None,
    attached_urls: tuple[str, ...],
    api_key_env: str | None,
    run_id: str | None,
) -> None:
    """Start the lab: Ray, the scheduler, every lane, the gateway.

    Without --detach it stays in the foreground and Ctrl-C stops it; a second Ctrl-C cuts draining short.

    \b
    Examples:
      tandem up
      tandem up --detach --config my-lab.yaml
      tandem up --address auto --host 0.0.0.0     on the head of a Ray cluster
      tandem up --attach http://127.0.0.1:8080    in front of a server that runs
    """
    if attached_urls and config_file is not None:
        raise click.UsageError("--attach makes a config of its own: leave out --config, or add `urls` there")
    if api_key_env is not None and not attached_urls:
        raise click.UsageError("--api-key-env goes with --attach; in a config it is lanes[].api_key_env")
    if attached_urls:
        _refuse_second_lab()
        path = attach.write_config(attached_urls, api_key_env)
    else:
        path = find_config(config_file)
    lab = load_lab(path)
    if host is not None:
        if not host:
            raise click.BadParameter("must not be empty: that would be every address", param_hint="--host")
        lab = lab.model_copy(update={"gateway": lab.gateway.model_copy(update={"host": host})})
    if port is not None:
        lab = lab.model_copy(update={"gateway": lab.gateway.model_copy(update={"port": port})})
    if address is not None:
        _need_cluster(address)
    if run_id is None:
        _refuse_second_lab()
        _refuse_what_is_not_here(lab, path, has_engines=address is None)
        _warn_if_open(lab)
        for text in (
            *from_profile.doubts(from_profile.paths_of(lab, path.parent)),
            *from_profile.tables_in_words(lab),
        ):
            say_err(text)
        if address is None:
            _have_models(lab, path)
            _refuse_what_vllm_refuses(lab, path)
            attach.refuse_deaf_servers(lab, path, say_err)
    # Whoever fetches a newer copy meanwhile changes nothing for this lab, and its runs say what they ran.
    lab = lab.with_paths(model_store.pinned)
    if detach:
        options = [
            part
            for name, given in (("--host", host), ("--port", port), ("--address", address))
            if given
            for part in (name, str(given))
        ]
        _up_detached(lab, path, timeout_s, options)
    else:
        mark = run_id or uuid.uuid4().hex
        supervisor.supervise(
            lab,
            config_path=path,
            run_id=mark,
            load_lab=lambda: _ray_lab(address, mark),
            start_timeout_s=timeout_s,
            show=progress,
            announce=say_err,
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
    """Before anything starts, see that the config's address, models, API keys and profile are on this machine, and
    that Ray and the engines can read its environment.

    Args:
        has_engines: whether they run here; those of a cluster find models and environment on their own nodes.

    Raises:
        ConfigError: they are not; the default model and a hub's are brought on first use, and need not be.
    """
    if has_engines and (faults := doctor.environment_faults(lab)):
        raise ConfigError("environment: " + "; ".join(faults))
    host = lab.gateway.host
    if fault := machine.host_fault(host):
        raise ConfigError(f"{path}: gateway.host = {host!r}: {fault}; it must be an address of this machine")
    with naming(path):
        for setting, model in lab.checkpoints.items():
            if has_engines and not model_store.can_be_made(model):
                model_store.resolve(model, setting)
            if not has_engines and (name := hub.hub_name(model)) is not None and not name.is_pinned:
                raise ConfigError(
                    f"{setting} = {model!r}: on a cluster each node has its own copy; name the commit, 40 "
                    "hexadecimal digits, so that all have the same"
                )
        api_keys.read_keys(lab.gateway)
        lane_costs_of(lab)


def _refuse_what_vllm_refuses(lab: LabConfig, path: Path) -> None:
    """Raises: ConfigError: with each option of a lane that vLLM does not take, and vLLM's words."""
    with progress() as say:
        faults = vllm_check.faults(lab, say)
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))


def _warn_if_open(lab: LabConfig) -> None:
    host = lab.gateway.host
    if (
        not host.startswith("127.")
        and host not in ("::1", "localhost")
        and not api_keys.are_configured(lab.gateway)
    ):
        say_err(
            f"the gateway at {host} asks for no API key: whoever reaches it uses the lab "
            f"(gateway.api_keys_file, {api_keys.KEYS_VARIABLE})"
        )


def _have_models(lab: LabConfig, path: Path) -> None:
    """Make or fetch, on first use, what the config names and this machine lacks.

    Raises:
        ConfigError: it cannot be had, or the cache cannot be written.
    """
    with naming(path), progress() as say:
        for setting, model in lab.checkpoints.items():
            if not model_store.is_here(model):
                model_store.obtain(model, setting, say)


def _ray_lab(address: str | None, run_id: str) -> RayLab:
    from serving import ray_environment

    if address is None:
        ray_environment.rest_when_idle()
    else:
        ray_environment.allow_cluster()
    # Only here: importing Ray takes seconds, which no other verb should pay.
    from serving.deployments import RayLab

    return RayLab(address, run_id)


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
    say_err(f"ready in {state.age_s:.0f} s: {state.url}, lanes {', '.join(lane.name for lane in lab.lanes)}")
    say_err(f"log: {state.log_path}; `tandem down` stops it")


@click.command()
@click.option(
    "--timeout-s",
    type=Number(1, 3600),
    help="Kill what has not stopped by then.  [default: the config's scheduler.drain_timeout_s + 30]",
)
def down(timeout_s: float | None) -> None:
    """Stop the lab and whatever is left of it. Does nothing, and says so, when none is running."""
    with progress() as say:
        stopped = control.stop_running(timeout_s=timeout_s or _stop_limit_s(), say=say, take_down=_take_down)
    if stopped is None:
        say_err("no lab is running")
    elif stopped.address is None:
        say_err("stopped: no process and no port is left")
    else:
        say_err("stopped: nothing of that run is left on this machine")


def _stop_limit_s() -> float:
    """How long the running lab may take to stop, by the config it was started with."""
    state = lab_state.read(lab_state.state_dir())
    if state is None:
        return STOP_TIMEOUT_S
    try:
        return config.load(Path(state.config_path)).scheduler.drain_timeout_s + STOP_MARGIN_S
    except ConfigError:
        return STOP_TIMEOUT_S  # the file has changed or gone since


def _take_down(address: str, run_id: str) -> None:
    """Stop that run's lab on that cluster, if it still is there.

    Raises:
        TandemError: it is, and was not stopped.
    """
    try:
        _need_cluster(address)
    except TandemError as error:
        # Forgotten all the same: a cluster that is gone for good must not keep the next lab from starting.
        say_err(
            f"nothing was stopped there: {error}; if the cluster is up and the lab on it, `serve shutdown` ends it"
        )
        return
    try:
        _ray_lab(address, run_id).take_down()
    except NotRunningError as error:
        say_err(f"nothing was stopped there: {error}")


@click.command()
@config_option
def prepare(config_file: Path | None) -> None:
    """Make ready the models that the config names.

    The default one is converted, once; a hub's is fetched or brought up to date.

    \b
    Examples:
      tandem prepare
      HF_TOKEN=... tandem prepare --config my-lab.yaml
    """
    path = find_config(config_file)
    lab = config.load(path)
    model_store.cache_dir()  # its fault would be none of the file's
    if not lab.checkpoints:
        say_err(f"{path}: no lane computes with a model")
    for setting, model in lab.checkpoints.items():
        with naming(path):
            directory = _obtain(model, setting)
        say_err(f"model is ready in {directory}")


def _obtain(model: str, setting: str) -> Path:
    """Make it ready; where the hub does not answer, an earlier copy will do, and that is said."""
    try:
        with progress() as say:
            return model_store.obtain(model, setting, say)
    except HubUnreachableError as error:
        if not model_store.is_here(model):
            raise
        say_err(f"{error}; the copy of {model_store.pinned(model)} stays")
        return model_store.directory_of(model)


@click.command(name="doctor")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
def doctor_verb(config_file: Path | None, as_json: bool) -> None:
    """Say what this machine lacks, and what to do about it. Exit code 1 if anything fails."""
    path = find_config(config_file)
    checks = _examine(load_lab(path), path)
    if as_json:
        click.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        click.echo("\n".join(check_lines(checks)))
    if any(check.status is Status.FAIL for check in checks):
        end(ExitCode.FAILED)


def _examine(lab: LabConfig, path: Path) -> list[Check]:
    state = lab_state.read(lab_state.state_dir())
    checks = doctor.examine(lab, our_ports=state.ports if state is not None and state.is_alive else ())
    if vllm_check.lanes_to_ask_about(lab):
        with progress() as say:
            checks.append(doctor.check_engine_options(vllm_check.faults(lab, say)))
    if paths := from_profile.paths_of(lab, path.parent):
        checks.append(_check_profiles(lab, paths))
    return checks


def _check_profiles(lab: LabConfig, paths: Sequence[Path]) -> Check:
    try:
        lane_costs_of(lab)
        return doctor.check_profiles("", from_profile.doubts(paths))
    except ConfigError as error:
        return doctor.check_profiles(str(error), ())


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


@click.command()
@config_option
def demo(config_file: Path | None) -> None:
    """Do the whole job: prepare, start, measure, report, stop."""
    path = find_config(config_file)
    lab = load_lab(path)
    _refuse_second_lab()
    _refuse_what_is_not_here(lab, path)
    faults = [check for check in _examine(lab, path) if check.status is Status.FAIL]
    if faults:
        raise TandemError("\n".join(["this machine cannot run the lab:", *check_lines(faults)]))
    _step("model")
    _have_models(lab, path)
    _step("lab")
    _up_detached(lab, path, START_TIMEOUT_S)
    # The table is the demo's result: it is shown last, after the lab is down.
    with tempfile.TemporaryFile("w+") as result:
        try:
            _step("load")
            base_url = ("--base-url", supervisor.gateway_url(lab))
            code = clients.run_module("loadtest.bench", (*base_url, *_demo_plan(config_file)), stdout=result)
        finally:
            _step("stop")
            try:
                with progress() as say:
                    control.stop_running(timeout_s=_stop_limit_s(), say=say)
            finally:
                result.seek(0)
                click.echo(result.read(), nl=False)
    # A busy machine spoils figures, which the table says; the demo itself has worked.
    end(ExitCode.OK if code == ExitCode.INVALID else code)


def _demo_plan(config_file: Path | None) -> tuple[str, ...]:
    """What the demo measures, as arguments of `tandem bench`."""
    if config_file is not None:
        return DEMO_FLAGS
    return ("--experiment", str(find_shipped(DEMO_EXPERIMENT, "experiment for the demo")))


def _step(name: str) -> None:
    say_err(f"== {name}")
