"""The composition root: Ray Serve deployments made of the parts.

Beside `ray_environment`, which prepares for it, and `shared_cluster`, the only module that imports Ray.

scheduler   one replica; admission, order, placement
gateway     N replicas that share one port; the OpenAI API
<lane>      one deployment per lane, one engine per replica; of servers that run already, one agent for all
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from serving import ray_environment  # isort: skip - must come before Ray

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from serving import autoscaling, model_store
from serving import config as settings
from serving.config import LabConfig, LaneConfig
from serving.core.addresses import LOOPBACK
from serving.core.errors import ConfigError, NotRunningError, TandemError
from serving.core.processor_time import yield_as_engine
from serving.core.ray_application import APP_NAME, ENGINE_RESOURCE, HEAD_RESOURCE, OBJECT_STORE_BYTES
from serving.engines.attached.agent import AttachedLane
from serving.engines.make import make_engine
from serving.engines.replica import EngineReplica
from serving.engines.vllm import choose_device, environment
from serving.gateway import api_keys
from serving.gateway.app import build_gateway_app
from serving.gateway.attached import ServerKeys
from serving.gateway.completion import Services
from serving.gateway.http_protocol import Door
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.metrics_page import build_own_app
from serving.gateway.openai_request import names_of
from serving.gateway.server import GatewayServer, listen
from serving.gateway.upstream import UpstreamClient
from serving.http_server import serve_app
from serving.machine import port_fault, usable_cores
from serving.scheduler.client import SchedulerClient
from serving.scheduler.lane_costs import LaneCosts, lane_costs_of
from serving.scheduler.service import SchedulerService, build_scheduler_app
from serving.shared_cluster import ClusterError, SharedCluster
from serving.tracing.otlp import Tracing, is_wanted
from serving.tracing.span_log import SpanLog

POLL_S = 0.5
CORES_FOR_TWO_GATEWAYS = 4
GC_THRESHOLD = 10_000  # Python's own is 700, a few requests
CONNECT_TIMEOUT_S = 60
ANSWER_TIMEOUT_S = 10
# Far above what the scheduler lets run: Serve must never be the one that queues.
UNBOUNDED = 1_000_000
ENGINES_ON_ONE_MACHINE = 10_000  # Ray alone on a machine is no judge of its memory


class LabStartError(TandemError):
    """A deployment could not be started."""


class SchedulerDeployment:
    """The scheduling service on a port of its own."""

    async def __init__(  # type: ignore[misc]
        self, config: LabConfig, lane_costs: LaneCosts | None
    ) -> None:
        _prepare_process()
        self._config = config.scheduler
        self._service = SchedulerService(config.scheduler, config.lanes, lane_costs=lane_costs)
        app = build_scheduler_app(self._service, lambda: self._address, _ray_targets)
        self._server, self._serving, self._address = await serve_app(app, ray.util.get_node_ip_address())

    async def address(self) -> str:
        """host:port of the service."""
        return self._address

    async def drain_timeout_s(self) -> float:
        """The longest that `drain` takes, in seconds."""
        return self._config.drain_timeout_s

    async def drain(self) -> bool:
        """Refuse new requests and wait for the running ones; False when some were left."""
        return await self._service.drain()

    async def check_health(self) -> None:
        if self._serving.done():
            raise TandemError("the scheduler's HTTP server ended")

    async def __del__(self) -> None:
        self._server.should_exit = True


class EngineDeployment:
    """One engine replica of a lane."""

    async def __init__(self, config: LabConfig, lane: LaneConfig, scheduler: DeploymentHandle) -> None:  # type: ignore[misc]
        _prepare_process()
        if config.processor.engines_yield:
            yield_as_engine()
        # Cores and device are those of this node, so no driver can know them.
        model = config.model_of(lane)
        os.environ.update(environment(lane, model))
        replica_id = f"{lane.name}-{serve.get_replica_context().replica_id.unique_id}"
        self._replica = EngineReplica(
            make_engine(lane, model, names_of(config, model.name)),
            lane,
            replica_id,
            model.name,
            _scheduler_address(scheduler),
            config.scheduler.drain_timeout_s,
            yields=config.processor.engines_yield,
            tracing=_tracing(config, "engine", {"tandem.lane": lane.name, "tandem.replica": replica_id}),
        )
        await self._replica.start(ray.util.get_node_ip_address())

    async def check_health(self) -> None:
        self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler sees of this replica."""
        return {autoscaling.METRIC: float(self._replica.demand_tokens)}

    async def __del__(self) -> None:
        await self._replica.close()


