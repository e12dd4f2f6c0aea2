"""A log of faults that come back several times a second: each is said once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

REPEAT_S = 60.0


class QuietLog:
    """Logs a text at once when it is new, and again only when `REPEAT_S` have passed."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said_at_s: dict[str, float] = {}  # of the last REPEAT_S only

    def log(self, level: int, text: str) -> None:
        """Log the text, unless it was logged a moment ago."""
        now_s = self._clock()
        self._said_at_s = {said: at_s for said, at_s in self._said_at_s.items() if now_s - at_s < REPEAT_S}
        if text not in self._said_at_s:
            self._said_at_s[text] = now_s
            self._logger.log(level, "%s", text)
