"""How long a prompt is, in tokens: counted by the served model's tokenizer where it is at hand.

Only the text of the messages counts. The chat template adds its own tokens, about 5 for each message and,
with some models, a system prompt; a report therefore gives the server's count beside the size that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

from serving import model_store
from serving.core.request import BYTES_PER_TOKEN

TOKENIZER_FILE = "tokenizer.json"


class TokenCounter(Protocol):
    """Counts tokens, and cuts texts to a number of them."""

    @property
    def name(self) -> str:
        """How it counts, for the record of a run."""

    def __hash__(self) -> int: ...

    def count(self, text: str) -> int: ...

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text, at most `tokens` (>= 1) long, in whole words but for the first."""


class ByteEstimate:
    """Bytes / 4, where no tokenizer is at hand: an estimate, and named so."""

    name = f"estimate: bytes/{BYTES_PER_TOKEN}"

    def count(self, text: str) -> int:
        return -(-len(text.encode()) // BYTES_PER_TOKEN)

    def cut(self, text: str, tokens: int) -> str:
        kept = text.encode()[: tokens * BYTES_PER_TOKEN].decode(errors="ignore")
        return _whole_words(text, len(kept))


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

    def cut(self, text: str, tokens: int) -> str:
        ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]
        return text if len(ends) <= tokens else _whole_words(text, ends[tokens - 1])


BYTE_ESTIMATE = ByteEstimate()


@cache
def token_counter(tokenizer: Path | None) -> TokenCounter:
    """The counter for a tokenizer file or model directory; the byte estimate when there is none.

    Raises:
        ValueError: a path was given and holds no tokenizer.
    """
    return BYTE_ESTIMATE if tokenizer is None else ServedTokenizer(tokenizer)


def tokenizer_of(model_path: str) -> Path | None:
    """The tokenizer of the model that a lab's config names (`model.path`), if it lies on this machine."""
    file = model_store.directory_of(model_path) / TOKENIZER_FILE
    return file if file.is_file() else None


def fill(counter: TokenCounter, texts: Iterator[str], tokens: int) -> str:
    """As many texts as make `tokens` (>= 1), a blank line between them, the last one cut.

    Raises:
        ValueError: the texts end too early.
    """
    parts: list[str] = []
    left = tokens
    for text in texts:
        part = f"\n\n{text}" if parts else text
        part_tokens = _count(counter, part)
        if part_tokens >= left:
            return "".join([*parts, counter.cut(part, left)]).rstrip()
        parts.append(part)
        left -= part_tokens
    raise ValueError(f"the texts end {left} tokens before {tokens}")


# The same passages come again and again, and counting costs a millisecond per 1,000 tokens.
@lru_cache(maxsize=4096)
def _count(counter: TokenCounter, text: str) -> int:
    return counter.count(text)


def _whole_words(text: str, end: int) -> str:
    """`text[:end]` without the part of a word that it ends in."""
    start = end
    while 0 < start < len(text) and text[start - 1].isalnum() and text[start].isalnum():
        start -= 1
    return text[: start or end].rstrip()
