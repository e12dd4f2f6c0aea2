"""How long a prompt is, in tokens: counted by the served model's tokenizer where it is at hand.

Only the text of the messages counts. The chat template adds its own tokens, about 5 for each message and,
with some models, a system prompt; a report therefore gives the server's count beside the size that was asked for.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Protocol

BYTES_PER_TOKEN = 4  # a usual ratio for English text
TOKENIZER_FILE = "tokenizer.json"

_WORD = re.compile(r"\s*\S+")


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    @property
    def name(self) -> str:
        """How it counts, for the record of a run."""

    def count(self, text: str) -> int: ...


class ByteEstimate:
    """Bytes / 4, where no tokenizer is at hand: an estimate, and named so."""

    name = f"estimate: bytes/{BYTES_PER_TOKEN}"

    def count(self, text: str) -> int:
        return -(-len(text.encode()) // BYTES_PER_TOKEN)


class ServedTokenizer:
    """The tokenizer that the model is served with.

    Args:
        path: `tokenizer.json`, or the model's directory that holds it.

    Raises:
        ValueError: there is no tokenizer that can be read.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: it costs 0.3 s, and a run without a tokenizer has no use for it.
        from tokenizers import Tokenizer

        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"no tokenizer in {path} (--tokenizer): {file} does not exist")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ValueError(f"{file} is no tokenizer that can be read (--tokenizer): {error}") from None
        self.name = f"tokenizer: {file}"

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


BYTE_ESTIMATE = ByteEstimate()


@cache
def token_counter(tokenizer: Path | None) -> TokenCounter:
    """The counter for a tokenizer file or model directory; the byte estimate when there is none.

    Raises:
        ValueError: a path was given and holds no tokenizer.
    """
    return BYTE_ESTIMATE if tokenizer is None else ServedTokenizer(tokenizer)
