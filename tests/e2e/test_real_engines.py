"""The main job on the real engine and the real model."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import names
from tests.running_lab import LOOPBACK, RunningLab, tandem, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LANES = ["sequential", "batched", "speculative"]
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def vllm_counter(lab: RunningLab, lane: str, name: str) -> float:
    """A sample of the engine's own metrics, summed over its labels."""
    (replica,) = lab.replicas(lane)
    text = httpx.get(f"{replica['url']}/metrics", timeout=10).text
    samples = [
        one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name
    ]
    assert samples, f"{name} is not exported by lane {lane}"
    return sum(sample.value for sample in samples)


def test_the_model_knows_the_capital_of_france(lab: RunningLab) -> None:
    answer = lab.client().chat.completions.create(
        model=lab.model, messages=CAPITAL, max_tokens=16, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_the_same_greedy_answer_from_all_lanes(lab: RunningLab) -> None:
    prompt = "Repeat exactly: The ferry leaves at nine, and the ferry comes back at noon."
    answers = {}
    for lane in LANES:
        answer = lab.client().chat.completions.create(
            model=f"{lab.model}:{lane}",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=48,
            temperature=0,
        )
        answers[lane] = answer.choices[0].message.content
    assert len(answers["batched"] or "") > 20
    assert set(answers.values()) == {answers["batched"]}
    assert vllm_counter(lab, "speculative", names.VLLM_ACCEPTED_TOKENS) > 0, "speculation was really on"


def test_eight_requests_on_the_sequential_lane_never_overlap(lab: RunningLab) -> None:
    before = len(lab.engine("sequential")["finished"])

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=f"{lab.model}:sequential", messages=CAPITAL, max_tokens=8, temperature=0
                    )
                    for _ in range(8)
                )
            )

    answers = asyncio.run(ask_all())
    assert len(answers) == 8
    engine = lab.engine("sequential")
    assert engine["most_running"] == 1
    finished = sorted(engine["finished"][before:], key=lambda request: float(request["started_at_s"]))
    assert len(finished) == 8
    for earlier, later in pairwise(finished):
        assert later["started_at_s"] >= earlier["ended_at_s"]


def test_the_batched_lane_does_overlap(lab: RunningLab) -> None:
    """The test above could see an overlap: here is one."""

    async def ask_all() -> None:
        async with openai.AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(
                *(
                    client.completions.create(
                        model=f"{lab.model}:batched", prompt="Once upon a time", max_tokens=24
                    )
                    for _ in range(4)
                )
            )

    asyncio.run(ask_all())
    engine = lab.engine("batched")
    assert engine["most_running"] >= 2
    last = sorted(engine["finished"][-4:], key=lambda request: float(request["started_at_s"]))
    assert any(later["started_at_s"] < earlier["ended_at_s"] for earlier, later in pairwise(last))


