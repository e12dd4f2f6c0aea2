"""Tokens as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TokenText:
    """What tokens read as, by the served model's tokenizer.

    Args:
        file: its `tokenizer.json`.
    """

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(file))

    def of(self, tokens: tuple[int, ...], *, after: tuple[int, ...]) -> str:
        """The text that they add behind others: a token alone may lack its space or be half a character."""
        before = self._decode(after)
        return self._decode(after + tokens)[len(before) :]

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
