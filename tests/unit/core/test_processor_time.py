from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.core import processor_time

ENGINE = """
import subprocess, sys
from serving.core.processor_time import niceness, yield_as_engine
yield_as_engine()
yield_as_engine()
child = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
print(niceness(), subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
"""


def run(code: str, **options: object) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **options)  # type: ignore[call-overload]
    return str(done.stdout.strip())


def test_an_engine_and_what_it_starts_are_nice_and_not_more_with_each_call() -> None:
    assert run(ENGINE) == "15 15"


def test_who_is_nicer_already_stays_so() -> None:
    code = f"import os; os.setpriority(os.PRIO_PROCESS, 0, 17)\n{ENGINE}"
    assert run(code) == "17 17"


GROUP = """
import os
from serving.core.processor_time import group_niceness, yield_as_engine, yield_as_group
print(yield_as_group()); print(group_niceness())
yield_as_engine()
print(os.getsid(0) == os.getpid()); print(group_niceness())
print(yield_as_group()); print(group_niceness())
"""


@pytest.mark.skipif(
    not processor_time.has_groups(), reason="this kernel has no scheduling group of a session"
)
@pytest.mark.parametrize(
    "process_group", [None, 0], ids=["in a group of processes", "leads one, as Ray's do"]
)
def test_an_engine_has_a_group_of_its_own_which_comes_behind_and_others_stay_as_they_are(
    process_group: int | None,
) -> None:
    before = processor_time.group_niceness()
    # A process whose ancestors all stayed in the session of the kernel's first process is in no group.
    assert run(GROUP, process_group=process_group).splitlines() == [
        "it has no session of its own",
        str(before),
        "True",
        "0",
        "None",
        str(processor_time.GROUP_NICENESS),
    ]
    assert processor_time.group_niceness() == before


def test_a_kernel_without_groups_is_told_and_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, group = tmp_path / "enabled", tmp_path / "autogroup"
    monkeypatch.setattr(processor_time, "_SWITCH", switch)
    monkeypatch.setattr(processor_time, "_GROUP", group)
    group.write_text("/autogroup-7 nice 3")
    for content in (None, "0\n"):
        if content is not None:
            switch.write_text(content)
        assert processor_time.group_niceness() is None
        assert "sched_autogroup_enabled" in (processor_time.yield_as_group() or "")
    switch.write_text("1\n")
    assert processor_time.group_niceness() == 3
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    assert processor_time.yield_as_group() is None
    assert group.read_text() == str(processor_time.GROUP_NICENESS)
    group.unlink()
    assert processor_time.group_niceness() is None


class BusyFile:
    """A file that cannot be written to the first few times, as the kernel has it for users without privileges."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.text = ""

    def exists(self) -> bool:
        return True

    def write_text(self, text: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.text = text


@pytest.mark.parametrize(("patience_s", "written"), [(60.0, True), (0.0, False)])
def test_a_kernel_that_wants_to_be_asked_again_is(
    patience_s: float, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, group = tmp_path / "enabled", BusyFile(refusals=3)
    switch.write_text("1\n")
    monkeypatch.setattr(processor_time, "_SWITCH", switch)
    monkeypatch.setattr(processor_time, "_GROUP", group)
    monkeypatch.setattr(processor_time, "GROUP_PATIENCE_S", patience_s)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    lack = processor_time.yield_as_group()
    assert (lack is None) == written
    assert (group.text == str(processor_time.GROUP_NICENESS)) == written
