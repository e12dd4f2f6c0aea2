from __future__ import annotations

from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import LinearStepTime
from serving.proposers.chooser import Chooser
from serving.proposers.decide import Policy

POLICY = Policy(CostModel(LinearStepTime(0.016, 0.001, 0)), 3, 16)
DRAFTS = [[1, 2, 3], [4, 5, 6]]


def decided(num_steps: int) -> Chooser:
    """One row whose drafts hold and one whose drafts fail."""
    chooser = Chooser(POLICY)
    kept = [0, 0]
    for _ in range(num_steps):
        chooser.choose(["good", "bad"], [1 + kept[0], 1], 0)
        kept = [len(draft) for draft in chooser.cut(["good", "bad"], DRAFTS)]
    return chooser


def test_each_row_keeps_what_its_own_drafts_earned() -> None:
    chooser = decided(15)
    assert chooser.choose(["good", "bad"], [4, 1], 0) == 3
    assert chooser.cut(["good", "bad"], DRAFTS) == [[1, 2, 3], []]


def test_rows_go_by_their_names_and_not_by_their_places() -> None:
    chooser = decided(15)
    chooser.choose(["bad", "good"], [1, 4], 0)
    assert chooser.cut(["bad", "good"], DRAFTS) == [[], [4, 5, 6]]


def test_where_no_row_wants_a_draft_none_is_made() -> None:
    chooser = Chooser(POLICY)
    assert [chooser.choose(["bad"], [1], 0) for _ in range(14)][-1] == 0


def test_a_row_within_its_prompt_gets_none_and_learns_nothing() -> None:
    chooser = Chooser(POLICY)
    assert chooser.choose(["new"], [0], 0) == 0
    assert chooser.choose(["new"], [1], 0) > 0


def test_in_a_step_that_is_skipped_no_row_keeps_a_draft() -> None:
    chooser = decided(15)
    chooser.skip()
    assert chooser.cut(["good", "bad"], DRAFTS) == [[], []]


def test_a_step_without_drafts_after_one_that_was_skipped_is_not_learnt_from() -> None:
    chooser = decided(2)
    for _ in range(10):  # each such step, taken for drafts that failed, would end the row's drafts
        chooser.skip()
        assert chooser.choose(["good", "bad"], [1, 1], 0) == 3


def test_a_row_that_was_not_decided_on_keeps_nothing() -> None:
    assert decided(2).cut(["other"], DRAFTS[:1]) == [[]]