class AttachedDeployment:
    """The agents of a lane's servers that somebody else runs; requests do not pass through here."""

    async def __init__(self, config: LabConfig, lane: LaneConfig, scheduler: DeploymentHandle) -> None:  # type: ignore[misc]
        _prepare_process()
        self._lane = AttachedLane(lane, _scheduler_address(scheduler))
        await self._lane.start(ray.util.get_node_ip_address())

    async def check_health(self) -> None:
        self._lane.check()

    async def __del__(self) -> None:
        await self._lane.close()


class GatewayDeployment:
    """The OpenAI API on a socket of its own; Serve starts it, looks after it, and carries none of its bytes."""

    async def __init__(  # type: ignore[misc]
        self, config: LabConfig, scheduler: DeploymentHandle, *lanes: DeploymentHandle, needs_key: bool
    ) -> None:
        _prepare_process()
        self._keys = api_keys.read_keys(config.gateway)
        if needs_key and not self._keys.are_needed:
            # The lab would be open to everybody, and nobody would notice.
            raise ConfigError(
                f"{api_keys.KEYS_VARIABLE} is set where the lab was started, and not where this gateway runs: "
                "`ray start` on the head must have it in its environment, or use gateway.api_keys_file"
            )
        self._config = config
        self._address = _scheduler_address(scheduler)
        host = ray.util.get_node_ip_address()
        tenants = [tenant.name for tenant in config.scheduler.tenants]
        metrics = GatewayMetrics([lane.name for lane in config.lanes], config.slo, tenants)
        gateway_id = serve.get_replica_context().replica_id.unique_id
        spans = SpanLog(gateway_id)
        # Gateways share a port, where none of them can be singled out; their metrics have ports of their own.
        _, self._own_page, own_address = await serve_app(build_own_app(metrics.registry, spans), host)
        client = SchedulerClient(gateway_id, metrics_address=own_address, address=self._address)
        self._services = Services(
            client,
            UpstreamClient(config.gateway),
            metrics,
            spans,
            _tracing(config, "gateway", {"tandem.gateway": gateway_id}),
            config.gateway.request_log,
            ServerKeys.of(config.lanes),
        )
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        self._channel = asyncio.create_task(client.run())
        await client.wait_connected(CONNECT_TIMEOUT_S)
        # Last: whoever connects is served.
        app = build_gateway_app(config, self._services, self._ask_scheduler, self._keys)
        door = Door(
            config.gateway.max_connections,
            config.gateway.header_timeout_s,
            config.gateway.client_stall_timeout_s,
            metrics.refused,
        )
        listener = listen(config.gateway.host, config.gateway.port)
        self._server = GatewayServer(app, listener, door, drain_timeout_s=config.scheduler.drain_timeout_s)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        _pause_less()

    async def check_health(self) -> None:
        if self._serving.done():
            raise TandemError("the gateway's HTTP server ended")
        if self._channel.done():
            raise TandemError("the gateway's control channel ended")
        if self._own_page.done():
            raise TandemError("the HTTP server of the gateway's metrics ended")

    async def __del__(self) -> None:
        self._server.should_exit = True
        await self._serving
        self._channel.cancel()

    async def _ask_scheduler(self, path: str) -> Any:
        async with self._session.get(
            f"http://{await self._address()}{path}", raise_for_status=True
        ) as response:
            return await response.json()


def _tracing(config: LabConfig, role: str, attributes: dict[str, str]) -> Tracing | None:
    endpoint = config.telemetry.otlp_endpoint
    return Tracing(endpoint, role, attributes) if is_wanted(endpoint) else None


def _prepare_process() -> None:
    """What every deployment does first in its process."""
    logging.getLogger("serving").setLevel(logging.INFO)
    ray_environment.bind_replica_server_to_node()


