from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.analysis.run_summary import summarize
from loadtest.analysis.summary import Agreement, Summary
from loadtest.offer.load import ClosedLoop, constant_rate
from loadtest.report.tables import agreement_table, print_tables, tables, wide_console
from tests.unit.loadtest.runs import whole_run
from tests.unit.loadtest.summaries import TOO_LATE, capacity, objective, probe, stage, summary, sweep


def printed(made: Summary, width: int, *, with_all: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    print_tables(made, console, with_all=with_all)
    return out.getvalue()


def cells(made: Summary, table: str, row: int = 0) -> dict[str, str]:
    """A row by the headings of its columns."""
    filled = next(each for each in tables(made) if each.name == table)
    return dict(zip((column.heading for column in filled.columns), filled.rows[row].cells, strict=True))


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("made", [summarize(*whole_run()), sweep()], ids=["bench", "sweep"])
def test_tables_fit_and_cut_no_word(made: Summary, width: int) -> None:
    lines = printed(made, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    speculative = sum(stage.lane == "speculative" for stage in made.stages)
    assert sum("speculative" in line for line in lines) == 3 * speculative + len(made.capacities[:1])
    assert all(heading in " ".join(lines) for heading in ("TTFT", "achieved", "kernel"))


def test_off_a_terminal_all_columns_are_there() -> None:
    out = io.StringIO()
    assert wide_console(Console(file=out, width=40)).width == 132


def test_intervals_stand_in_brackets_behind_their_value() -> None:
    row = cells(summary([stage(ttft_s=0.4)]), "table")
    assert row["TTFT p50 ms"] == "400 [360–440]"
    assert row["TTFT p95 ms"] == "600 [540–660]"


def test_a_wide_terminal_has_intervals_and_a_narrow_one_values() -> None:
    made = summary([stage(ttft_s=0.4)])
    assert "[540–660]" in printed(made, 132)
    assert "600" in printed(made, 80)
    assert "[540–660]" not in printed(made, 80)


def test_an_invalid_row_says_so_in_every_table_without_colour() -> None:
    made = summary([stage("batched", invalid=(TOO_LATE,)), stage("sequential")])
    text = printed(made, 100)
    assert sum("INVALID" in line for line in text.splitlines()) == 3 + 1  # and the reason below
    assert f"batched/copy/4 users: INVALID: {TOO_LATE}" in text
    assert sum("batched" in line for line in text.splitlines()) == 3 + 1


def test_a_name_longer_than_the_terminal_is_folded_and_not_lost() -> None:
    made = summary([stage("batched", workload="w" * 120)])
    assert printed(made, 80).count("w") >= 3 * 120


def test_a_closed_loop_has_no_offered_rate_and_no_objective_columns() -> None:
    row = cells(summary([stage()]), "load")
    assert not row.keys() & {"offered per s", "met SLO", "binds"}
    assert row["in flight"] == "3.8"


def test_an_open_loop_shows_offered_achieved_and_what_binds() -> None:
    row = cells(summary([stage(load=constant_rate(2, 30), slo=objective(0.8, 2))]), "load")
    assert (row["offered per s"], row["achieved per s"]) == ("2.00", "2.00")
    assert (row["met SLO"], row["holds"], row["binds"]) == ("80.0% [76.0–82.0]", "no", "ttft_p95<2s")
    assert row["goodput per s"] == "1.60 [1.44–1.76]"


def test_capacities_say_when_they_are_bounds_or_missing() -> None:
    made = summary(
        capacities=[
            capacity("batched", 2.0, is_lower_bound=True),
            capacity("sequential", None, probes=[probe(0.5, 0.2), probe(0.25, 0.9, is_valid=False)]),
        ]
    )
    assert cells(made, "capacities", 0)["requests per s"] == "at least 2.00 [1.88–2.12]"
    missing = cells(made, "capacities", 1)
    assert (missing["requests per s"], missing["probes"]) == ("none found", "2, 1 INVALID")


def test_disagreement_is_named_with_both_sides() -> None:
    pair = (
        Agreement("completed requests", 40, 40, 0, agrees=True),
        Agreement("mean TTFT (s)", 0.412, 0.35, 0.02, agrees=False),
    )
    made = summary([stage(agreements=pair)])
    assert cells(made, "self-check")["server agrees"] == "1 of 2"
    filled = agreement_table(made, only_bad=True)
    assert filled is not None
    assert [row.cells[3:] for row in filled.rows] == [
        ("mean TTFT (s)", "0.412", "0.350", "0.0200", "DISAGREE")
    ]
    every = agreement_table(made)
    assert every is not None
    assert every.rows[0].cells[3:] == ("completed requests", "40", "40", "0", "agree")
    assert agreement_table(summary([stage()])) is None


def test_a_narrow_terminal_folds_no_row_while_a_column_can_go() -> None:
    made = summary([stage("speculative", ClosedLoop(8), invalid=(TOO_LATE,))])
    (row,) = [
        line for line in printed(made, 80, with_all=False).splitlines() if "INVALID speculative" in line
    ]
    assert "8 users" in row


def test_rows_stand_together_that_differ_in_one_thing() -> None:
    lanes = [
        stage(lane, ClosedLoop(users))
        for users in (1, 4)
        for lane in ("sequential", "batched", "speculative")
    ]
    one_lane = [stage("batched", ClosedLoop(users)) for users in (1, 4, 8)]
    for stages, starts in ((lanes, [3]), (one_lane, [])):
        rows = next(each for each in tables(summary(stages)) if each.name == "table").rows
        assert [index for index, row in enumerate(rows) if row.is_start] == starts


def test_a_terminal_is_not_filled_with_notes() -> None:
    made = summary([stage(load=ClosedLoop(users), invalid=(TOO_LATE,)) for users in range(1, 21)])
    few = printed(made, 132, with_all=False)
    assert few.count(TOO_LATE) == 6
    assert "... and 14 notes more" in few
    assert printed(made, 132).count(TOO_LATE) == 20
