"""Steps from an engine to its replica: what is written is read, within bounds, and only when wanted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from serving.engines.steps.log import RequestStep, StepLog, StepLogError, StepWriter
from serving.tracing.events import Phase, StepEvent
from serving.tracing.sampling import is_sampled

ROW = RequestStep("cmpl-a", False, 5, 4, 2, 3)


@pytest.fixture
def log() -> Iterator[StepLog]:
    log = StepLog()
    yield log
    log.close()


@pytest.fixture
def writer(log: StepLog) -> Iterator[StepWriter]:
    writer = StepWriter(log.path)
    yield writer
    writer.close()


def test_a_step_is_read_as_it_was_written(log: StepLog, writer: StepWriter) -> None:
    log.start(10, with_token_ids=True)
    assert writer.is_on
    assert writer.wants_token_ids
    prefill = RequestStep("cmpl-b", True, 7, 0, 0, 1, None, (9,))
    drafted = RequestStep("cmpl-a", False, 5, 4, 2, 3, (1, 2, 3, 4), (1, 2, 8))
    writer.write(3, 100, 200, [prefill, drafted])
    log.stop()
    assert not writer.is_on
    assert list(log.events("r")) == [
        StepEvent("r", 3, 100, 200, "cmpl-b", Phase.PREFILL, 7, 0, 0, 1, None, (9,)),
        StepEvent("r", 3, 100, 200, "cmpl-a", Phase.DECODE, 5, 4, 2, 3, (1, 2, 3, 4), (1, 2, 8)),
    ]
    assert log.counts == (2, 0)


def test_what_exceeds_the_bound_is_lost_and_counted(log: StepLog, writer: StepWriter) -> None:
    log.start(3, with_token_ids=False)
    assert not writer.wants_token_ids
    writer.write(1, 0, 1, [ROW, ROW])
    writer.write(2, 1, 2, [ROW, ROW])  # one too many: the step is left out as a whole
    writer.write(3, 2, 3, [ROW])  # no later one fills the hole
    assert log.counts == (2, 3)
    assert {event.step for event in log.events("r")} == {1}


def test_of_a_share_only_its_requests_are_written_and_count(log: StepLog, writer: StepWriter) -> None:
    ids = [f"cmpl-x-{number:012x}-0" for number in range(200)]
    rows = [RequestStep(one, False, 1, 0, 0, 1) for one in ids]
    log.start(200, with_token_ids=False, share=0.25)
    writer.write(1, 0, 1, rows)
    writer.write(2, 1, 2, [row for row in rows if not is_sampled(row.request_id, 0.25)])
    found = [(event.step, event.request_id) for event in log.events("r")]
    assert found == [(1, one) for one in ids if is_sampled(one, 0.25)]
    assert log.counts == (len(found), 0)
    assert 0 < len(found) < 200
    log.start(200, with_token_ids=False)
    writer.write(3, 2, 3, rows)
    assert log.counts == (200, 0), "a share is of one recording"


def test_a_second_recording_knows_nothing_of_the_first(log: StepLog, writer: StepWriter) -> None:
    log.start(10, with_token_ids=False)
    writer.write(1, 0, 1, [ROW] * 8)
    log.start(10, with_token_ids=False)
    writer.write(2, 1, 2, [ROW])
    assert [event.step for event in log.events("r")] == [2]
    assert log.counts == (1, 0)


def test_without_an_engine_there_is_nothing_to_record(log: StepLog) -> None:
    with pytest.raises(StepLogError, match="unknown kind"):
        log.start(10, with_token_ids=False)


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    log: StepLog, writer: StepWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    log.start(10, with_token_ids=False)
    monkeypatch.setattr(os, "pwrite", full)
    writer.write(1, 0, 1, [ROW])
    assert not writer.is_on
    assert log.counts == (0, 1)
    with pytest.raises(StepLogError, match="No space left"):
        log.check()


def test_the_file_has_no_name_and_clearing_gives_its_room_back(log: StepLog, writer: StepWriter) -> None:
    assert "deleted" in os.readlink(log.path) or "#" in os.readlink(log.path)
    log.start(1000, with_token_ids=False)
    empty = os.stat(log.path).st_size
    writer.write(1, 0, 1, [ROW] * 500)
    assert os.stat(log.path).st_size > empty
    log.clear()
    assert os.stat(log.path).st_size == empty
    assert not writer.is_on


def test_closing_twice_is_closing_once() -> None:
    log = StepLog()
    log.close()
    log.close()
    log.clear()
