"""What a replica says of its engine, also one of a lab that said less."""

from __future__ import annotations

from typing import Any

import pytest

from serving.core.lane import has_model


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        ({"engine": "vllm", "has_model": True}, True),
        ({"engine": "echo", "has_model": False}, False),
        ({"engine": "vllm"}, True),
        ({"engine": "simulated"}, False),
        ({}, True),
    ],
    ids=["told", "told otherwise", "an older lab", "an older lab of simulated engines", "nothing is known"],
)
def test_whether_it_has_a_model_is_told_or_was_in_its_name(replica: dict[str, Any], expected: bool) -> None:
    assert has_model(replica) == expected
