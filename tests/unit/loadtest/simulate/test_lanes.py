from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from loadtest.simulate.lanes import TextMix, candidates, parse_text_mix
from serving.core.errors import ConfigError
from serving.core.speculation.cost_model import BatchRange, Lengths
from tests.unit.loadtest.simulate.profiles import ACCEPTANCE, profile

LENGTHS = Lengths(100, 50)
BOTH = TextMix(("copy", "story"), (0.5, 0.5))


def test_all_lanes_are_candidates_and_those_that_draft_once_more() -> None:
    names = [candidate.name for candidate in candidates(profile(), (), BOTH, LENGTHS)]
    assert names == ["batched", "speculative", "speculative/by-batch"]
    assert [candidate.name for candidate in candidates(profile(), ("batched",), BOTH, LENGTHS)] == ["batched"]
    with pytest.raises(ConfigError, match="lane 'other' is not in the profile"):
        candidates(profile(), ("other",), BOTH, LENGTHS)


def test_a_lane_by_batch_is_named_as_tables_name_it() -> None:
    def named(*names: str) -> list[str]:
        return [candidate.name for candidate in candidates(profile(), names, BOTH, LENGTHS)]

    assert named("speculative/by-batch") == ["speculative/by-batch"]
    assert named("speculative/by-batch", "speculative") == ["speculative/by-batch", "speculative"]
    with pytest.raises(ConfigError, match="--lanes 'batched/by-batch': lane 'batched' drafts nothing"):
        named("batched/by-batch")


def test_a_lane_that_is_named_after_its_table_is_another_one() -> None:
    plain, drafting = profile().lanes
    tuned = msgspec.structs.replace(drafting, lane="speculative-by-batch")
    both = msgspec.structs.replace(profile(), lanes=(plain, drafting, tuned))
    names = [candidate.name for candidate in candidates(both, (), BOTH, LENGTHS)]
    assert len(set(names)) == len(names) == 5


def test_a_lane_s_steps_differ_as_they_did_when_it_was_measured() -> None:
    plain, drafting = profile().lanes
    noisy = msgspec.structs.replace(drafting, residuals=replace(drafting.residuals, noise=0.2))
    found = candidates(msgspec.structs.replace(profile(), lanes=(plain, noisy)), (), BOTH, LENGTHS)
    assert [candidate.model.step_noise for candidate in found] == [0.0, 0.2, 0.2]


def test_a_lane_by_batch_drafts_less_where_more_run() -> None:
    _, fixed, by_batch = candidates(profile(), (), BOTH, LENGTHS)
    assert set(fixed.model.drafts_by_batch) == {3}
    drafts = by_batch.model.drafts_by_batch
    assert len(drafts) == 17
    assert list(drafts) == sorted(drafts, reverse=True)
    assert drafts[1] > drafts[16]
    assert by_batch.table[0].first == 1
    assert by_batch.table[-1].last == 16
    assert by_batch.capacity_rps >= fixed.capacity_rps


def test_acceptance_is_that_of_each_kind_in_the_order_of_the_mix() -> None:
    plain, fixed, _ = candidates(profile(), (), TextMix(("story", "copy"), (0.9, 0.1)), LENGTHS)
    assert fixed.model.acceptance == (ACCEPTANCE["story"], ACCEPTANCE["copy"])
    assert plain.model.acceptance == ((), ())
    assert plain.table == (BatchRange(1, 16, 0),)


def test_guessable_text_makes_drafts_worth_while_at_more_load() -> None:
    tables = [
        candidates(profile(), ("speculative",), parse_text_mix(kind, profile()), LENGTHS)[1].table
        for kind in ("story", "copy")
    ]
    of_story, of_copy = (sum(part.num_drafts * (part.last - part.first + 1) for part in t) for t in tables)
    assert of_copy > of_story


def test_shares_of_text_are_of_their_sum() -> None:
    assert parse_text_mix(None, profile()) == TextMix(("copy", "story"), (0.5, 0.5))
    assert parse_text_mix("story", profile()) == TextMix(("story",), (1.0,))
    assert parse_text_mix("story=3, copy=1", profile()) == TextMix(("story", "copy"), (0.75, 0.25))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("chat", "acceptance on 'chat' is not in the profile; it has copy, story"),
        ("story=0", "'story=0' must be a kind, once, with a share above 0"),
        ("story=x", "'story=x' must be"),
        ("story=nan", "'story=nan' must be"),
        ("story=1,story=2", "'story=2' must be a kind, once"),
        (
            "story=1e308,copy=1e308",
            "'story=1e308' must be a kind, once, with a share above 0 and at most 1,000,000",
        ),
    ],
)
def test_a_mix_that_is_none_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_text_mix(text, profile())
    assert fault in str(refused.value)


def test_a_lane_that_drafts_without_known_acceptance_is_refused() -> None:
    plain, drafting = profile().lanes
    partly = msgspec.structs.replace(
        profile(), lanes=(plain, msgspec.structs.replace(drafting, acceptance={"copy": (0.9,)}))
    )
    with pytest.raises(ConfigError, match="lane 'speculative' drafts, but its acceptance on 'story'"):
        candidates(partly, (), BOTH, LENGTHS)
    assert len(candidates(partly, ("batched",), BOTH, LENGTHS)) == 1
