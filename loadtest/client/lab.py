"""Reads a running lab over HTTP: its description, its metrics targets, and their figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from serving.core.addresses import without_secrets
from serving.core.client_key import KEY_HINT, key_headers
from serving.core.errors import ConfigError
from serving.core.http_get import GetError, get
from serving.core.lane import ANY_LANE
from serving.core.speculation import SpeculationCounts
from serving.metrics import names as metric_names
from serving.metrics.reading import is_exported, samples_of, sums_of

# A gateway counts a request once its last byte is out, and a broken-off one once it has noticed.
REST_TIMEOUT_S = 2.0
REST_POLL_S = 0.05

_OF_A_REPLICA = (
    metric_names.VLLM_NUM_DRAFTS,
    metric_names.VLLM_DRAFT_TOKENS,
    metric_names.VLLM_ACCEPTED_TOKENS,
    metric_names.VLLM_PREFIX_QUERIES,
    metric_names.VLLM_PREFIX_HITS,
    metric_names.REPLICA_MEMORY.name,
)
_OF_A_GATEWAY = (
    metric_names.REQUESTS.name,
    metric_names.OUTPUT_TOKENS.name,
    *(f"{metric_names.TTFT.name}_{part}" for part in ("sum", "count", "bucket")),
)


class LabError(Exception):
    """The lab could not be reached, or answered what cannot be read; the text names the address."""


class LockedLabError(LabError):
    """The lab asks for an API key that it was not shown."""


@dataclass(frozen=True, slots=True)
class PrefixCounts:
    """Prompt tokens looked up in an engine's prefix cache, and those found there."""

    queries: int
    hits: int


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """What a gateway counted of one lane; the lane is empty for requests that were given none.

    Attributes:
        ended: requests by outcome.
        output_tokens: of completed requests; so are the TTFTs, of those that streamed.
        ttft_buckets: upper edge in seconds and requests at or below it, rising; without the infinite edge.
    """

    lane: str
    ended: dict[str, int]
    output_tokens: int = 0
    ttft_count: int = 0
    ttft_sum_s: float = 0.0
    ttft_buckets: tuple[tuple[float, int], ...] = ()

    @property
    def num_ended(self) -> int:
        return sum(self.ended.values())


@dataclass(frozen=True, slots=True)
class GatewayScrape:
    """One gateway's counts since it started."""

    gateway: str
    lanes: tuple[LaneCounts, ...]

    def lane(self, lane: str) -> LaneCounts:
        """Its counts of a lane; zeros for one it has not served."""
        return next((counts for counts in self.lanes if counts.lane == lane), LaneCounts(lane, {}))


@dataclass(frozen=True, slots=True)
class ReplicaScrape:
    """One replica's figures at one instant; None where it does not export them.

    Attributes:
        speculation: counters since the engine started; None for a lane that does not speculate.
        memory_bytes: proportional set size of the replica's processes.
        prefix: counters of its prefix cache since the engine started.
    """

    lane: str
    replica: str
    speculation: SpeculationCounts | None
    memory_bytes: float | None
    prefix: PrefixCounts | None = None


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every replica and gateway that answered, and what went wrong with the others."""

    replicas: tuple[ReplicaScrape, ...] = ()
    errors: tuple[str, ...] = ()
    gateways: tuple[GatewayScrape, ...] = ()

    def num_ended(self, lane: str) -> int:
        """Requests that ended on a lane, or were turned away before they had one, at all gateways; of `any` all."""
        if lane == ANY_LANE:
            return sum(counts.num_ended for gateway in self.gateways for counts in gateway.lanes)
        return sum(gateway.lane(name).num_ended for gateway in self.gateways for name in (lane, ""))

    def memory_bytes(self, lane: str) -> float | None:
        """Memory of all replicas of a lane; None when any of them did not tell."""
        sizes = [replica.memory_bytes for replica in self.replicas if replica.lane == lane]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    def speculation(self, lane: str) -> dict[str, SpeculationCounts]:
        """Counters of the speculating replicas of a lane, by replica."""
        return {
            replica.replica: replica.speculation
            for replica in self.replicas
            if replica.lane == lane and replica.speculation is not None
        }

    def prefix(self, lane: str) -> dict[str, PrefixCounts]:
        """Counters of the prefix caches of a lane, by replica."""
        return {
            replica.replica: replica.prefix
            for replica in self.replicas
            if replica.lane == lane and replica.prefix is not None
        }


def describe_lab(base_url: str) -> dict[str, Any]:
    """The lab's `/lab`: config, model and replicas, and `priorities` where the lab says them.

    Raises:
        LabError: it cannot be reached, or what answers is no lab.
    """
    url = base_url.rstrip("/") + "/lab"
    description = _json(url)
    url = without_secrets(url)
    if not isinstance(description, dict) or not {"config", "replicas"} <= description.keys():
        raise LabError(f"{url}: this is not the description of a lab")
    try:
        model = _resolved_model(description["config"]["model"], description["replicas"])
        named = [(lane["name"], lane["strategy"]) for lane in description["config"]["lanes"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise LabError(f"{url}: this is not the description of a lab: {error!r}") from None
    if not named:
        raise LabError(f"{url}: the lab has no lane")
    return description | {"model": model}


def _resolved_model(model: dict[str, Any], replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's settings with the dtype and device that the replicas chose, where `auto` left it to them."""
    chosen = {
        key: ", ".join(sorted({replica[key] for replica in replicas if key in replica}))
        for key in ("dtype", "device")
    }
    return model | {key: value for key, value in chosen.items() if value}


