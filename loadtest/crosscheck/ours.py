"""Our client, in a process of its own: one Poisson stage of `tandem bench`, from its ceiling to its judgement.

`python -m loadtest.crosscheck.ours RUN_DIR URL RATE REQUESTS PROMPT_TOKENS OUTPUT_TOKENS SEED TOKENIZER` leaves
the files of a run in RUN_DIR. It differs from a run on a lab in what a bare engine has not: no `/lab` that says
what it is, no gateway whose counts could be compared with the client's.
"""

# Before all others: it imports Locust, which patches what the modules below import.
from loadtest.bench import job  # isort: skip

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.bench.job import Job
from loadtest.bench.stage import run_stages
from loadtest.crosscheck.tools import SERVED_NAME
from loadtest.offer.load import constant_rate
from loadtest.run.plan import Plan, StagePlan
from serving.core.lane import Strategy

MODEL, LANE = SERVED_NAME.split(":")
WORKLOAD = "story"
SPARE = 2.0  # the schedule is so much longer than its requests should take: it must hold them all


def make_plan(
    url: str,
    rate_per_s: float,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: int,
    tokenizer: str,
) -> Plan:
    """The first `requests` of a Poisson schedule."""
    load = constant_rate(rate_per_s, SPARE * requests / rate_per_s + SPARE)
    return Plan(
        base_url=url,
        model=MODEL,
        stages=(StagePlan(LANE, WORKLOAD, load, requests),),
        name="crosscheck",
        seed=seed,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        tokenizer=tokenizer,
    )


def main(plan: Plan, directory: Path) -> None:
    directory.mkdir()
    description: dict[str, Any] = {
        "config": {"lanes": [{"name": LANE, "strategy": Strategy.BATCHED}]},
        "model": {"name": MODEL, "path": MODEL, "dtype": "none", "device": "none"},
        "replicas": [],
    }
    info = job.first_info(plan, directory, datetime.now(UTC), description)
    with job.running(Job(plan, directory, info), with_ceiling=True) as going:
        going.bench.warm_up_s[LANE] = 0.0  # no warm-up: the engine's first request is each tool's first
        for measured in run_stages(going.bench, plan.stages):
            going.keep(measured.stage)


if __name__ == "__main__":
    where, url, rate, requests, prompt, output, seed, tokenizer = sys.argv[1:]
    main(
        make_plan(url, float(rate), int(requests), int(prompt), int(output), int(seed), tokenizer),
        Path(where),
    )
