"""Checkpoints of a hub, named `org/name@revision`: fetched into Hugging Face's own cache, known by their commit.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_CACHE` and `HF_HUB_OFFLINE` mean what they mean to its other programs.
Only `fetch` asks the hub; whatever else is here looks at this machine's cache.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from serving.core.errors import ConfigError, TandemError

NAME = re.compile(r"([A-Za-z0-9][\w.\-]*/[\w.\-]+)@(\w[\w.\-/]*)", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
TOKEN_VARIABLE = "HF_TOKEN"
# Without it a token's faulty characters would be quoted by the error of the library that sends it.
TOKEN = re.compile(r"[!-~]+")
# What an engine reads of a repository; `original/` holds weights again, in their makers' own form.
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
UNWANTED = ["original/*"]
SAID_SHARE = 20  # progress is said at each twentieth, so that a log has few lines of it
MIB = 2**20


class HubUnreachableError(TandemError):
    """The hub gives no answer, or none that is its own."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository at a branch, a tag or a commit."""

    repository: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether it means the same files for ever."""
        return COMMIT.fullmatch(self.revision) is not None


def hub_name(path: str) -> HubName | None:
    """What `path` names on a hub, if it does; a directory of that form is written `./org/name@revision`."""
    found = NAME.fullmatch(path)
    return HubName(found[1], found[2]) if found else None


def pinned(name: HubName) -> HubName:
    """The name with the commit that the cache has for its revision; the name itself where it has none."""
    if name.is_pinned:
        return name
    try:
        commit = (_storage(name) / "refs" / name.revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return name
    return HubName(name.repository, commit)


def directory_of(name: HubName) -> Path:
    """The checkpoint's directory, whether or not it exists yet."""
    return _storage(name) / "snapshots" / pinned(name).revision


def is_whole(name: HubName) -> bool:
    """Whether the cache has every file that an engine reads."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return lacks(os.listdir(directory)) is None


def lacks(files: Iterable[str]) -> str | None:
    """Which of the files without which there is no checkpoint is not among these."""
    names = set(files)
    if "config.json" not in names:
        return "config.json"
    return None if any(name.endswith(".safetensors") for name in names) else "*.safetensors"


def fetch(name: HubName, setting: str, say: Callable[[str], None]) -> HubName:
    """Bring what the cache lacks of a checkpoint: files that are whole are not fetched again, and a connection that
    breaks within one is taken up where it broke.

    Args:
        setting: what names it, for errors.
        say: receives what is waited for.

    Returns:
        The name with its commit.

    Raises:
        ConfigError: the hub does not have it, does not show it to this token, or there is no room for it.
        HubUnreachableError: the hub does not answer.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if name.is_pinned and is_whole(name):
        return name
    shown = f"{setting} = '{name}'"
    token = _token(shown)
    with _in_our_words(shown, name):
        api = HfApi(token=token)
        say(f"asking {_endpoint()} for {name}")
        commit = (
            name.revision if name.is_pinned else api.model_info(name.repository, revision=name.revision).sha
        )
        found = HubName(name.repository, str(commit))
        directory = directory_of(found)
        missing = {
            path: size for path, size in _sizes(api, shown, found).items() if not (directory / path).exists()
        }
        _refuse_without_room(shown, _storage(found), sum(missing.values()))
        # This alone keeps the list of files, by which a whole copy is told from half of one. It would fetch all of
        # them, in threads that Ctrl-C does not end.
        snapshot_download(
            found.repository,
            revision=found.revision,
            allow_patterns=["config.json"],
            token=token,
            tqdm_class=_bars(0, lambda _: None),
        )
        missing.pop("config.json", None)
        bars = _bars(sum(missing.values()), lambda share: say(f"fetching {name}: {share}"))
        for path in sorted(missing, key=missing.__getitem__):
            hf_hub_download(found.repository, path, revision=found.revision, token=token, tqdm_class=bars)
        # Only now: a download that ends halfway leaves the revision at the copy that is whole.
        _note_commit(name, found.revision)
    return found


