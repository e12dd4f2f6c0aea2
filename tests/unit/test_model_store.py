"""Making the default model, with a stand-in for the conversion: what is said, what is left, what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from serving import model_store
from serving.core.errors import ConfigError, TandemError

NOISE = "Converting and de-quantizing GGUF tensors: 100%"
WRITES = 'touch "$4/config.json" "$4/model.safetensors"'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(directory))
    monkeypatch.setattr(model_store, "gguf_file", lambda: tmp_path / "model.gguf")
    return directory


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, last_line: str) -> None:
    """Instead of Python: called as `-m serving.model_store GGUF TARGET`, it prints much and ends with that line."""
    script = directory / "python"
    script.write_text(f"#!/bin/sh\necho '{NOISE}'\necho '{NOISE}' >&2\n{last_line}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def test_the_model_is_made_once_and_without_a_word_of_the_libraries(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, monkeypatch, WRITES)
    said: list[str] = []
    path = model_store.prepare(said.append)
    assert path == model_store.prepare(said.append) == model_store.resolve("auto")
    assert said == ["converting SmolLM2-135M-Instruct to a checkpoint, once (about 40 s)"]
    assert capfd.readouterr() == ("", "")
    assert list((cache / "models").iterdir()) == [path]


def test_a_conversion_that_fails_tells_the_end_of_what_it_printed_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "seq 10; echo No space left on device >&2; exit 3")
    with pytest.raises(
        TandemError, match=r"model\.gguf: the conversion failed \(exit code 3\):\n  7\n"
    ) as raised:
        model_store.prepare(print)
    assert str(raised.value).endswith("\n  No space left on device")
    assert list((cache / "models").iterdir()) == []
    with pytest.raises(ConfigError, match="run `tandem prepare`"):
        model_store.resolve("auto")


def test_a_model_that_another_process_made_meanwhile_is_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model_store.default_model_path()
    stand_in(tmp_path, monkeypatch, f'{WRITES}; mkdir -p "{target}"; cp "$4"/* "{target}"')
    assert model_store.prepare(print) == target
    assert list((cache / "models").iterdir()) == [target]


@pytest.mark.parametrize(
    "names", [(), ("config.json",), ("model.safetensors",), ("config.json", "model.gguf")]
)
def test_half_a_checkpoint_is_none(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="no checkpoint"):
        model_store.resolve(str(tmp_path))


@pytest.mark.parametrize("setting", ["n" * 300, "~nobody-here/model", "a\0b", ""])
def test_odd_paths_hold_no_checkpoint(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path = "):
        model_store.resolve(setting)


def test_the_home_directory_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_store.directory_of("~/model") == tmp_path / "model"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        model_store.prepare(print)


def test_tokenizers_are_told_apart_by_their_files_and_not_by_their_settings(tmp_path: Path) -> None:
    def directory(name: str, **files: str) -> Path:
        made = tmp_path / name
        made.mkdir()
        for file, text in files.items():
            (made / file.replace("_", ".")).write_text(text)
        return made

    one = directory("one", tokenizer_json="a", vocab_json="x")
    same = directory("same", tokenizer_json="a", chat="template")
    other = directory("other", tokenizer_json="b")
    halves = directory("halves", vocab_json="x")
    digest = model_store.tokenizer_digest
    assert digest(one) == digest(same) != digest(other) != ""
    assert digest(halves) == ""
    (halves / "merges.txt").write_text("y")
    assert digest(halves) != ""
