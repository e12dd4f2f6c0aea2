"""Keys on a running lab: who is let in, and that no key is left anywhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loadtest.client.traced_lab import Question, find_lab
from tests.running_lab import tandem
from tests.security.conftest import ENVIRONMENT_KEY, FILE_KEY, LockedLab

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WRONG_KEY = "wrong-6f1c0f6a2d9b4e7791d3"
LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
ALL_KEYS = tuple(key.encode() for key in (FILE_KEY, ENVIRONMENT_KEY, WRONG_KEY))


def with_a_key(directory: Path) -> list[Path]:
    """Files below a directory that hold any of the keys."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files, f"nothing in {directory}"
    return [path for path in files if any(key in path.read_bytes() for key in ALL_KEYS)]


@pytest.mark.parametrize("key", [FILE_KEY, ENVIRONMENT_KEY])
def test_the_openai_client_comes_in_with_a_key(lab: LockedLab, key: str) -> None:
    answer = lab.client(key).chat.completions.create(model="sim", messages=HELLO, max_tokens=3)
    assert answer.choices[0].message.content == "simulated " * 3
    chunks = lab.client(key).completions.create(model="sim", prompt="once", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "simulated " * 3


def test_the_openai_client_raises_authentication_error_without(lab: LockedLab) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        lab.client(WRONG_KEY).chat.completions.create(model="sim", messages=HELLO)
    assert caught.value.code == "invalid_api_key"
    assert WRONG_KEY not in str(caught.value)
    with pytest.raises(openai.AuthenticationError):
        lab.client(WRONG_KEY).models.list()


def test_pages_need_a_key_and_show_none(lab: LockedLab) -> None:
    assert httpx.get(f"{lab.url}/health").status_code == 200
    for path in ("/v1/models", "/lab", "/scheduler", "/targets", "/docs", "/nothing"):
        answer = httpx.get(f"{lab.url}{path}")
        assert (answer.status_code, answer.headers["x-tandem-reason"]) == (401, "invalid_api_key"), path
    headers = {"authorization": f"Bearer {FILE_KEY}"}
    for path in ("/lab", "/scheduler", "/targets"):
        answer = httpx.get(f"{lab.url}{path}", headers=headers)
        assert answer.status_code == 200
        assert not any(key in answer.content for key in ALL_KEYS), path
    config = httpx.get(f"{lab.url}/lab", headers=headers).json()["config"]
    assert config["gateway"]["api_keys_file"] == str(lab.key_file)


def test_refusals_are_counted_by_reason(lab: LockedLab) -> None:
    headers = {"authorization": f"Bearer {FILE_KEY}"}
    assert httpx.get(f"{lab.url}/lab", headers={"authorization": f"Bearer {WRONG_KEY}"}).status_code == 401
    (address,) = (
        group["targets"][0]
        for group in httpx.get(f"{lab.url}/targets", headers=headers).json()
        if group["labels"]["role"] == "gateway"
    )
    counted = re.search(
        r'^tandem_requests_total\{lane="",outcome="rejected",reason="invalid_api_key"\} (\d+)',
        httpx.get(f"http://{address}/metrics").text,
        re.MULTILINE,
    )
    assert counted is not None
    assert int(counted[1]) >= 1


@pytest.mark.parametrize(
    "verb",
    [
        ("status", "--json"),
        ("watch", "--once", "--json"),
        ("trace", "--seconds", "0.5", "--out", "trace.json"),
        ("bench", "--out", "run"),
        ("sweep", "--slo", "ttft_p95<2s", "--out", "run"),
        ("lesson", "--out", "lesson.html"),
    ],
    ids=lambda verb: verb[0],
)
def test_a_verb_without_a_key_says_what_is_wanted(
    lab: LockedLab, verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = tandem(*verb, environment=lab.environment(None))
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "TANDEM_API_KEY" in refused.stdout + refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_status_and_watch_show_the_key(lab: LockedLab) -> None:
    environment = lab.environment(FILE_KEY)
    status = tandem("status", "--json", environment=environment)
    assert (status.returncode, json.loads(status.stdout)["state"]) == (0, "ready")
    watched = tandem("watch", "--once", "--seconds", "1", "--json", environment=environment)
    assert watched.returncode == 0, watched.stderr
    assert FILE_KEY not in status.stdout + watched.stdout


def test_the_lesson_asks_with_the_key(lab: LockedLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", FILE_KEY)
    traced = find_lab(lab.url).ask([Question("batched", {"prompt": "once"}, 4)])
    assert sum(step.emitted_tokens for step in traced.answers[0].steps) == 4


def test_a_run_and_a_trace_hold_no_key(lab: LockedLab, tmp_path: Path) -> None:
    environment = lab.environment(FILE_KEY)
    plan = ("--workloads", "story", "--concurrency", "2", "--output-tokens", "8", "--max-stage-s", "60")
    ran = tandem(
        "bench", *plan, "--no-ceiling", "--out", str(tmp_path / "run"), environment=environment, limit_s=120
    )
    assert ran.returncode in (0, 5), ran.stdout + ran.stderr  # 5: INVALID, as on busy cores
    rows = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert {json.loads(row)["outcome"] for row in rows} == {"completed"}
    traced = tandem(
        "trace", "--seconds", "0.5", "--out", str(tmp_path / "run" / "trace.json"), environment=environment
    )
    assert traced.returncode == 0, traced.stderr
    assert with_a_key(tmp_path) == []
    assert FILE_KEY not in ran.stdout + ran.stderr + traced.stdout + traced.stderr


@pytest.mark.parametrize(
    ("environment", "is_let_in"),
    [
        ({"TANDEM_API_KEY": FILE_KEY, "OPENAI_API_KEY": WRONG_KEY}, True),
        ({"OPENAI_API_KEY": FILE_KEY}, True),
        ({"OPENAI_API_KEY": WRONG_KEY}, False),
    ],
)
def test_locust_sends_a_key_and_writes_none(
    lab: LockedLab, environment: dict[str, str], is_let_in: bool, tmp_path: Path
) -> None:
    load = ("--load", "constant:10/s,1s", "--users", "1", "--output-tokens", "4")
    files = ("--csv", "out", "--html", "out.html")
    # The model is named, so that it is the requests that are refused.
    options = ("--headless", "--server", "tandem", "--model", "sim", *load, *files)
    ran = subprocess.run(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", lab.url, *options],
        cwd=tmp_path, env=lab.environment(None) | environment, capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    said = ran.stdout + ran.stderr
    assert (ran.returncode == 0) is is_let_in, said.decode()
    assert (b"invalid_api_key" in said) is not is_let_in
    assert ("TTFT" in (tmp_path / "out_stats.csv").read_text()) is is_let_in
    assert ("invalid_api_key" in (tmp_path / "out_failures.csv").read_text()) is not is_let_in
    assert with_a_key(tmp_path) == []
    assert not any(key in said for key in ALL_KEYS)


def test_logs_and_state_hold_no_key(lab: LockedLab) -> None:
    httpx.get(f"{lab.url}/lab", headers={"authorization": f"Bearer {WRONG_KEY}"})
    httpx.get(f"{lab.url}/lab", headers={"authorization": f"Bearer {FILE_KEY}"})
    assert with_a_key(Path(lab.running.environment["TANDEM_STATE"])) == []
    commands = [argument for process in lab.running.processes() for argument in process.cmdline()]
    sessions = {found[0] for argument in commands if (found := re.search(r"/\S+/session_[\d_-]+", argument))}
    assert len(sessions) == 1, "Ray's session, by its processes' arguments"
    assert with_a_key(Path(sessions.pop()) / "logs") == []
    assert not any(key.decode() in argument for key in ALL_KEYS for argument in commands)
