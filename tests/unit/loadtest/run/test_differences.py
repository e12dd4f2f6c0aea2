from __future__ import annotations

from typing import Any

from loadtest.run.differences import Difference, find_differences

ONE: dict[str, Any] = {"model": {"name": "m", "eos": [1, 2]}, "seed": 1}
OTHER: dict[str, Any] = {"model": {"eos": [1, 3, 4], "path": "p", "name": "m"}, "seed": 2}


def test_leaves_are_named_in_the_order_of_their_keys_and_lists_are_whole() -> None:
    assert list(find_differences(ONE, OTHER, absent="none")) == [
        Difference("model.eos", "[1, 2]", "[1, 3, 4]"),
        Difference("seed", "1", "2"),
        Difference("model.path", "none", "p"),
    ]


def test_lists_are_opened_where_that_is_asked_for() -> None:
    assert list(find_differences(ONE["model"], OTHER["model"], absent="none", opens_lists=True)) == [
        Difference("eos.length", "2", "3"),
        Difference("eos.1", "2", "3"),
        Difference("eos.2", "none", "4"),
        Difference("path", "none", "p"),
    ]


def test_equal_descriptions_do_not_differ_whatever_the_order_of_their_keys() -> None:
    assert list(find_differences({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, absent="none")) == []
