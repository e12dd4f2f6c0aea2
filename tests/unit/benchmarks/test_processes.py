"""What belongs to a gateway, what it costs and takes, as the kernel tells it."""

from __future__ import annotations

import mmap
import os

import psutil
import pytest

from serving.benchmarks.processes import memory_bytes, part_of, processor_s, see, tree

ENGINE = "ray::ServeReplica:tandem:prepared"


@pytest.mark.parametrize(
    ("title", "part"),
    [
        (ENGINE, "engine"),
        ("ray::ServeReplica:tandem:gateway", "gateway"),
        ("ray::ServeReplica:tandem:scheduler", "gateway"),
        ("ray::ProxyActor", "gateway"),
        ("something new", "gateway"),  # it may be on the path: better counted than overlooked
        ("raylet", "rest"),
        ("gcs_server", "rest"),
        ("ray::ServeController", "rest"),
        ("ray::IDLE", "rest"),
    ],
)
def test_what_no_request_passes_is_no_part_of_the_gateway(title: str, part: str) -> None:
    assert part_of(title, ENGINE) == part


def test_processor_time_is_what_the_process_itself_has_counted() -> None:
    before_s = os.times()
    found_s = processor_s([os.getpid()])
    after_s = os.times()
    assert before_s.user + before_s.system - 0.05 <= found_s <= after_s.user + after_s.system + 0.05


def test_a_process_that_is_gone_costs_and_takes_nothing() -> None:
    gone = 2**22 + 1  # above the largest pid
    assert (processor_s([gone]), memory_bytes([gone]), tree(gone)) == (0, 0, [])


def test_more_memory_is_seen() -> None:
    # A mapping of its own: what malloc hands out may be pages that an earlier test has touched.
    held_bytes = 200_000_000
    before = memory_bytes([os.getpid()])
    with mmap.mmap(-1, held_bytes) as held:
        for at in range(0, held_bytes, mmap.PAGESIZE):
            held[at] = 1
        grown = memory_bytes([os.getpid()]) - before
    assert held_bytes * 0.8 < grown < held_bytes * 1.2


def test_a_process_is_seen_with_its_niceness() -> None:
    seen = see("a test", "client", psutil.Process())
    assert seen is not None
    assert (seen.pid, seen.niceness) == (os.getpid(), os.getpriority(os.PRIO_PROCESS, 0))
