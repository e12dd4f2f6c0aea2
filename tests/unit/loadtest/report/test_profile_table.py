from __future__ import annotations

import msgspec
from rich.console import Console

from loadtest.report.profile_table import HEADINGS, profile_table
from serving.core.speculation.step_time import LinearStepTime, RooflineStepTime
from tests.unit.loadtest.simulate.profiles import profile


def test_each_figure_is_of_the_form_that_is_reckoned_with() -> None:
    """The knee that `step ms` and `+ µs a token` give, and not that of another fit of the same steps."""
    plain, drafting = profile().lanes
    both = msgspec.structs.replace(plain, roofline=RooflineStepTime(0.012, 0.0004))
    free = msgspec.structs.replace(drafting, step_time=LinearStepTime(0.010, 0, 1e-7))
    table = profile_table(msgspec.structs.replace(profile(), lanes=(both, free)))
    console = Console(record=True, width=140)
    console.print(table)
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert lines[0] == ["Profile", "of", "any-model,", "measured", "2026-03-01"]
    assert [str(column.header) for column in table.columns] == ["lane", *HEADINGS]
    assert lines[-2] == ["batched", "20", "10.0", "500", "0", "–", "20.0", "1.0%", "2.0%", "16"]
    assert lines[-1] == ["speculative", "20", "10.0", "0", "100", "0.200", "–", "1.0%", "2.0%", "16"]
