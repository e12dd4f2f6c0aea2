"""Options of vLLM's own and an EAGLE-3 head on the real engine: asked about before a start, in effect after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serving import model_store
from serving.core import engine_options
from serving.core.speculation import SpeculationCounts
from serving.metrics import names
from serving.metrics.reading import samples_of
from tests.e2e.conftest import DEFAULT_CONFIG
from tests.running_lab import RunningLab, free_port, running_lab, tandem

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LANE = "learned"
MAX_LOGPROBS = 3
NUM_DRAFTS = 2


def learned_lane(**engine_args: Any) -> dict[str, Any]:
    return {
        "name": LANE,
        "strategy": "speculative",
        "max_num_seqs": 4,
        "engine_args": engine_args,
        "speculation": {"method": "eagle3", "model": "auto", "num_speculative_tokens": NUM_DRAFTS},
    }


@pytest.fixture(scope="module")
def learned() -> Iterator[RunningLab]:
    """A lab with one lane, which has options of vLLM's own and a head."""
    model_store.prepare(print)
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    del config["gateway"]["port"]
    config["model"]["dtype"] = "float32"
    config["lanes"] = [learned_lane(max_logprobs=MAX_LOGPROBS, **{"max-num-batched-tokens": "4k"})]
    with running_lab(config) as started:
        yield started


def drafts(lab: RunningLab) -> SpeculationCounts:
    (replica,) = lab.replicas(LANE)
    page = httpx.get(f"{replica['url']}/metrics", timeout=10).text
    wanted = (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_TOKENS)
    found = {sample.name: int(sample.value) for sample in samples_of(page, wanted)}
    return SpeculationCounts(*(found[name] for name in wanted))


def test_an_option_is_in_effect_and_on_the_pages(learned: RunningLab) -> None:
    body = {"model": learned.model, "prompt": "Once upon a time", "max_tokens": 2, "logprobs": MAX_LOGPROBS}
    assert learned.post("/v1/completions", body).status_code == 200
    refused = learned.post("/v1/completions", body | {"logprobs": MAX_LOGPROBS + 1})
    assert refused.status_code == 400, refused.text
    (replica,) = learned.get("/lab")["replicas"]
    assert {f"--max-logprobs={MAX_LOGPROBS}", "--max-num-batched-tokens=4k"} <= set(replica["arguments"])


def test_a_head_drafts_as_many_tokens_as_the_lane_says(learned: RunningLab) -> None:
    before = drafts(learned)
    body = {
        "model": f"{learned.model}:{LANE}",
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = learned.post("/v1/completions", body | {"ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 8
    drafted = drafts(learned) - before
    assert drafted.num_drafts > 0
    assert drafted.draft_tokens == NUM_DRAFTS * drafted.num_drafts


@pytest.mark.parametrize("verb", ["up", "doctor"])
def test_what_vllm_refuses_is_named_with_its_words_and_starts_nothing(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    lanes = [
        learned_lane(max_logprobs="many", no_such_option=1, max_num_batched=4096),
        learned_lane(enable_chunked_prefill=False, max_num_batched_tokens=100) | {"name": "small"},
        learned_lane() | {"name": "odd"},
    ]
    lanes[2]["speculation"] |= {"method": "telepathy"}
    path.write_text(yaml.safe_dump({"gateway": {"port": free_port()}, "lanes": lanes}))
    done = tandem(
        verb, "--config", str(path), environment={**os.environ, "TANDEM_STATE": str(tmp_path)}, limit_s=120
    )
    assert done.returncode == (2 if verb == "up" else 1)
    said = done.stdout + done.stderr
    for part in (
        'lanes[learned].engine_args.max_logprobs = "many": vLLM refuses it: argument --max-logprobs: invalid int',
        "lanes[learned].engine_args.no_such_option = 1: vLLM refuses it: unrecognized arguments: --no-such",
        # The beginning of a name is not the name, or an option that the lab sets could be given by it.
        "lanes[learned].engine_args.max_num_batched = 4096: vLLM refuses it: unrecognized arguments",
        'lanes[small]: vLLM refuses engine_args = {"enable_chunked_prefill": false, "max_num_batched_tokens": 1',
        "max_num_batched_tokens (100) is smaller than max_model_len",
        'lanes[odd]: vLLM refuses speculation = {"method": "telepathy"',
    ):
        assert part in said
    assert not (tmp_path / "lab.json").exists()


ALIASES = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps([[o[2:] for o in a.option_strings if o.startswith("--")] for a in actions if a.option_strings]))
"""


def test_no_other_name_of_vllms_gives_what_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", ALIASES], capture_output=True, text=True, check=True)
    options: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert sum(map(len, options)) > 100
    refused = [{bool(engine_options.faults({name: "x"})) for name in aliases} for aliases in options]
    assert [aliases for aliases, verdicts in zip(options, refused, strict=True) if len(verdicts) > 1] == []
    known = {name for aliases in options for name in aliases}
    assert engine_options.REFUSED.keys() <= known, "refused, and no option of vLLM's any more"
