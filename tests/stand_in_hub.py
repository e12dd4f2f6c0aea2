"""A hub on the loopback that speaks the few routes by which `huggingface_hub` fetches a repository."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.running_lab import free_port

CHUNK_BYTES = 65536


@dataclass
class Repository:
    """What the hub has of one model.

    Attributes:
        breaks: for a path, how often a connection breaks in the middle of what was asked for.
        listed_only: paths that are listed and not there.
        token: the only one that is shown it; None: all see it.
        is_gated: whether whoever has no token is told that it exists.
    """

    directory: Path
    commit: str = "c" * 40
    branches: tuple[str, ...] = ("main",)
    breaks: dict[str, int] = field(default_factory=dict)
    listed_only: tuple[str, ...] = ()
    token: str | None = None
    is_gated: bool = False

    def files(self) -> dict[str, Path]:
        found = {
            str(path.relative_to(self.directory)): path
            for path in self.directory.rglob("*")
            if path.is_file()
        }
        return found | {name: self.directory / name for name in self.listed_only}


@dataclass
class StandInHub:
    """A hub that runs; `asked` has each request as (method, path, bytes asked for, authorization)."""

    url: str
    repositories: dict[str, Repository]
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    is_down: bool = False  # whether it answers 503 to everything

    def fetched(self, file: str) -> list[str | None]:
        """The ranges in which a file was asked for."""
        return [one[2] for one in self.asked if one[0] == "GET" and one[1].endswith(f"/{file}")]


def _refused(status: int, code: str) -> Response:
    return JSONResponse({"error": code}, status, headers={"X-Error-Code": code, "X-Error-Message": code})


def _app(hub: StandInHub) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Response:
        headers = request.headers
        hub.asked.append(
            (request.method, request.url.path, headers.get("range"), headers.get("authorization"))
        )
        if hub.is_down:
            return Response(status_code=503)
        answer: Response = await call_next(request)
        return answer

    def find(request: Request, name: str, revision: str) -> Repository | Response:
        repository = hub.repositories.get(name)
        authorization = request.headers.get("authorization")
        if repository is None:
            return _refused(404, "RepoNotFound")
        if repository.token is not None and authorization != f"Bearer {repository.token}":
            if repository.is_gated:
                return _refused(403, "GatedRepo")
            return _refused(404, "RepoNotFound") if authorization is None else Response(status_code=401)
        if revision not in (*repository.branches, repository.commit):
            return _refused(404, "RevisionNotFound")
        return repository

    @app.get("/api/models/{org}/{name}/revision/{revision:path}")
    async def info(request: Request, org: str, name: str, revision: str) -> Any:
        found = find(request, f"{org}/{name}", revision)
        if isinstance(found, Response):
            return found
        return {"id": f"{org}/{name}", "sha": found.commit, "siblings": []}

    @app.get("/api/models/{org}/{name}/tree/{revision:path}")
    async def tree(request: Request, org: str, name: str, revision: str) -> Any:
        found = find(request, f"{org}/{name}", revision.strip("/"))
        if isinstance(found, Response):
            return found
        return [
            {
                "type": "file",
                "path": path,
                "size": file.stat().st_size if file.exists() else 1,
                "oid": _oid(path),
            }
            for path, file in found.files().items()
        ]

    @app.api_route("/{org}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    async def file(request: Request, org: str, name: str, revision: str, path: str) -> Any:
        found = find(request, f"{org}/{name}", revision)
        if isinstance(found, Response):
            return found
        source = found.directory / path
        if not source.is_file():
            return _refused(404, "EntryNotFound")
        size = source.stat().st_size
        start = (
            int(asked.removeprefix("bytes=").rstrip("-")) if (asked := request.headers.get("range")) else 0
        )
        headers = {
            "ETag": f'"{_oid(path)}"',
            "X-Repo-Commit": found.commit,
            "Content-Length": str(size - start),
        }
        if asked:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        if request.method == "HEAD":
            return Response(headers=headers)
        end = size
        if found.breaks.get(path, 0) > 0:
            found.breaks[path] -= 1
            end = start + (size - start) // 2
        return StreamingResponse(_part(source, start, end), 206 if asked else 200, headers=headers)

    return app


def _part(source: Path, start: int, end: int) -> Iterator[bytes]:
    """The file's bytes; fewer than were announced end the connection."""
    with source.open("rb") as opened:
        opened.seek(start)
        while start < end:
            chunk = opened.read(min(CHUNK_BYTES, end - start))
            start += len(chunk)
            yield chunk


def _oid(path: str) -> str:
    return hashlib.sha1(path.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def stand_in_hub(repositories: dict[str, Repository]) -> Iterator[StandInHub]:
    """Run a hub that has these, by `org/name`."""
    port = free_port()
    hub = StandInHub(f"http://127.0.0.1:{port}", repositories)
    server = uvicorn.Server(
        uvicorn.Config(_app(hub), host="127.0.0.1", port=port, log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run, name="hub", daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the hub does not start"
        time.sleep(0.01)
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join()
