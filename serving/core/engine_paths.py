"""Paths that an engine replica answers beside those of its engine."""

from __future__ import annotations

TALLY_PATH = "/tandem/engine"
SENT_PATH = "/tandem/engine/sent"
TRACE_PATHS = "/tandem/trace/"
