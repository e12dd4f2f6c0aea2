"""A fault that repeats is logged at once, and then once a minute."""

from __future__ import annotations

import logging

import pytest

from serving.scheduler.quiet_log import QuietLog


def test_a_text_is_said_again_only_after_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    log = QuietLog(logging.getLogger("quiet"), lambda: now_s)
    for _ in range(3):
        log.log(logging.WARNING, "100 % lost")
        log.log(logging.ERROR, "refused")
        now_s += 29
    assert caplog.messages == ["100 % lost", "refused"]
    now_s += 3
    log.log(logging.WARNING, "100 % lost")
    assert caplog.record_tuples[-1] == ("quiet", logging.WARNING, "100 % lost")
    assert len(caplog.messages) == 3
