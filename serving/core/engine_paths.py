"""What an engine replica answers beside its engine: paths, and a header of refusals."""

from __future__ import annotations

TALLY_PATH = "/tandem/engine"
SENT_PATH = "/tandem/engine/sent"
TRACE_PATHS = "/tandem/trace/"
NOT_BEGUN_HEADER = b"x-tandem-not-begun"  # the engine was dead when the request came: it cannot be why
