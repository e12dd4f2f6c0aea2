from __future__ import annotations

import time

import gevent

from loadtest.client.health import LOOK_EVERY_S, HealthMonitor

BUSY_S = LOOK_EVERY_S + 0.1


def test_a_loop_that_is_kept_busy_shows_in_its_lag_and_in_processor_time() -> None:
    monitor = HealthMonitor()
    monitor.start()
    gevent.sleep(0)  # the monitor sets its timer
    began_s = time.process_time()
    while time.process_time() - began_s < BUSY_S:
        pass
    gevent.sleep(0.001)  # the timer fires, late
    health = monitor.stop()
    assert health.loop_lag_p99_s >= 0.09
    assert health.cpu_share > 0.1  # less than 1 where others have the core


def test_a_stage_without_a_tick_has_no_lag() -> None:
    monitor = HealthMonitor()
    monitor.start()
    health = monitor.stop()
    assert (health.loop_lag_p50_s, health.loop_lag_p99_s, health.processes) == (0, 0, 1)
