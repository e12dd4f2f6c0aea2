from __future__ import annotations

import itertools

import pytest

from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.proposers.decide import Candidate, Policy, RowHistory, drafts_of_rows

CHEAP = CostModel(LinearStepTime(0.016, 0.001, 0.0))  # 16 positions cost as much as what all share
COSTLY = CostModel(LinearStepTime(0.016, 0.001, 0.0), DraftCost(0.002, 0.003, 0.0005))
LEARNED = CostModel(LinearStepTime(0.016, 0.001, 0.0), DraftCost(0.002, 0.003, 0.0005, least_passes=1))


def tokens_per_s(cost: CostModel, rows: list[Candidate], chosen: tuple[int, ...]) -> float:
    batch = len(rows)
    given = sum(
        sum(row.chance**position for position in range(drafts + 1))
        for row, drafts in zip(rows, chosen, strict=True)
    )
    step_s = cost.step_time.step_s(batch + sum(chosen), 0)
    if cost.draft_cost.least_passes:
        return given / (step_s + cost.draft_cost.draft_s(max(chosen), batch))
    # Without a model each drafted token has its part, and each further length its pass.
    drafting = cost.draft_cost
    passes_s = drafting.step_s + max(chosen) * drafting.pass_s if max(chosen) else 0.0
    return given / (step_s + passes_s + sum(chosen) * drafting.pass_sequence_s)


@pytest.mark.parametrize("cost", [CHEAP, COSTLY, LEARNED])
@pytest.mark.parametrize("chances", [(0.9,), (0.3, 0.8), (0.95, 0.5, 0.05), (0.6, 0.6, 0.6), (0.0, 1.0)])
def test_the_choice_is_the_best_of_all(cost: CostModel, chances: tuple[float, ...]) -> None:
    rows = [Candidate(chance, 4) for chance in chances]
    chosen = drafts_of_rows(cost, rows, 0)
    best = max(tokens_per_s(cost, rows, each) for each in itertools.product(range(5), repeat=len(rows)))
    assert tokens_per_s(cost, rows, tuple(chosen)) == pytest.approx(best)


def test_a_row_alone_that_is_guessed_well_gets_all_there_is() -> None:
    assert drafts_of_rows(CHEAP, [Candidate(0.95, 4)], 0) == [4]
    assert drafts_of_rows(CHEAP, [Candidate(0.95, 2)], 0) == [2]
    assert drafts_of_rows(CHEAP, [Candidate(0.95, 0)], 0) == [0]


def test_rows_of_a_batch_differ() -> None:
    assert drafts_of_rows(CHEAP, [Candidate(0.95, 4), Candidate(0.02, 4)], 0) == [4, 0]


def test_in_a_large_batch_little_pays() -> None:
    rows = [Candidate(0.6, 4)] * 256
    assert drafts_of_rows(CHEAP, rows, 0) == [0] * 256
    assert sum(drafts_of_rows(CHEAP, rows[:4], 0)) > 4


def test_a_token_that_costs_nothing_and_gives_nothing_is_not_drafted() -> None:
    assert drafts_of_rows(CostModel(LinearStepTime(1, 0, 0)), [Candidate(0.0, 4)], 0) == [0]
    assert drafts_of_rows(CHEAP, [], 0) == []


def test_what_all_rows_read_counts() -> None:
    """A long context makes a step long whatever is in it, so drafts pay that else would not."""
    cost = CostModel(LinearStepTime(0.016, 0.001, 1e-6))
    rows = [Candidate(0.3, 1)] * 32
    assert drafts_of_rows(cost, rows, 0) == [0] * 32
    assert drafts_of_rows(cost, rows, 200_000) == [1] * 32


def test_a_draft_that_costs_passes_must_be_worth_them() -> None:
    dear = CostModel(LinearStepTime(0.016, 0.0001, 0.0), DraftCost(0.0, 0.015, 0.0))
    assert drafts_of_rows(dear, [Candidate(0.5, 3)], 0) == [0]
    assert drafts_of_rows(dear, [Candidate(1.0, 3)], 0) == [3]


def test_a_pass_that_is_made_anyway_need_not_be_worth_it() -> None:
    rows = [Candidate(0.2, 4)]
    assert drafts_of_rows(COSTLY, rows, 0) == [0]
    assert drafts_of_rows(LEARNED, rows, 0) == [1]


def test_a_pass_that_is_made_for_one_row_serves_another() -> None:
    assert drafts_of_rows(COSTLY, [Candidate(0.3, 4), Candidate(0.8, 4)], 0) == [1, 2]


def test_a_history_follows_what_its_drafts_become() -> None:
    history = RowHistory()
    assert history.chance == 0.5
    history.learn(1)
    assert history.chance == 0.5, "without a draft nothing is learnt"
    history.give(4, 4)
    history.learn(5)
    assert history.chance > 0.8
    for _ in range(12):
        history.give(4, 4)
        history.learn(1)
    low = history.chance
    assert low < 0.1
    history.give(2, 4)
    history.learn(2)
    assert low < history.chance < 0.5


def test_a_draft_that_is_whole_tried_no_token_beyond_it() -> None:
    whole, cut = RowHistory(0, 0), RowHistory(0, 0)
    for history, num_tokens in ((whole, 3), (cut, 2)):
        history.give(2, 2)
        history.learn(num_tokens)
    assert (whole.tried, whole.accepted) == (2, 2)
    assert (cut.tried, cut.accepted) == (2, 1)


def run(policy: Policy, rows: int, steps: int, accepted: bool) -> list[list[int]]:
    """Drafts of each step of rows whose drafts all fail, or all hold."""
    histories = [RowHistory() for _ in range(rows)]
    seen = []
    for _ in range(steps):
        for history in histories:
            history.learn(1 + history.drafted * accepted)
        seen.append(policy.choose(histories, [policy.max_drafts] * rows, 0))
    return seen


def test_a_row_whose_drafts_hold_gets_them_whole() -> None:
    assert run(Policy(CHEAP, 4, 16), 1, 20, accepted=True)[-1] == [4]


def test_a_row_whose_drafts_fail_gets_none_but_one_token_at_times() -> None:
    seen = [drafts for (drafts,) in run(Policy(CHEAP, 4, 8), 1, 100, accepted=False)]
    late = seen[40:]
    assert set(late) == {0, 1}
    probes = [at for at, drafts in enumerate(late) if drafts]
    assert {b - a for a, b in itertools.pairwise(probes)} == {9}


def test_a_row_comes_back_when_its_text_can_be_guessed_again() -> None:
    policy, history = Policy(CHEAP, 4, 8), RowHistory()
    for _ in range(40):
        history.learn(1)
        policy.choose([history], [4], 0)
    drafts = []
    for _ in range(30):
        history.learn(1 + history.drafted)
        drafts += policy.choose([history], [4], 0)
    assert drafts[-1] == 4


def test_a_large_batch_is_not_even_probed() -> None:
    seen = run(Policy(CostModel(LinearStepTime(0.016, 0.001, 0)), 4, 4), 128, 40, accepted=False)
    assert all(drafts == [0] * 128 for drafts in seen)


def test_a_row_without_a_draft_to_be_had_does_not_wait_for_one() -> None:
    policy, history = Policy(CHEAP, 4, 4), RowHistory()
    for _ in range(20):
        policy.choose([history], [0], 0)
    assert history.idle_steps == 0
