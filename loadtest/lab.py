"""Reads a running lab over HTTP: its description, its metrics targets, and their figures."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serving.core import metric_names
from serving.core.speculation import SpeculationCounts

READ_TIMEOUT_S = 10

# Reached directly, as the load is: a proxy of the environment must not see one and miss the other.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LabError(Exception):
    """The lab could not be reached, or answered what cannot be read; the text names the address."""


@dataclass(frozen=True, slots=True)
class ReplicaScrape:
    """One replica's figures at one instant; None where it does not export them.

    Attributes:
        speculation: counters since the engine started; None for a lane that does not speculate.
        memory_bytes: proportional set size of the replica's processes.
    """

    lane: str
    replica: str
    speculation: SpeculationCounts | None
    memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every replica that answered, and what went wrong with the others."""

    replicas: tuple[ReplicaScrape, ...] = ()
    errors: tuple[str, ...] = ()

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


def describe_lab(base_url: str) -> dict[str, Any]:
    """The lab's `/lab`: config, model and replicas.

    Raises:
        LabError: it cannot be reached, or what answers is no lab.
    """
    url = base_url.rstrip("/") + "/lab"
    description = _json(url)
    if not isinstance(description, dict) or not {"config", "replicas"} <= description.keys():
        raise LabError(f"{url}: this is not the description of a lab")
    return description | {"model": _resolved_model(description["config"]["model"], description["replicas"])}


def _resolved_model(model: dict[str, Any], replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's settings with the dtype and device that the replicas chose, where `auto` left it to them."""
    chosen = {
        key: ", ".join(sorted({replica[key] for replica in replicas if key in replica}))
        for key in ("dtype", "device")
    }
    return model | {key: value for key, value in chosen.items() if value}


def scrape(base_url: str) -> Scrape:
    """Read every replica's metrics, as `/targets` lists them. Faults are collected, not raised."""
    try:
        targets = _replica_targets(_json(base_url.rstrip("/") + "/targets"))
    except LabError as error:
        return Scrape(errors=(str(error),))
    replicas, errors = [], []
    for address, labels in targets:
        try:
            text = _read(f"http://{address}/metrics").decode()
            replicas.append(parse_replica(text, labels.get("lane", ""), labels.get("replica", address)))
        except (LabError, ValueError) as error:
            errors.append(f"metrics of {address}: {error}")
    return Scrape(tuple(replicas), tuple(errors))


def parse_replica(text: str, lane: str, replica: str) -> ReplicaScrape:
    """One replica's figures from its metrics page.

    Raises:
        ValueError: the text is not in Prometheus's format, or its counters contradict each other.
    """
    wanted = {
        metric_names.VLLM_NUM_DRAFTS,
        metric_names.VLLM_DRAFT_TOKENS,
        metric_names.VLLM_ACCEPTED_TOKENS,
        metric_names.REPLICA_MEMORY.name,
    }
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    counts = None
    if metric_names.VLLM_NUM_DRAFTS in sums:
        counts = SpeculationCounts(
            num_drafts=int(sums[metric_names.VLLM_NUM_DRAFTS]),
            draft_tokens=int(sums.get(metric_names.VLLM_DRAFT_TOKENS, 0)),
            accepted_tokens=int(sums.get(metric_names.VLLM_ACCEPTED_TOKENS, 0)),
        )
    return ReplicaScrape(lane, replica, counts, sums.get(metric_names.REPLICA_MEMORY.name))


def _replica_targets(groups: Any) -> Iterable[tuple[str, dict[str, str]]]:
    if not isinstance(groups, list):
        raise LabError("/targets: expected a list of target groups")
    try:
        return [
            (address, group["labels"])
            for group in groups
            if group["labels"].get("role") == "replica"
            for address in group["targets"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise LabError(f"/targets: a target group is not as it should be: {error!r}") from None


def _json(url: str) -> Any:
    try:
        return json.loads(_read(url))
    except ValueError:
        raise LabError(f"{url}: the answer is not JSON") from None


def _read(url: str) -> bytes:
    try:
        with _OPENER.open(url, timeout=READ_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise LabError(f"{url}: answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise LabError(f"{url}: cannot be reached: {reason}") from None
    except OSError as error:
        raise LabError(f"{url}: cannot be read: {error.strerror or error}") from None
