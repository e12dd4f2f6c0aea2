"""Models of a hub, from a stand-in on the loopback: what comes, what is not asked for twice, what is refused."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from serving import hub, model_store
from serving.core.errors import ConfigError
from serving.hub import HubName, HubUnreachableError
from tests.stand_in_hub import Repository, StandInHub, stand_in_hub

NAME = "someone/model"
WEIGHTS = "model.safetensors"
COMMIT = "c" * 40
TOKEN = "hf_not-to-be-seen-0123456789"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    directory = tmp_path / "repository"
    (directory / "original").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / WEIGHTS).write_bytes(os.urandom(300_000))
    (directory / "pytorch_model.bin").touch()
    (directory / "original" / WEIGHTS).touch()
    return Repository(directory)


@pytest.fixture
def running(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub with one repository, and a cache of its own. The library reads its variables when it is imported."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # of what has come when a connection breaks
    monkeypatch.setattr(
        "huggingface_hub.file_download.time.sleep", lambda _: None
    )  # it waits before it tries again
    with stand_in_hub({NAME: repository}) as one:
        monkeypatch.setattr(constants, "ENDPOINT", one.url)
        template = f"{one.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield one


def fetch(name: str = f"{NAME}@main", said: list[str] | None = None) -> HubName:
    parsed = hub.hub_name(name)
    assert parsed is not None
    return hub.fetch(parsed, "model.path", (said if said is not None else []).append)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/name@main", HubName("org/name", "main")),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", HubName("Qwen/Qwen2.5-0.5B", "refs/pr/1")),
        ("org/name", None),
        ("./org/name@main", None),
        ("/models/org/name@main", None),
        ("~/name@main", None),
        ("org/name@", None),
        ("org/name@../main", None),
        ("auto", None),
    ],
)
def test_a_hubs_name_has_a_revision_and_a_directory_has_none(path: str, name: HubName | None) -> None:
    assert hub.hub_name(path) == name


def test_what_an_engine_reads_comes_once_and_with_progress(running: StandInHub) -> None:
    said: list[str] = []
    found = fetch(said=said)
    assert found == HubName(NAME, COMMIT)
    directory = hub.directory_of(HubName(NAME, "main"))
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert said[0] == f"asking {running.url} for {NAME}@main"
    assert said[1].startswith(f"fetching {NAME}@main: ")
    assert said[-1] == f"fetching {NAME}@main: 100% of 0 MiB"
    assert model_store.resolve(f"{NAME}@main") == model_store.resolve(f"{NAME}@{COMMIT}") == directory
    asked = len(running.asked)
    assert fetch(f"{NAME}@{COMMIT}") == found
    assert len(running.asked) == asked, "a commit that is here needs no hub"


def test_files_come_in_the_thread_that_ctrl_c_interrupts(running: StandInHub) -> None:
    threads: list[threading.Thread] = []
    parsed = hub.hub_name(f"{NAME}@main")
    assert parsed is not None
    hub.fetch(parsed, "model.path", lambda _: threads.append(threading.current_thread()))
    assert len(threads) > 2
    assert set(threads) == {threading.main_thread()}


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    running: StandInHub, repository: Repository
) -> None:
    repository.breaks[WEIGHTS] = 2
    fetch()
    first, second, third = running.fetched(WEIGHTS)
    starts = [int((one or "bytes=0-").removeprefix("bytes=").rstrip("-")) for one in (first, second, third)]
    assert starts[0] == 0 < starts[1] < starts[2]
    there = (hub.directory_of(HubName(NAME, "main")) / WEIGHTS).read_bytes()
    assert there == (repository.directory / WEIGHTS).read_bytes()


def test_a_download_that_ended_halfway_goes_on_with_the_files_that_are_missing(
    running: StandInHub, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.breaks[WEIGHTS] = 1000
    with pytest.raises(HubUnreachableError, match="does not answer: peer closed connection"):
        fetch()
    with pytest.raises(
        ConfigError, match=r"model\.path = 'someone/model@main': no checkpoint .*`tandem prepare`"
    ):
        model_store.resolve(f"{NAME}@main")
    repository.breaks.clear()
    fetch()
    assert model_store.is_here(f"{NAME}@main")
    assert len(running.fetched("config.json")) == len(running.fetched("tokenizer.json")) == 1


def test_what_another_program_fetched_of_it_is_no_checkpoint(running: StandInHub) -> None:
    directory = hub.directory_of(HubName(NAME, COMMIT))
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text("{}")
    refs = directory.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert not model_store.is_here(f"{NAME}@main")
    fetch()
    assert model_store.is_here(f"{NAME}@main")
    assert running.fetched("tokenizer.json") == [], "it is here"


def test_a_branch_that_moves_is_followed_when_asked_and_the_copy_stays_whole_until_then(
    running: StandInHub, repository: Repository
) -> None:
    fetch()
    repository.commit = "d" * 40
    repository.listed_only = ("gone.json",)
    with pytest.raises(ConfigError, match=r"lists a file that it does not have: .*/gone\.json"):
        fetch()
    assert model_store.pinned(f"{NAME}@main") == f"{NAME}@{COMMIT}"
    assert model_store.is_here(f"{NAME}@main")
    repository.commit, repository.listed_only = "e" * 40, ()
    assert fetch() == HubName(NAME, repository.commit)
    assert model_store.pinned(f"{NAME}@main") == f"{NAME}@{repository.commit}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/nothing@main", "shows no repository someone/nothing: .* private; HF_TOKEN is not set"),
        (f"{NAME}@v2", "someone/model at http://127.0.0.1:[0-9]+ has no revision 'v2'"),
        ("some--one/model@main", "Cannot have -- or .. in repo_id"),
    ],
)
def test_what_a_hub_does_not_have_is_named(name: str, words: str, running: StandInHub) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path = '{name}': .*{words}"):
        fetch(name)


@pytest.mark.parametrize("lack", ["config.json", WEIGHTS])
def test_a_repository_without_a_checkpoint_is_refused_before_anything_comes(
    lack: str, running: StandInHub, repository: Repository
) -> None:
    (repository.directory / lack).unlink()
    missing = "config.json" if lack == "config.json" else r"\*.safetensors"
    with pytest.raises(ConfigError, match=f"the repository has no {missing}"):
        fetch()
    assert not any("/resolve/" in path for _, path, _, _ in running.asked)


@pytest.mark.parametrize(
    ("is_gated", "shown", "words"),
    [
        (True, "", "only to accounts that were granted access on its page; HF_TOKEN is not set"),
        (True, "hf_wrong-0123456789", "granted access on its page; HF_TOKEN is set, and is not enough"),
        (False, "", "the name is wrong, or it is private; HF_TOKEN is not set"),
        (False, "hf_wrong-0123456789", "HF_TOKEN is set, and is not enough"),
        (
            False,
            "hf_two\nlines",
            r"HF_TOKEN must be printable ASCII without spaces \(its value is not shown\)",
        ),
    ],
)
def test_a_token_that_is_not_enough_is_said_and_not_shown(
    is_gated: bool,
    shown: str,
    words: str,
    running: StandInHub,
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", shown)
    repository.token, repository.is_gated = TOKEN, is_gated
    with pytest.raises(ConfigError, match=words) as raised:
        fetch()
    assert not shown or shown not in str(raised.value)


def test_the_right_token_opens_and_is_in_no_log(
    running: StandInHub,
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    repository.token, repository.breaks = TOKEN, {WEIGHTS: 1}
    said: list[str] = []
    fetch(said=said)
    assert {one[3] for one in running.asked if "/resolve/" in one[1]} == {f"Bearer {TOKEN}"}
    assert "Trying to resume" in caplog.text + "".join(capfd.readouterr())
    assert TOKEN not in caplog.text + "".join(capfd.readouterr()) + "".join(said)


def test_a_token_that_a_login_left_in_a_file_is_not_sent(
    running: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    fetch()
    assert {one[3] for one in running.asked} == {None}


def test_a_disk_without_room_is_said_before_anything_comes(
    running: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"0 MiB to fetch and 0 MiB free for .*HF_HUB_CACHE"):
        fetch()
    assert not any("/resolve/" in path for _, path, _, _ in running.asked)


def test_a_cache_that_cannot_be_written_is_named(
    running: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plain-file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "plain-file" / "cache"))
    with pytest.raises(
        ConfigError, match=r"cannot be written to .*plain-file.*: Not a directory; set HF_HUB_CACHE"
    ):
        fetch()


@pytest.mark.parametrize("is_here", [False, True])
@pytest.mark.parametrize("how", ["nobody listens", "503", "offline"])
def test_a_hub_that_does_not_answer_is_named_with_its_setting(
    how: str, is_here: bool, running: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_here:
        fetch()
    if how == "nobody listens":
        monkeypatch.setattr(constants, "ENDPOINT", "http://user:secret@127.0.0.1:9")
    elif how == "503":
        running.is_down = True
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        HubUnreachableError, match=r"^model\.path = '.*': http://127.* \(HF_ENDPOINT\)"
    ) as raised:
        fetch()
    assert "secret" not in str(raised.value)
    assert model_store.is_here(f"{NAME}@main") is is_here
