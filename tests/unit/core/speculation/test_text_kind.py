from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.offer.workload import load_workload
from serving.core.speculation import text_kind
from serving.core.speculation.text_kind import MAX_CHARS, TextKind, features_of

MATERIAL = " ".join(f"word{number} and others" for number in range(40))


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Tell me a story about a lighthouse.", TextKind.OPEN),
        ("Copy this.", TextKind.OPEN),  # there is nothing to copy
        (f"Rewrite the following in plain words: {MATERIAL}", TextKind.COPY),
        (f"{MATERIAL}\n\nCorrect the spelling of this.", TextKind.COPY),
        (f"A text: {MATERIAL} copy {MATERIAL}\n\nWho is it about?", TextKind.REPETITIVE),
        (f"A text: {MATERIAL}\n\nWho is it about?", TextKind.GROUNDED),
        ("What does this do?\n```python\nprint(1)\n```", TextKind.CODE),
        ("Who says “I have never seen a place as quiet as this one”?", TextKind.GROUNDED),
        ("", TextKind.OPEN),
    ],
)
def test_speculation_s_kind_of_a_prompt(prompt: str, kind: TextKind) -> None:
    assert features_of(prompt).kind is kind


def test_shares_of_speculation_features_are_what_they_say() -> None:
    # "a b c" comes three times: 2 of 7 n-grams stood there before.
    assert features_of("a b c a b c a b c").recurring_share == pytest.approx(4 / 7)
    assert features_of("> quoted\nmine now").quoted_share == pytest.approx(8 / 17)
    assert features_of("one two").recurring_share == 0


@given(st.text(max_size=400), st.integers(1, 100))
def test_speculation_features_of_any_text_are_shares(text: str, times: int) -> None:
    features = features_of(text * times)
    assert 0 <= features.recurring_share < 1
    assert 0 <= features.quoted_share <= 1
    assert features.kind in TextKind


def test_a_long_prompt_is_read_at_both_ends() -> None:
    task = f"Repeat this exactly. {'x ' * MAX_CHARS} Thank you."
    assert features_of(task).asks_to_copy
    assert features_of(task).num_words <= MAX_CHARS
    assert features_of(f"{'x ' * MAX_CHARS} Now copy it.").asks_to_copy
    assert not features_of(f"{'x ' * MAX_CHARS} copy {'x ' * MAX_CHARS}").asks_to_copy


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["\n", "\t\n", "“", '"x', "> a\n", "```\n"])
def test_a_long_prompt_made_to_be_looked_at_for_long_is_not(
    piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_kind, "MAX_CHARS", 400_000)
    features_of(piece * (200_000 // len(piece)))


# What acceptance was measured to be: high on copied text, low on stories.
@pytest.mark.parametrize(
    ("workload", "kind", "share"),
    [
        ("copy", TextKind.COPY, 1.0),
        ("edit", TextKind.COPY, 1.0),
        ("story", TextKind.OPEN, 1.0),
        ("chat", TextKind.GROUNDED, 0.9),
        ("rag", TextKind.GROUNDED, 0.9),
    ],
)
def test_the_load_lab_s_workloads_are_speculation_kinds(workload: str, kind: TextKind, share: float) -> None:
    requests = [load_workload(workload).request(1, number) for number in range(40)]
    kinds = [
        features_of("\n".join(str(message["content"]) for message in request.messages)).kind
        for request in requests
    ]
    assert kinds.count(kind) / len(kinds) >= share
