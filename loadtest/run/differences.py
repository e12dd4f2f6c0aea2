"""What differs between two nested descriptions, such as the configs of two labs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that was not the same; `name` is its dotted key."""

    name: str
    a: str
    b: str


def find_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], *, absent: str, opens_lists: bool = False
) -> Iterator[Difference]:
    """The leaves of nested mappings that differ, in the order of their keys in A, then in B.

    Args:
        absent: stands for the value of a key that one of them does not have.
        opens_lists: compare lists by length and item, instead of whole.
    """
    of_a, of_b = dict(_leaves("", a, opens_lists)), dict(_leaves("", b, opens_lists))
    for name in dict.fromkeys([*of_a, *of_b]):
        if of_a.get(name) != of_b.get(name):
            yield Difference(name, str(of_a.get(name, absent)), str(of_b.get(name, absent)))


def _leaves(name: str, value: Any, opens_lists: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner, opens_lists)
    elif opens_lists and isinstance(value, list | tuple):
        yield f"{name}.length", len(value)
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}.{index}", inner, opens_lists)
    else:
        yield name, value
