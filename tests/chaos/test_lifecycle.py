"""Replicas and whole labs that go on purpose: nobody's stream is dropped."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import aiohttp
import pytest

from tests.chaos.crowd import Stream, count, crowd, stream, until
from tests.running_lab import RunningLab, running_lab, tandem, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


def config(**lane: Any) -> dict[str, Any]:
    simulated = {"ttft_ms": 30, "step_ms": 10}
    base = {
        "name": "batched",
        "strategy": "batched",
        "engine": "simulated",
        "max_num_seqs": 4,
        "simulated": simulated,
    }
    return {
        "model": {"name": "sim", "max_model_len": 4096},
        "scheduler": {"drain_timeout_s": 30},
        "lanes": [base | lane],
    }


def num_ready(lab: RunningLab) -> int:
    return len(lab.replicas("batched"))


def test_a_lane_grows_and_shrinks_with_its_outstanding_tokens_and_drops_no_stream() -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_outstanding_tokens": 1000,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
    }
    with running_lab(config(autoscaling=scaling)) as lab:

        async def work(client: aiohttp.ClientSession) -> list[Stream]:
            short = [Stream() for _ in range(24)]
            tasks = [asyncio.create_task(stream(client, lab, 600, one)) for one in short]
            await until(lambda: num_ready(lab) == 3, "three replicas", limit_s=60)
            # Six that outlive the scaling down: the lane wants one or two replicas then, and they are on all three.
            long = [Stream() for _ in range(6)]
            tasks += [asyncio.create_task(stream(client, lab, 1500, one)) for one in long]
            await asyncio.gather(*tasks)
            assert {one.replica for one in short + long} > {short[0].replica}
            return short + long

        assert count(crowd(work)) == {"done": 30}
        wait_until(lambda: num_ready(lab) == 1, "back to one replica", limit_s=60)

        async def one_more(client: aiohttp.ClientSession) -> list[Stream]:
            return [await stream(client, lab, 5, Stream())]

        assert count(crowd(one_more)) == {"done": 1}


def test_down_lets_running_streams_end_and_refuses_new_ones_with_the_reason() -> None:
    with running_lab(config()) as lab, concurrent.futures.ThreadPoolExecutor(1) as pool:

        async def work(client: aiohttp.ClientSession) -> tuple[list[Stream], list[Stream]]:
            seen = [Stream() for _ in range(4)]
            tasks = [asyncio.create_task(stream(client, lab, 800, one)) for one in seen]
            await until(lambda: all(one.tokens > 0 for one in seen), "every stream has begun")
            stopping = pool.submit(tandem, "down", environment=lab.environment)
            await until(lambda: bool(lab.get("/scheduler")["draining"]), "the lab drains")
            late = [await stream(client, lab, 5, Stream())]
            await asyncio.gather(*tasks)
            assert await asyncio.wrap_future(stopping)
            assert stopping.result().returncode == 0, stopping.result().stderr
            return seen, late

        seen, late = crowd(work)
        assert count(seen) == {"done": 4}
        assert [one.tokens for one in seen] == [800] * 4
        assert count(late) == {"503 draining": 1}
