"""Every pair of sampling options on engines that draft by both methods: no engine dies, none answers 5xx."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving import model_store
from tests.e2e.conftest import DEFAULT_CONFIG
from tests.e2e.sampling_search import OUTSIDE_A_STEP, Case, Outcome, ask, batches, cases, table
from tests.running_lab import RunningLab, running_lab

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(7200)]

SEED = 1
LANES: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    # Its own draft: each is as good as the answer itself, so the most tokens are accepted.
    "draft-model": {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "model": str(model_store.default_model_path()),
    },
}


@pytest.fixture(scope="module")
def drafting_lab() -> Iterator[RunningLab]:
    """A lane for each method."""
    model_store.prepare(print)
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    del config["gateway"]["port"]
    config["model"]["dtype"] = "float32"
    config["lanes"] = [
        {"name": name, "strategy": "speculative", "max_num_seqs": 8, "speculation": speculation}
        for name, speculation in LANES.items()
    ]
    with running_lab(config) as started:
        yield started


def all_batches() -> Iterator[tuple[Case, ...]]:
    """Each option alone, one request at a time and four mixed; then pairs.

    Four mixed: all pairs without drafts, and with drafts those that matter within a step. These at one endpoint
    one at a time too: the first step of each is without drafts.
    """
    for size in (1, 4):
        yield from batches(cases(1), size, SEED)
    pairs = cases(2)
    stepping = [one for one in pairs if one.has_drafts and not OUTSIDE_A_STEP & set(one.names)]
    yield from batches([one for one in stepping if one.path == "/v1/completions"], 1, SEED)
    yield from batches([one for one in pairs if not one.has_drafts] + stepping, 4, SEED)


def test_no_pair_of_options_breaks_an_engine(
    drafting_lab: RunningLab, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def ask_both() -> list[list[Outcome]]:
        urls = [drafting_lab.replicas(lane)[0]["url"] for lane in LANES]
        return await asyncio.gather(*(ask(url, drafting_lab.model, all_batches()) for url in urls))

    found = dict(zip(LANES, asyncio.run(ask_both()), strict=True))
    text = "\n\n".join(f"{lane}\n\n{table(outcomes)}" for lane, outcomes in found.items())
    (tmp_path / "sampling-search.md").write_text(text + "\n")
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")
    for lane, outcomes in found.items():
        assert [outcome for outcome in outcomes if outcome.is_fault] == [], lane
        assert len(outcomes) == sum(len(batch) for batch in all_batches()), lane
