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


LEADER = "from serving.core.processor_time import group_niceness, yield_as_session; "
LEADER += "print(yield_as_session()); print(group_niceness())"


@pytest.mark.skipif(
    not processor_time.has_groups(), reason="this kernel has no scheduling group of a session"
)
def test_the_leader_of_a_session_puts_it_last_and_others_leave_theirs_alone() -> None:
    assert run(LEADER, start_new_session=True).split() == ["None", "19"]
    before = processor_time.group_niceness()
    said = run(LEADER).splitlines()
    assert said[0].startswith("it runs in the session of a terminal; `tandem up --detach`")
    # A process whose ancestors all stayed in the session of the kernel's first process is in no group.
    assert processor_time.group_niceness() == before
    assert said[1] == str(before)


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
        assert "sched_autogroup_enabled" in (processor_time.yield_as_session() or "")
    switch.write_text("1\n")
    assert processor_time.group_niceness() == 3
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    assert processor_time.yield_as_session() is None
    assert group.read_text() == "19"
    group.unlink()
    assert processor_time.group_niceness() is None
