from __future__ import annotations

from itertools import repeat
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loadtest.offer.prompt_tokens import (
    BYTE_ESTIMATE,
    ServedTokenizer,
    TokenCounter,
    fill,
    token_counter,
    tokenizer_of,
)
from loadtest.offer.prompts import code_snippets, passages
from loadtest.offer.workload import WORKLOAD_NAMES, load_workload


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ServedTokenizer:
    """A small byte-pair tokenizer of the usual make, trained here so that no model is needed."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*passages(), *code_snippets()], trainer)
    directory = tmp_path_factory.mktemp("model")
    made.save(str(directory / "tokenizer.json"))
    return ServedTokenizer(directory)


@pytest.mark.parametrize("name", [name for name in WORKLOAD_NAMES if name != "multi-turn"])
@pytest.mark.parametrize("asked", [60, 200, 1000, 5000])
def test_prompts_are_as_long_as_asked(name: str, asked: int, tokenizer: ServedTokenizer) -> None:
    load = load_workload(name, prompt_tokens=asked, counter=tokenizer)
    for number in range(45):
        messages = load.request(1, number).messages
        size = sum(tokenizer.count(message["content"]) for message in messages)
        assert abs(size - asked) <= max(4, 0.02 * asked)


@pytest.mark.parametrize("asked", [1, 2, 7])
def test_a_prompt_too_short_for_its_task_is_text_of_that_length(
    asked: int, tokenizer: ServedTokenizer
) -> None:
    for name in ("chat", "rag", "copy", "edit"):
        (message,) = load_workload(name, prompt_tokens=asked, counter=tokenizer).request(1, 0).messages
        assert 1 <= tokenizer.count(message["content"]) <= asked


@pytest.mark.parametrize("counter", [BYTE_ESTIMATE, None], ids=["estimate", "tokenizer"])
def test_a_cut_is_a_beginning_in_whole_words(
    counter: TokenCounter | None, tokenizer: ServedTokenizer
) -> None:
    counter = counter or tokenizer
    text = passages()[0]
    for tokens in range(1, counter.count(text) + 5):
        kept = counter.cut(text, tokens)
        assert text.startswith(kept)
        assert kept
        assert counter.count(kept) <= tokens
        if " " in kept:
            assert not (kept[-1].isalnum() and text[len(kept) : len(kept) + 1].isalnum())
    assert counter.cut(text, counter.count(text)) == text


def test_letters_of_several_bytes_are_not_cut_apart(tokenizer: ServedTokenizer) -> None:
    text = "Größe über Grün – naïve façade, 東京の駅"
    for counter in (BYTE_ESTIMATE, tokenizer):
        assert all(text.startswith(counter.cut(text, tokens)) for tokens in range(1, 40))


def test_the_estimate_is_named_so() -> None:
    assert BYTE_ESTIMATE.count("") == 0
    assert BYTE_ESTIMATE.count("abcde") == 2
    assert BYTE_ESTIMATE.name == "estimate: bytes/4"
    assert token_counter(None) is BYTE_ESTIMATE


def test_filling_takes_texts_until_it_is_full(tokenizer: ServedTokenizer) -> None:
    text = fill(tokenizer, iter(passages()), 500)
    assert text.startswith(f"{passages()[0]}\n\n{passages()[1]}\n\n")
    assert tokenizer.count(text) == pytest.approx(500, abs=4)
    with pytest.raises(ValueError, match="the texts end"):
        fill(tokenizer, repeat("word", 3), 500)


def test_a_tokenizer_that_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer in .*tokenizer\.json does not exist"):
        token_counter(tmp_path)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer that can be read"):
        token_counter(broken)
    assert tokenizer_of(str(tmp_path)) == broken
    assert tokenizer_of(str(tmp_path / "none")) is None
