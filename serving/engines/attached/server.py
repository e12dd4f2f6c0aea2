"""What the lab asks of a server that somebody else runs: whether it is well, what it serves, what it cannot do."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from serving.config import LaneConfig
from serving.core.errors import MAX_SHOWN_CHARS, TandemError
from serving.core.lane import AttachedServer, EngineFacts
from serving.core.server_key import server_key
from serving.core.sse import EventSplitter, parse_event

LOOK_TIMEOUT_S = 5.0
TRY_TIMEOUT_S = 120.0  # of a generation of `TRY_TOKENS`, on a server that may have others
MAX_PAGE_BYTES = 16 * 1024 * 1024
MAX_MODEL_CHARS = 1024  # of a name, as of `served_model`; it goes into each request
TRY_TOKENS = 24  # more than the natural answer to `QUESTION` has
CACHED_TOKENS = re.compile(rb'"cached_tokens": ?(\d{1,18})')
NOT_THERE = (404, 405, 501)
DEFAULT_HEALTH, MODELS, VERSION = "/health", "/v1/models", "/version"
# A server that goes on beyond its natural answer knows `min_tokens`.
QUESTION = "Answer with one word: what is the capital of France?"
TRIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}]},
    "/v1/completions": {"prompt": QUESTION},
}
# What the load tool asks for.
ENGINE_OPTIONS = {"min_tokens": TRY_TOKENS, "ignore_eos": True, "cache_salt": "tandem"}
USAGE_OPTIONS = {"stream_options": {"include_usage": True}}
ALL_OPTIONS = USAGE_OPTIONS | ENGINE_OPTIONS
VLLM_PREFIX = b"\nvllm:"  # of the names that dashboards and reports read


class ServerError(TandemError):
    """A server cannot serve; the text says why, and which setting to look at."""


class NoCompletionError(ServerError):
    """It is well, and gave no completion. What it was asked for may cost its owner something."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of its model.

    Attributes:
        model: its own name of it.
        owner: who serves it, as the server says; `unknown` when it does not.
        max_model_len: tokens, prompt and answer together; None when it does not say.
    """

    model: str
    owner: str = "unknown"
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """A server that is well: where its health is asked, and what it serves."""

    health: str
    served: Served
    lacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """A server that has answered a generation, and all that was found out by it."""

    health: str
    server: AttachedServer
    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class TriedStream:
    """What came of a stream: its status and how a refusal begins, whether it ended well, and its usage.

    Attributes:
        output_tokens: None without usage.
        cached_tokens: of the prompt, from an earlier request; 0 where the server does not say.
    """

    status: int
    said: str = ""
    is_whole: bool = False
    output_tokens: int | None = None
    cached_tokens: int = 0


class ServerClient:
    """Asks one server, with the lab's key for it; redirects are not followed, and no proxy stands in between.

    Raises:
        ConfigError: the key's environment variable is not set, or no header can carry it.
    """

    def __init__(self, lane: LaneConfig, url: str) -> None:
        self.url = url
        self._lane = lane
        self._setting = f"lanes[{lane.name}].urls"
        self._key_setting = f"lanes[{lane.name}].api_key_env"
        self._key = server_key(lane.api_key_env, self._key_setting)
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        # Each question has a connection of its own: llama.cpp promises to keep one, and closes it after a stream.
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),  # a server could fill another, second by second
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    # Its state

    async def look(self) -> Looked:
        """Whether it is well and what it serves; costs it no generation.

        Raises:
            ServerError: it cannot serve.
        """
        lacks: tuple[str, ...] = ()
        health = self._lane.health
        if health is None:
            health = DEFAULT_HEALTH
            status, _ = await self.get(DEFAULT_HEALTH)
            if status in NOT_THERE:
                health = MODELS
                lacks = (f"{DEFAULT_HEALTH} answers {status}: {MODELS} is asked instead, which says less",)
        if why := await self.fault(health):
            raise ServerError(why)
        return Looked(health, await self._served(), lacks)

    async def fault(self, health: str) -> str | None:
        """What its health check says against it; None when it is well."""
        try:
            status, body = await self.get(health)
        except ServerError as error:
            return str(error)
        if status == 200:
            return None
        return self._refused(status) or f"{health} answered {status}: {self._quoted(body)}"

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a page.

        Raises:
            ServerError: it does not answer, not in time, or with too much.
        """
        return await self._ask("GET", path, None, LOOK_TIMEOUT_S)

    async def _served(self) -> Served:
        wanted, setting = self._lane.served_model, f"lanes[{self._lane.name}].served_model"
        status, body = await self.get(MODELS)
        if why := self._refused(status):
            raise ServerError(why)
        if status in NOT_THERE and wanted is not None:
            return Served(wanted)
        if status != 200:
            raise ServerError(f"{MODELS} answered {status}, so its model is not known: set {setting}")
        served = served_models(body)
        if wanted is None and len(served) == 1:
            return served[0]
        for one in served:
            if one.model == wanted:
                return one
        names = ", ".join(one.model for one in served) or "no model"
        if wanted is None:
            raise ServerError(f"it serves {names:.300}: say which, with {setting}")
        raise ServerError(f"it serves {names:.300}, and not {setting} = {wanted!r}")

    # What it can do

    async def examine(self) -> Examined:
        """Look at it, and let it write a few tokens in each way, for what it cannot do.

        Raises:
            ServerError: it cannot serve; `NoCompletionError` where it gives no completion of either kind.
        """
        looked = await self.look()
        lacks, refusals = list(looked.lacks), []
        takes_stream_options: bool | None = None
        for path, prompt in TRIES.items():
            body = prompt | {"model": looked.served.model}
            if takes_stream_options is None:
                options, tried = await self._best(path, body)
            else:  # what it takes is known; a token shows whether the path is there
                tried = await self._try(path, body | (USAGE_OPTIONS if takes_stream_options else {}), 1)
            if not tried.is_whole:
                refusals.append(f"POST {path} answered {tried.status}: {tried.said}")
            elif takes_stream_options is None:
                takes_stream_options = USAGE_OPTIONS.items() <= options.items()
                again = tried
                if options == ALL_OPTIONS:
                    # `min_tokens` without `ignore_eos`, and the same prompt under a salt that is new.
                    other = {"min_tokens": TRY_TOKENS, "cache_salt": secrets.token_hex(8)}
                    again = await self._try(path, body | USAGE_OPTIONS | other)
                lacks += lacks_of(options, tried, again)
        if takes_stream_options is None:
            raise NoCompletionError("; ".join(refusals))
        lacks += await self._metrics_lacks()
        server = AttachedServer(self.url, looked.served.model, takes_stream_options)
        version = f"{looked.served.owner} {await self._version()}".strip()
        facts = EngineFacts(
            "openai", version, has_model=True, device="unknown", dtype="unknown", lacks=(*lacks, *refusals)
        )
        return Examined(looked.health, server, facts)

    async def _metrics_lacks(self) -> list[str]:
        try:
            status, body = await self.get(self._lane.metrics)
        except ServerError as error:  # no reason to send it no requests
            return [f"GET {self._lane.metrics}: {error}: dashboards show no figure of its own"]
        if status == 200 and VLLM_PREFIX in body:
            return []
        what = "has none of vLLM's names" if status == 200 else f"answered {status}"
        return [f"GET {self._lane.metrics} {what}: dashboards show no figure of its own"]

    async def _best(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], TriedStream]:
        """The first stream that is answered well, of those with ever fewer options; else the last."""
        tried = TriedStream(0)
        for options in (ALL_OPTIONS, USAGE_OPTIONS, ENGINE_OPTIONS, {}):
            tried = await self._try(path, body | options)
            if tried.is_whole:
                return options, tried
            if tried.status in NOT_THERE:
                break
        return {}, tried

    async def _try(self, path: str, body: dict[str, Any], num_tokens: int = TRY_TOKENS) -> TriedStream:
        asked = body | {"max_tokens": num_tokens, "temperature": 0, "stream": True}
        status, answer = await self._ask("POST", path, asked, TRY_TIMEOUT_S)
        if why := self._refused(status):
            raise ServerError(why)
        if status != 200:
            return TriedStream(status, self._quoted(answer))
        raw = EventSplitter().feed(answer + b"\n\n")
        events = [parse_event(event) for event in raw]
        error = next((event.error for event in events if event.error), None)
        tokens = [event.output_tokens for event in events if event.output_tokens is not None]
        is_whole = error is None and any(event.is_done or event.finished for event in events)
        said = self._quoted((error or "no whole stream").encode())
        cached = max(map(_cached_tokens, raw), default=0)
        return TriedStream(status, said, is_whole, tokens[-1] if tokens else None, cached)

    async def _version(self) -> str:
        """What `/version` says, where it is; vLLM has it."""
        try:
            status, body = await self.get(VERSION)
            version = json.loads(body)["version"] if status == 200 else ""
        except (ServerError, ValueError, KeyError, TypeError, RecursionError):
            return ""  # few servers have it, and nothing depends on it
        return version[:MAX_SHOWN_CHARS] if isinstance(version, str) and version.isprintable() else ""

    # Asking

    async def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await _bounded(response.content)
        except TimeoutError:
            raise ServerError(f"{path} was not answered within {timeout_s:g} s ({self._setting})") from None
        except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError):
            # aiohttp quotes what the server sent, which may be the key that it was shown, or a part of it.
            raise ServerError(f"{path}: the answer is no HTTP that can be read ({self._setting})") from None
        except (aiohttp.ClientError, OSError) as error:
            # aiohttp's own text of a refused connection tells of its settings.
            why = getattr(error, "strerror", None) or error
            raise ServerError(f"cannot be reached: {why} ({self._setting})") from None

    def _refused(self, status: int) -> str | None:
        """Why a status of no page in particular says that it will not serve us."""
        if status in (401, 403):
            if self._key is None:
                return f"answered {status}: it asks for an API key ({self._key_setting})"
            variable = self._lane.api_key_env
            return f"answered {status}: it refuses the API key ({self._key_setting} = {variable!r})"
        if 300 <= status < 400:
            return f"answered {status}: redirects are not followed ({self._setting})"
        return None

    def _quoted(self, said: bytes) -> str:
        """How an answer begins, in one line; a server may quote the key it was shown."""
        if self._key:  # before anything is cut, which could leave a part of it
            said = said.replace(self._key.encode(), b"[key]")
        text = " ".join(said[:4096].decode(errors="replace").split())
        return "".join(char if char.isprintable() else "?" for char in text[:MAX_SHOWN_CHARS])