def _pause_less() -> None:
    """A collection stops all streams: keep what was there at the start out of it, and make it seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


async def _ray_targets() -> list[dict[str, Any]]:
    """Ray's own metrics, one target per node: Ray Serve's and those of the machine."""
    nodes = await asyncio.to_thread(ray.nodes)  # it waits for Ray, and the scheduler's loop must not
    return [
        {"targets": [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"], "labels": {"role": "ray"}}
        for node in nodes
        if node["Alive"]
    ]


def _scheduler_address(scheduler: DeploymentHandle) -> Callable[[], Any]:
    async def address() -> str:
        try:
            return str(await scheduler.address.remote())
        except (ray.exceptions.RayError, RayServeException) as error:
            # Between two schedulers there is none to ask; the channel tries again.
            raise ConnectionError(f"no scheduler to ask: {error}") from error

    return address


def application(config: LabConfig) -> serve.Application:
    """The Serve application: the scheduler, every lane, and the gateway in front.

    Raises:
        ConfigError: the profile that placement `adaptive` needs cannot be read, or lacks a lane.
    """
    common: dict[str, Any] = {
        "max_ongoing_requests": UNBOUNDED,
        "graceful_shutdown_timeout_s": config.scheduler.drain_timeout_s + 10,
        "graceful_shutdown_wait_loop_s": 0.2,
        # A dead process is found by its health check; Serve's default looks every 10 s.
        "health_check_period_s": 1,
        "max_constructor_retry_count": 1,
    }
    front = {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}}
    scheduler = serve.deployment(
        SchedulerDeployment, name="scheduler", ray_actor_options=front, **common
    ).bind(config, lane_costs_of(config))
    lanes = [
        serve.deployment(
            AttachedDeployment, name=lane.name, num_replicas=1, ray_actor_options=front, **common
        ).bind(config, lane, scheduler)
        if lane.is_attached
        else serve.deployment(
            EngineDeployment,
            name=lane.name,
            **_scaling(lane),
            ray_actor_options={
                "num_cpus": lane.num_cpus,
                "num_gpus": lane.reserved_gpus(choose_device(config.model)),
                "resources": {ENGINE_RESOURCE: 1},
            },
            **common,
        ).bind(config, lane, scheduler)
        for lane in config.lanes
    ]
    return serve.deployment(
        GatewayDeployment,
        name="gateway",
        num_replicas=config.gateway.replicas or _default_gateways(),
        max_surge_percent=100,  # in an update the new ones listen before the old ones leave
        ray_actor_options=front,
        **common,
    ).bind(config, scheduler, *lanes, needs_key=api_keys.are_configured(config.gateway))


def _default_gateways() -> int:
    """Two leave nobody without a gateway when one dies; on few cores a second one takes more than it brings."""
    return 2 if usable_cores() >= CORES_FOR_TWO_GATEWAYS else 1


def _scaling(lane: LaneConfig) -> dict[str, Any]:
    """Fixed replicas, or Ray Serve's autoscaling on outstanding tokens."""
    if (scaling := lane.autoscaling) is None:
        return {"num_replicas": lane.replicas}
    policy = AutoscalingPolicy(
        policy_function="serving.autoscaling:ScaleByOutstandingTokens",
        policy_kwargs={"target_tokens": scaling.target_outstanding_tokens},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            initial_replicas=lane.replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            metrics_interval_s=1,
            look_back_period_s=2,
            policy=policy,
        )
    }


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `serve deploy` and KubeRay.

    Args:
        args: the content of a config file.

    Raises:
        ConfigError: the content is no config.
    """
    return application(settings.from_data(args, "args"))


class RayLab:
    """The lab on Ray."""

    def __init__(self, address: str | None, run_id: str) -> None:
        """
        Args:
            address: a Ray cluster to join, as `auto` or host:port; None to start Ray on this machine for it alone,
                on the loopback.
            run_id: what a lab on a cluster is known by; nothing else there is ever stopped.
        """
        self._address = address
        self._cluster = None if address is None else SharedCluster(address, run_id)

    def start(self, config: LabConfig, *, on_progress: Callable[[str], None]) -> None:
        """Deploy the lab; returns when every replica serves.

        Raises:
            ConfigError: the model is not there.
            ClusterError: no cluster at the address, or it has a lab, or is getting one.
            LabStartError: a deployment failed; the text says which and why.
        """
        if self._cluster is None and config.needs_model:
            model_store.resolve(config.model.path)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if self._cluster is None:
            on_progress("starting Ray")
            _start_ray()
        else:
            on_progress(f"joining the Ray cluster at {self._address}")
            self._cluster.join()
            self._cluster.claim(on_progress)
        on_progress("starting Ray Serve")
        serve.start(proxy_location=ProxyLocation.Disabled)
        if self._cluster is not None:
            self._cluster.note_serve()
        target = serve.RunTarget(application(config), name=APP_NAME, route_prefix=None)
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
        if self._cluster is not None:
            self._cluster.end_turn()
        _wait_until_running(on_progress, config.num_engines)
        if self._cluster is not None:
            _need_gateway_here(config.gateway.host, config.gateway.port)

    def take_down(self) -> None:
        """Stop this run's lab on the cluster after its supervisor died.

        Raises:
            NotRunningError: no cluster at the address, or this run's lab is not on it.
            ClusterError: it is, and was not stopped.
        """
        assert self._cluster is not None
        try:
            self._cluster.join()
        except ClusterError as error:
            raise NotRunningError(str(error)) from error
        if not self._stop_on(self._cluster):
            raise NotRunningError(f"this run's lab is not on the Ray cluster at {self._address} any more")

    def stop(self) -> None:
        """Let running requests end within the limit, then take the lab down. Does nothing when nothing runs."""
        if not ray.is_initialized():
            return
        if self._cluster is not None:
            self._stop_on(self._cluster)
            return
        _drain()
        serve.shutdown()
        ray.shutdown()

    def _stop_on(self, cluster: SharedCluster) -> bool:
        """False: this run has no lab there, and whatever is there was left alone."""
        is_ours = cluster.claim_stop()
        if is_ours:
            _drain()
            cluster.take_down()
        cluster.leave()
        return is_ours


def _drain() -> None:
    # A half-started lab has nothing to drain; whatever the reason, it is taken down next.
    try:
        scheduler = serve.get_deployment_handle("scheduler", APP_NAME)
        limit_s: float = scheduler.drain_timeout_s.remote().result(timeout_s=ANSWER_TIMEOUT_S)
        scheduler.drain.remote().result(timeout_s=limit_s + ANSWER_TIMEOUT_S)
    except Exception:
        logging.getLogger(__name__).info("nothing was drained", exc_info=True)


def _start_ray() -> None:
    ray_environment.start_needed_processes_only()
    ray.init(
        address="local",
        _node_ip_address=LOOPBACK,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        resources={ENGINE_RESOURCE: ENGINES_ON_ONE_MACHINE},
        namespace=APP_NAME,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )


def _need_gateway_here(host: str, port: int) -> None:
    """Raises: LabStartError: gateways listen on the cluster's head, and that is another machine."""
    if port_fault(host, port) is None:
        raise LabStartError(
            f"the lab runs, but nothing listens on {host}:{port} of this machine: its gateways are on the head of "
            "the Ray cluster; run this command there"
        )


