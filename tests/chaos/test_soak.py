"""Ten minutes of everything at once: streams, clients that leave, replicas that die. Then nothing is left over."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time

import aiohttp
import pytest

from tests.chaos.crowd import Stream, count, crowd, kill, replica_process, role_process, stream
from tests.running_lab import RunningLab

SOAK_S = float(os.environ.get("TANDEM_SOAK_S", "600"))
WARM_UP_S = 60.0
KILL_EVERY_S = 60.0
MAX_GROWTH = 1.15  # of the gateway's and the scheduler's memory, from the end of the warm-up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S + 300)]


def memory_bytes(lab: RunningLab) -> dict[str, int]:
    """Memory that only the scheduler, and one gateway, holds."""
    return {role: role_process(lab, role).memory_full_info().uss for role in ("scheduler", "gateway")}


def test_a_long_run_leaves_nothing_and_grows_nothing(lab: RunningLab) -> None:
    rng = random.Random(0)
    seen: list[Stream] = []
    measured: list[dict[str, int]] = []

    async def client_for_ever(client: aiohttp.ClientSession, give_up_at_s: float) -> None:
        while time.monotonic() < give_up_at_s:
            one = Stream()
            seen.append(one)
            work = stream(client, lab, rng.choice((5, 50, 200)), one)
            if rng.random() < 0.2:  # this one leaves early
                try:
                    await asyncio.wait_for(work, rng.uniform(0.01, 0.5))
                except TimeoutError:
                    one.error = "left"
            else:
                await work
            await asyncio.sleep(rng.uniform(0, 0.1))

    async def work(client: aiohttp.ClientSession) -> None:
        start_s = time.monotonic()
        clients = [asyncio.create_task(client_for_ever(client, start_s + SOAK_S)) for _ in range(40)]
        next_kill_s = start_s + KILL_EVERY_S
        while time.monotonic() < start_s + SOAK_S:
            await asyncio.sleep(1)
            if not measured and time.monotonic() > start_s + min(WARM_UP_S, SOAK_S / 4):
                measured.append(memory_bytes(lab))
            if time.monotonic() > next_kill_s and (ready := lab.replicas("batched")):
                kill(replica_process(lab, rng.choice(ready)["replica"]))
                next_kill_s += KILL_EVERY_S
        await asyncio.gather(*clients)
        measured.append(memory_bytes(lab))

    crowd(work)
    fared = count(seen)
    assert set(fared) <= {"done", "left", "upstream_broke", "502 upstream_broke", "502 engine_died"}, fared
    assert fared["done"] > 0.7 * fared.total(), fared
    # What a kill costs: the eight that ran there, each freed slot once more, and their one reroute.
    num_kills = max(1, math.floor(SOAK_S / KILL_EVERY_S))
    assert fared.total() - fared["done"] - fared["left"] <= 16 * num_kills, fared
    early, late = measured
    for role, before in early.items():
        assert late[role] <= MAX_GROWTH * before, f"{role}: {before} to {late[role]} bytes; {fared}"