def served_models(body: bytes) -> list[Served]:
    """The models of a `/v1/models` page.

    Raises:
        ServerError: it is no such page.
    """
    try:
        entries = json.loads(body)["data"]
        return [Served(_model(entry["id"]), _owner(entry), _length(entry)) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ServerError(f"{MODELS} is no list of models: this is no server of the OpenAI API") from None


def _model(given: Any) -> str:
    name = str(given)
    if len(name) > MAX_MODEL_CHARS or not name.isprintable():
        raise ServerError(
            f"{MODELS} names a model of {len(name)} characters; it must be printable and have {MAX_MODEL_CHARS} "
            "at most"
        )
    return name


def _owner(entry: dict[str, Any]) -> str:
    owner = str(entry.get("owned_by") or "unknown")
    return owner[:MAX_SHOWN_CHARS] if owner.isprintable() else "unknown"


def _length(entry: dict[str, Any]) -> int | None:
    meta = entry.get("meta")  # llama.cpp's, with what one of its slots holds
    length = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return length if isinstance(length, int) and length > 0 else None


def _cached_tokens(event: bytes) -> int:
    """Tokens of the prompt that the server says it had from an earlier request; 0 where it says nothing."""
    found = CACHED_TOKENS.search(event)
    return int(found[1]) if found else 0


def lacks_of(options: dict[str, Any], tried: TriedStream, again: TriedStream) -> list[str]:
    """What a server does not do, by streams that it has answered well.

    Args:
        options: those that it took; with more it refused.
        again: the same prompt without `ignore_eos` and under a salt that is new, where it took all options.
    """
    lacks = []
    if not USAGE_OPTIONS.items() <= options.items():
        lacks.append("streams that ask for usage are refused: tokens of streams are not counted")
    elif tried.output_tokens is None:
        lacks.append("no usage in streams: their tokens are not counted")
    if not ENGINE_OPTIONS.items() <= options.items():
        lacks.append(f"{', '.join(ENGINE_OPTIONS)} are refused, and `tandem bench` sends them")
    elif _is_short(tried):
        lacks.append("neither min_tokens nor ignore_eos is kept: answers are shorter than asked for")
    elif _is_short(again):
        lacks.append("min_tokens is not kept without ignore_eos: answers are shorter than asked for")
    if again.cached_tokens > 0:
        lacks.append("cache_salt is not kept: a run finds prompts of earlier ones in the server's cache")
    return lacks


def _is_short(tried: TriedStream) -> bool:
    return tried.output_tokens is not None and tried.output_tokens < TRY_TOKENS


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    body = bytearray()
    async for block in content.iter_any():
        body += block
        if len(body) > MAX_PAGE_BYTES:
            raise ServerError(f"an answer is longer than {MAX_PAGE_BYTES} bytes")
    return bytes(body)


async def look_at(lane: LaneConfig) -> dict[str, Looked | str]:
    """Each server of a lane, looked at once, all at the same time: what was found, or why it cannot serve.

    Raises:
        ConfigError: as `ServerClient`.
    """

    async def look(url: str) -> Looked | str:
        async with ServerClient(lane, url) as client:
            try:
                return await client.look()
            except ServerError as error:
                return str(error)

    return dict(zip(lane.urls, await asyncio.gather(*map(look, lane.urls)), strict=True))
