"""The same model with more attention heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deploy.more_heads.__main__ import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_says_the_same_with_more_heads(checkpoint: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    assert main(["--model", str(checkpoint), "--heads", "12", "--out", str(wide)]) == 0
    config = json.loads((wide / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (12, 4, 4)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before, after = (LlamaForCausalLM.from_pretrained(path)(ids).logits for path in (checkpoint, wide))
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [3, 6, 10])
def test_heads_come_in_whole_groups(
    checkpoint: Path, tmp_path: Path, heads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(checkpoint), "--heads", str(heads), "--out", str(tmp_path / "wide")]) == 2
    assert f"--heads {heads}: must be above its 6 heads, in groups of 3" in capsys.readouterr().err
    assert not (tmp_path / "wide").exists()