@pytest.mark.parametrize("lane", LANES)
def test_a_stream_holds_all_tokens_by_usage(lab: RunningLab, lane: str) -> None:
    chunks = list(
        lab.client().chat.completions.create(
            model=f"{lab.model}:{lane}",
            messages=CAPITAL,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": 24, "ignore_eos": True},
        )
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_stops_the_engine(lab: RunningLab, lane: str, is_stream: bool) -> None:
    body = {
        "model": f"{lab.model}:{lane}", "prompt": "Count: 1, 2, 3,", "max_tokens": 1500, "ignore_eos": True,
        "stream": is_stream,
    }  # fmt: skip
    with httpx.Client(timeout=3.0) as client:
        if is_stream:
            with client.stream("POST", f"{lab.url}/v1/completions", json=body) as answer:
                chunks = answer.iter_bytes()  # httpx closes the response when this iterator is dropped
                next(chunks)
                wait_until(lambda: vllm_counter(lab, lane, names.VLLM_RUNNING) == 1, "the engine runs it")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{lab.url}/v1/completions", json=body)
    wait_until(lambda: vllm_counter(lab, lane, names.VLLM_RUNNING) == 0, "the engine stops", limit_s=10)
    wait_until(lambda: lab.get("/scheduler")["leases"] == 0, "the lease is released")


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"messages": "not a list"}, 400),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400),
        ({"max_tokens": -4}, 400),
        ({"temperature": "hot"}, 400),
        ({"temperature": -1}, 400),
        ({"stream_options": {"include_usage": True}}, 400),
        ({"n": 0}, 400),
        ({"min_tokens": 50, "max_tokens": 5}, 400),
        ({"messages": []}, 400),
        ({"top_p": 7}, 400),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nope"}},
                }
            },
            400,
        ),
        ({"logprobs": True, "top_logprobs": 1000}, 400),
        ({"stream": "maybe"}, 400),
    ],
)
def test_bad_requests_are_refused_with_the_error_object_and_the_engine_lives_on(
    lab: RunningLab, extra: dict[str, Any], status: int
) -> None:
    body = {"model": f"{lab.model}:batched", "messages": CAPITAL, "max_tokens": 4} | extra
    answer = lab.post("/v1/chat/completions", body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert lab.client().chat.completions.create(model=f"{lab.model}:batched", messages=CAPITAL, max_tokens=2)


def test_options_that_speculation_refuses_go_elsewhere_unless_pinned(lab: RunningLab) -> None:
    body = {"model": lab.model, "messages": CAPITAL, "max_tokens": 4, "min_p": 0.1}
    for _ in range(6):
        answer = lab.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-tandem-lane"] == "batched"
    pinned = lab.post("/v1/chat/completions", body | {"model": f"{lab.model}:speculative"})
    assert pinned.status_code == 400
    assert "min_p" in pinned.json()["error"]["message"]


def test_nothing_listens_beyond_the_loopback(lab: RunningLab) -> None:
    assert lab.listening_addresses() <= LOOPBACK


def test_a_three_point_bench_reports_every_figure(lab: RunningLab, tmp_path: Path) -> None:
    done = tandem(
        "bench", "--base-url", lab.url, "--lanes", "batched,speculative", "--workloads", "copy",
        "--concurrency", "1,2,4", "--output-tokens", "16", "--name", "e2e", "--runs-dir", str(tmp_path),
        environment=lab.environment,
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: INVALID, as on busy cores
    (run,) = [entry for entry in tmp_path.iterdir() if entry.is_dir() and not entry.is_symlink()]
    summary = json.loads((run / "summary.json").read_text())
    points = {(stage["lane"], stage["workload"], stage["load"]["users"]) for stage in summary["stages"]}
    assert points == {(lane, "copy", level) for lane in ("batched", "speculative") for level in (1, 2, 4)}
    for stage in summary["stages"]:
        assert stage["failures"] == 0
        assert stage["output_tokens_per_s"]["value"] > 0
        for figure in ("ttft_s", "tpot_s", "e2e_s"):
            assert 0 < stage[figure]["p50"]["value"] <= stage[figure]["p95"]["value"]
        if stage["lane"] == "speculative":
            assert 0 < stage["acceptance_rate"] <= 1
            assert 1 < stage["mean_acceptance_length"] <= 5
        else:
            assert stage["acceptance_rate"] is None
    for key in ("machine", "versions", "seed", "config"):
        assert summary["run"][key] is not None
    rows = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    measured = [row for row in rows if not row["label"]["is_warmup"] and not row["label"]["is_tail"]]
    assert len(measured) == sum(stage["requests"] for stage in summary["stages"])
    assert all(row["output_tokens"] == 16 for row in measured)
    figures = sorted(picture.name for picture in (run / "figures").glob("*.png"))
    assert len(figures) >= 5, figures
    page = (run / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") or lab.url in page
    for figure in figures:
        assert figure.removesuffix(".png") in page


def engine_core(lab: RunningLab, lane: str) -> psutil.Process:
    """The engine's own process: the replica's child beside Python's resource tracker.

    Not by its title: setting one fails where the first environment variable was changed.
    """
    (replica,) = lab.replicas(lane)
    children = {child: " ".join(child.cmdline()) for child in lab.process_behind(replica["url"]).children()}
    cores = [child for child, line in children.items() if "resource_tracker" not in line]
    assert len(cores) == 1, f"children of {replica}: {children}"
    return cores[0]


def test_an_engine_that_dies_takes_its_replica_out_at_once(lab: RunningLab) -> None:
    """The others go on; and the lane comes back by itself."""
    core = engine_core(lab, "batched")
    body = {"model": f"{lab.model}:batched", "prompt": "Count: 1, 2,", "max_tokens": 1000, "stream": True}
    with httpx.stream(
        "POST", f"{lab.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        core.kill()
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "upstream_broke"
    assert "data: [DONE]" not in rest
    wait_until(lambda: not lab.replicas("batched"), "the replica has left the scheduler", limit_s=2)
    short = {"prompt": "Once", "max_tokens": 3}
    assert lab.post("/v1/completions", short | {"model": lab.model}).status_code == 200
    pinned = lab.post("/v1/completions", short | {"model": f"{lab.model}:batched"})
    assert (pinned.status_code, pinned.headers["x-tandem-reason"]) == (503, "no_replica_ready")
    wait_until(lambda: bool(lab.replicas("batched")), "the lane has a new replica", limit_s=300)
    assert lab.post("/v1/completions", short | {"model": f"{lab.model}:batched"}).status_code == 200


@pytest.mark.parametrize(
    "odd",
    [
        {"messages": ["SECRET-PROMPT"]},
        {"messages": CAPITAL, "temperature": "SECRET-PROMPT"},
    ],
)
@pytest.mark.parametrize("lane", LANES)
def test_no_refusal_repeats_what_the_client_wrote(lab: RunningLab, lane: str, odd: dict[str, Any]) -> None:
    answer = lab.post("/v1/chat/completions", {"model": f"{lab.model}:{lane}", "max_tokens": 3} | odd)
    assert answer.status_code == 400, answer.text
    assert any(field in answer.text for field in ("messages", "temperature")), "it names the field"
    assert "SECRET-PROMPT" not in answer.text
    logs = Path(lab.environment["TANDEM_STATE"]).rglob("*.log")
    assert not [log.name for log in logs if "SECRET-PROMPT" in log.read_text(errors="replace")]


@pytest.mark.parametrize("odd", [{"top_k": 10**30}, {"stop": "\ud800"}, {"temperature": float("nan")}])
def test_what_no_engine_can_take_is_the_clients_mistake(lab: RunningLab, odd: dict[str, Any]) -> None:
    body = json.dumps({"model": lab.model, "prompt": "Once", "max_tokens": 3} | odd)
    answer = httpx.post(f"{lab.url}/v1/completions", content=body, timeout=60)
    assert answer.status_code == 400, answer.text
