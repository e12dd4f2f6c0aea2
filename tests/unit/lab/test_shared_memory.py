"""What killed processes leave in /dev/shm is removed, and nothing else is."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.core.errors import TandemError
from serving.lab import shared_memory
from serving.lab.cleanup import sweep
from serving.lab.shared_memory import SHM_DIR, Segment, Watch, forget, recorded, remove_left, segments_of
from tests.unit.lab.stand_in_lab import SegmentHolder, start_segment_holder

Start = Callable[[str], SegmentHolder]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts segment holders of a run; neither they nor their segments outlive the test."""
    holders: list[SegmentHolder] = []

    def start_one(run_id: str) -> SegmentHolder:
        holders.append(start_segment_holder(run_id))
        return holders[-1]

    yield start_one
    for holder in holders:
        holder.kill()
        (SHM_DIR / holder.segment).unlink(missing_ok=True)


def test_a_segment_is_removed_once_nobody_has_it_mapped(start: Start) -> None:
    holder = start("a")
    segments = segments_of([holder.process.pid])
    assert [segment.name for segment in segments] == [holder.segment]
    remove_left(segments)
    assert holder.is_segment_there, "its process lives"
    holder.kill()
    assert holder.is_segment_there, "its process left it behind"
    remove_left(segments)
    assert not holder.is_segment_there
    remove_left(segments)  # what is gone is no fault


def test_the_file_of_a_process_openmp_library_goes_with_it(start: Start, tmp_path: Path) -> None:
    holder, other = start("a"), start("b")
    files = [SHM_DIR / f"__KMP_REGISTERED_LIB_{each.process.pid}_0" for each in (holder, other)]
    try:
        for file in files:
            file.touch()
        watch = Watch(tmp_path, "run", lambda: [holder.process.pid])
        watch.look()
        known = recorded(tmp_path, "run")
        assert {one.name for one in known} == {holder.segment, files[0].name}
        remove_left(known)
        assert all(file.exists() for file in files), "its process lives"
        holder.kill()
        other.kill()
        remove_left(known)
        assert [file.exists() for file in files] == [False, True], "another lab's is not ours"
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_a_name_that_became_another_segment_s_stays(start: Start) -> None:
    holder = start("a")
    (segment,) = segments_of([holder.process.pid])
    holder.kill()
    remove_left({Segment(segment.name, segment.inode + 1)})
    assert holder.is_segment_there


def test_an_unlinked_segment_and_a_process_that_is_gone_count_as_none(start: Start) -> None:
    holder = start("a")
    (SHM_DIR / holder.segment).unlink()
    assert segments_of([holder.process.pid]) == set()
    holder.kill()
    assert segments_of([holder.process.pid]) == set()


def test_the_sweep_removes_what_its_own_run_leaves_and_nothing_else(start: Start) -> None:
    run_id = uuid.uuid4().hex
    alive, dead, unseen, other = start(run_id), start(run_id), start(run_id), start(run_id + "0")
    known = segments_of([dead.process.pid])
    for holder in (dead, unseen):
        holder.kill()
    sweep(run_id, grace_s=5, segments=known)
    holders = (alive, dead, unseen, other)
    assert [holder.is_segment_there for holder in holders] == [False, False, True, True]


def test_the_watch_writes_down_what_came_and_keeps_what_went(tmp_path: Path, start: Start) -> None:
    first, second = start("a"), start("a")
    pids = [first.process.pid]
    watch = Watch(tmp_path, "run", lambda: pids)
    watch.look()
    pids[:] = [second.process.pid]
    watch.look()
    assert {one.name for one in recorded(tmp_path, "run")} == {first.segment, second.segment}
    assert recorded(tmp_path, "another run") == set()
    forget(tmp_path)
    assert recorded(tmp_path, "run") == set()
    watch.look()
    assert list(tmp_path.iterdir()) == [], "nothing new was seen"


def test_processes_are_looked_at_again_only_when_segments_came_or_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHM_DIR", tmp_path)
    looked_at: list[int] = []

    def pids() -> list[int]:
        looked_at.append(1)
        return []

    watch = Watch(tmp_path, "run", pids)
    segment = tmp_path / "psm_1"
    segment.touch()
    for _ in range(5):
        watch.look()
    assert len(looked_at) == 2  # the second for what was listed and not mapped yet
    segment.unlink()
    watch.look()
    assert len(looked_at) == 3


@pytest.mark.parametrize("text", ["{", "[]", '{"run_id": "run"}', '{"run_id": "run", "segments": [1]}'])
def test_a_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "shared_memory.json").write_text(text)
    with pytest.raises(TandemError, match=r"shared_memory\.json: damaged record"):
        recorded(tmp_path, "run")