def scrape(base_url: str) -> Scrape:
    """Read the metrics of every replica and gateway, as `/targets` lists them. Faults are collected, not raised."""
    try:
        metrics_targets = targets(base_url)
    except LabError as error:
        return Scrape(errors=(str(error),))
    replicas, gateways, errors = [], [], []
    for address, labels in metrics_targets:
        try:
            text = _read(f"http://{address}/metrics").decode()
            if labels.get("role") == "replica":
                replicas.append(parse_replica(text, labels.get("lane", ""), labels.get("replica", address)))
            elif labels.get("role") == "gateway":
                gateways.append(parse_gateway(text, labels.get("gateway", address)))
        except (LabError, ValueError) as error:
            errors.append(f"metrics of {address}: {error}")
    return Scrape(tuple(replicas), tuple(errors), tuple(gateways))


def scrape_at_rest(
    base_url: str,
    lane: str,
    before: Scrape,
    num_sent: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Scrape:
    """The scrape after a stage, once the gateways have counted all its requests or `REST_TIMEOUT_S` are over.

    Args:
        before: the scrape before the stage.
        num_sent: requests of the stage that reached the lab, warm-up among them.
    """
    deadline_s = clock() + REST_TIMEOUT_S
    while True:
        after = scrape(base_url)
        is_at_rest = after.num_ended(lane) - before.num_ended(lane) >= num_sent
        # Without a gateway's figures there is nothing to wait for.
        if is_at_rest or not after.gateways or clock() >= deadline_s:
            return after
        sleep(REST_POLL_S)


def parse_replica(text: str, lane: str, replica: str) -> ReplicaScrape:
    """One replica's figures from its metrics page.

    Raises:
        ValueError: the text is not in Prometheus's format, or its counters contradict each other.
    """
    sums = sums_of(text, _OF_A_REPLICA)
    counts = None
    if metric_names.VLLM_NUM_DRAFTS in sums:
        counts = SpeculationCounts(
            num_drafts=int(sums[metric_names.VLLM_NUM_DRAFTS]),
            draft_tokens=int(sums.get(metric_names.VLLM_DRAFT_TOKENS, 0)),
            accepted_tokens=int(sums.get(metric_names.VLLM_ACCEPTED_TOKENS, 0)),
        )
    prefix = None
    if metric_names.VLLM_PREFIX_QUERIES in sums:
        prefix = PrefixCounts(
            int(sums[metric_names.VLLM_PREFIX_QUERIES]), int(sums.get(metric_names.VLLM_PREFIX_HITS, 0))
        )
    return ReplicaScrape(lane, replica, counts, sums.get(metric_names.REPLICA_MEMORY.name), prefix)


def parse_gateway(text: str, gateway: str) -> GatewayScrape:
    """One gateway's counts from its metrics page; a lane is there once it has ended a request.

    Raises:
        ValueError: the text is not in Prometheus's format, or is not the page of a gateway.
    """
    ended: dict[str, dict[str, int]] = {}
    tokens: dict[str, int] = {}
    counts: dict[str, int] = {}
    sums_s: dict[str, float] = {}
    buckets: dict[str, list[tuple[float, int]]] = {}
    # A gateway that has served nothing names its metrics all the same.
    if not is_exported(text, metric_names.REQUESTS.name):
        raise ValueError(f"there is no {metric_names.REQUESTS.name}: not a gateway's page")
    for sample in samples_of(text, _OF_A_GATEWAY):
        lane = sample.labels.get("lane", "")
        if sample.name == metric_names.REQUESTS.name:
            by_outcome = ended.setdefault(lane, {})
            outcome = sample.labels["outcome"]
            by_outcome[outcome] = by_outcome.get(outcome, 0) + int(sample.value)
        elif sample.name == metric_names.OUTPUT_TOKENS.name:
            tokens[lane] = int(sample.value)
        elif sample.name == f"{metric_names.TTFT.name}_sum":
            sums_s[lane] = sample.value
        elif sample.name == f"{metric_names.TTFT.name}_count":
            counts[lane] = int(sample.value)
        elif sample.name == f"{metric_names.TTFT.name}_bucket" and sample.labels["le"] != "+Inf":
            buckets.setdefault(lane, []).append((float(sample.labels["le"]), int(sample.value)))
    return GatewayScrape(
        gateway,
        tuple(
            LaneCounts(
                lane,
                by_outcome,
                tokens.get(lane, 0),
                counts.get(lane, 0),
                sums_s.get(lane, 0.0),
                tuple(sorted(buckets.get(lane, []))),
            )
            for lane, by_outcome in ended.items()
        ),
    )


def targets(base_url: str) -> list[tuple[str, dict[str, str]]]:
    """Addresses that serve `/metrics`, each with its labels.

    Raises:
        LabError: they could not be read.
    """
    return _targets(_json(base_url.rstrip("/") + "/targets"))


def _targets(groups: Any) -> list[tuple[str, dict[str, str]]]:
    if not isinstance(groups, list):
        raise LabError("/targets: expected a list of target groups")
    try:
        return [(address, group["labels"]) for group in groups for address in group["targets"]]
    except (AttributeError, KeyError, TypeError) as error:
        raise LabError(f"/targets: a target group is not as it should be: {error!r}") from None


def _json(url: str) -> Any:
    """A page of the gateway, which may want a key."""
    try:
        return json.loads(_read(url, key_headers()))
    except ConfigError as error:
        raise LabError(str(error)) from None
    except ValueError:
        raise LabError(f"{url}: the answer is not JSON") from None


def _read(url: str, headers: Mapping[str, str] | None = None) -> bytes:
    try:
        return get(url, headers)
    except GetError as error:
        if error.status == HTTPStatus.UNAUTHORIZED:
            raise LockedLabError(f"{error}; {KEY_HINT}") from None
        raise LabError(str(error)) from None