def _sizes(api: Any, shown: str, name: HubName) -> dict[str, int]:
    """Sizes in bytes of what is fetched, by path.

    Raises:
        ConfigError: it makes no checkpoint.
    """
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(name.repository, revision=name.revision, recursive=True)
    sizes = {entry.path: int(entry.size) for entry in tree if isinstance(entry, RepoFile)}
    # Those in folders are other forms of the same: an engine looks at the top.
    if lack := lacks(path for path in sizes if "/" not in path):
        raise ConfigError(f"{shown}: no checkpoint that an engine reads: the repository has no {lack}")
    return {
        path: size for path, size in sizes.items() if _matches(path, WANTED) and not _matches(path, UNWANTED)
    }


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _refuse_without_room(shown: str, storage: Path, missing_bytes: int) -> None:
    """Raises: ConfigError: the cache's disk has less room than what is still to come."""
    storage.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(storage).free
    if missing_bytes > free_bytes:
        raise ConfigError(
            f"{shown}: {missing_bytes / MIB:,.0f} MiB to fetch and {free_bytes / MIB:,.0f} MiB free for {storage}; "
            "free some, or set HF_HUB_CACHE to a directory on another disk"
        )


def _token(shown: str) -> str | Literal[False]:
    """The token that the hub is shown; False for none. One that a login left in a file is not taken.

    Raises:
        ConfigError: it holds what no token does.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token and not TOKEN.fullmatch(token):
        raise ConfigError(
            f"{shown}: {TOKEN_VARIABLE} must be printable ASCII without spaces (its value is not shown)"
        )
    return token or False


@contextmanager
def _in_our_words(shown: str, name: HubName) -> Iterator[None]:
    """What Hugging Face's library raises, as the errors of `fetch`."""
    import httpx2
    from huggingface_hub import errors

    hub, has_token = _endpoint(), bool(os.environ.get(TOKEN_VARIABLE))
    own = f"{TOKEN_VARIABLE} is {'set, and is not enough' if has_token else 'not set'}"
    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigError(f"{shown}: {error}") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{shown}: {name.repository} at {hub} has no revision {name.revision!r}") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"{shown}: {hub} shows it only to accounts that were granted access on its page; {own}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{shown}: {hub} shows no repository {name.repository}: the name is wrong, or it is private; {own}"
        ) from None
    except errors.RemoteEntryNotFoundError as error:
        raise ConfigError(
            f"{shown}: {hub} lists a file that it does not have: {error.response.url.path}"
        ) from None
    except errors.HfHubHTTPError as error:
        _raise_for_status(shown, hub, error.response.status_code, own)
    except (httpx2.TransportError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise HubUnreachableError(f"{shown}: {hub} (HF_ENDPOINT) does not answer: {_cause(error)}") from None
    except errors.FileMetadataError as error:
        raise HubUnreachableError(f"{shown}: {hub} (HF_ENDPOINT) is no hub: {_cause(error)}") from None
    except OSError as error:
        if error.errno is None:  # the library's own word for a file of another size than the hub said
            raise TandemError(f"{shown}: what {hub} sent is not whole: {_cause(error)}; try again") from None
        hint = "free some room, or " if error.errno == errno.ENOSPC else ""
        raise ConfigError(
            f"{shown}: cannot be written to {_storage(name)}: {error.strerror}; {hint}set HF_HUB_CACHE to a "
            "directory that can be written"
        ) from None


def _raise_for_status(shown: str, hub: str, status: int, own: str) -> NoReturn:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise ConfigError(f"{shown}: {hub} answers {status}: it does not accept this token; {own}") from None
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
        raise HubUnreachableError(f"{shown}: {hub} (HF_ENDPOINT) answers {status}; try again later") from None
    raise ConfigError(f"{shown}: {hub} (HF_ENDPOINT) answers {status}") from None


def _cause(error: BaseException) -> str:
    """The first line of the error that lies at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _endpoint() -> str:
    """The hub's address, without a user and a password that it may hold."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _storage(name: HubName) -> Path:
    """Where the cache keeps a repository: `refs`, `snapshots` and `blobs`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="model")


def _note_commit(name: HubName, commit: str) -> None:
    if name.is_pinned:
        return
    note = _storage(name) / "refs" / name.revision
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_name(f"{note.name}.{os.getpid()}.new")
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(note)


def _bars(total_bytes: int, say: Callable[[str], None]) -> Any:
    """A class for the library's progress bars, which draws none and says how much of all files is here."""
    from tqdm import tqdm

    arrived_bytes = 0
    said = -1

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the way: with it the library has one bar a file, and counts what is here in `update`."""

        def set_transfer_postfix_str(self, text: str, refresh: bool = False) -> None:
            """How fast they come."""

        def update(self, n: float | None = 1) -> None:
            nonlocal arrived_bytes, said
            arrived_bytes += int(n or 0)
            step = SAID_SHARE * arrived_bytes // max(1, total_bytes)
            if step > said:
                said = step
                say(f"{step / SAID_SHARE:.0%} of {total_bytes / MIB:,.0f} MiB")

    return Bar
