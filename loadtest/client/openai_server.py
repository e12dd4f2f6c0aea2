"""What kind of server an address leads to, and which model it serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from loadtest.offer.request_body import Dialect
from serving.core.http_get import GetError, get


class ServerError(Exception):
    """The server could not be reached, or names no model; the text names the address."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server and the model to ask for."""

    dialect: Dialect
    model: str

    def model_for(self, lane: str) -> str:
        """The model's name with the lane pinned, where there are lanes."""
        return f"{self.model}:{lane}" if lane else self.model


def find_server(
    base_url: str,
    dialect: str = "auto",
    model: str = "",
    api_key: str | None = None,
    *,
    say: Callable[[str], None],
) -> Server:
    """Ask `/v1/models` who serves what.

    Args:
        dialect: a `Dialect`, or `auto`: vLLM and Tandem say who they are in `owned_by`.
        model: empty: the first that is listed.
        say: told when a server that lists no models is taken for a plain OpenAI one.

    Raises:
        ServerError: it cannot be reached, wants another key, or lists no model where none is named.
    """
    if dialect != "auto" and model:
        return Server(Dialect(dialect), model)
    url = base_url.rstrip("/") + "/v1/models"
    try:
        first = _first_listed(url, api_key)
    except _NotListedError as error:
        if not model:
            raise ServerError(f"{error}; name one (--model)") from None
        # The model is known, so only the dialect is missing, and every server speaks this one.
        say(f"{error}; it is taken for a plain OpenAI server (--server names another kind)")
        return Server(Dialect.OPENAI, model)
    if dialect == "auto":
        owner = first.get("owned_by")
        dialect = owner if owner in list(Dialect) else Dialect.OPENAI
    return Server(Dialect(dialect), model or first["id"])


class _NotListedError(Exception):
    """The server answers, but lists no model."""


def _first_listed(url: str, api_key: str | None) -> dict[str, Any]:
    try:
        listed = json.loads(get(url, {"authorization": f"Bearer {api_key}"} if api_key else None))
    except GetError as error:
        if error.status is None:
            raise ServerError(str(error)) from None
        if error.status == HTTPStatus.UNAUTHORIZED:
            hint = "; set TANDEM_API_KEY or OPENAI_API_KEY to a key that it takes"
            raise ServerError(f"{error}{hint}") from None
        raise _NotListedError(str(error)) from None
    except ValueError as error:
        raise _NotListedError(f"{url}: cannot be read: {error}") from None
    data = listed.get("data") if isinstance(listed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    if not (isinstance(first, dict) and isinstance(first.get("id"), str)):
        raise _NotListedError(f"{url}: lists no model")
    return first
