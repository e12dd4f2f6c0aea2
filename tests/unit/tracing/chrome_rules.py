"""What a Chrome trace must keep for a viewer to draw it; raises AssertionError with the event at fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

ROUNDING_US = 1e-3


def check_events(events: Iterable[dict[str, Any]]) -> None:
    """Every event is whole and finite; the slices of a track lie beside or within each other, in order of time."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    for event in events:
        for key, kind in (("pid", int), ("tid", int), ("ts", (int, float)), ("dur", (int, float))):
            assert isinstance(event.get(key), kind), f"{key} of {event}"
            assert math.isfinite(event[key]), event
            assert event[key] >= 0, event
        assert event["name"], event
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X", event
            tracks[event["pid"], event["tid"]].append(event)
    for track, slices in tracks.items():
        assert track in named, f"track {track} has no name"
        open_ends: list[float] = []
        last_ts = 0.0
        # The longest first among those that begin together, as viewers do.
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            assert start >= last_ts, event
            last_ts = start
            while open_ends and open_ends[-1] <= start + ROUNDING_US:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + ROUNDING_US, f"overlaps and is not nested: {event}"
            open_ends.append(end)