def _wait_until_running(on_progress: Callable[[str], None], num_engines: int) -> None:
    while True:
        app = serve.status().applications.get(APP_NAME)
        if app is not None and app.deployments:
            if app.status == ApplicationStatus.RUNNING:
                return
            if app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                faults = [
                    f"{name}: {deployment.message}"
                    for name, deployment in app.deployments.items()
                    if deployment.status.value.endswith("FAILED")
                ]
                raise LabStartError("\n".join(faults) or app.message)
            on_progress(_describe(app.deployments) + _missing(num_engines))
        time.sleep(POLL_S)


def _describe(deployments: dict[str, Any]) -> str:
    ready = [name for name, deployment in deployments.items() if deployment.status.value == "HEALTHY"]
    waiting = [name for name in deployments if name not in ready]
    return f"{len(ready)} of {len(deployments)} deployments ready; waiting for {', '.join(waiting)}"


def _missing(num_engines: int) -> str:
    """Which engines no node takes, and why."""
    offered = int(ray.cluster_resources().get(ENGINE_RESOURCE, 0))
    if offered >= num_engines:
        return ""
    return (
        f"; the cluster's nodes offer {offered} of the {num_engines} {ENGINE_RESOURCE} that the lanes need: "
        f"ray start --resources='{{\"{ENGINE_RESOURCE}\": N}}'"
    )
