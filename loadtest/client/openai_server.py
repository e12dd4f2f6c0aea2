"""What kind of server an address leads to, and which model it serves."""

from __future__ import annotations

import json
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


def find_server(base_url: str, dialect: str = "auto", model: str = "", api_key: str | None = None) -> Server:
    """Ask `/v1/models` who serves what.

    Args:
        dialect: a `Dialect`, or `auto`: vLLM and Tandem say who they are in `owned_by`.
        model: empty: the first that is listed.

    Raises:
        ServerError: it cannot be reached, or lists no model.
    """
    if dialect != "auto" and model:
        return Server(Dialect(dialect), model)
    url = base_url.rstrip("/") + "/v1/models"
    listed = _get(url, api_key)
    data = listed.get("data") if isinstance(listed, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    if not (isinstance(first, dict) and isinstance(first.get("id"), str)):
        raise ServerError(f"{url}: lists no model; name one (--model)")
    if dialect == "auto":
        owner = first.get("owned_by")
        dialect = owner if owner in list(Dialect) else Dialect.OPENAI
    return Server(Dialect(dialect), model or first["id"])


def _get(url: str, api_key: str | None) -> Any:
    try:
        return json.loads(get(url, {"authorization": f"Bearer {api_key}"} if api_key else None))
    except GetError as error:
        hint = "" if error.status is None else "; name the model (--model)"
        if error.status == HTTPStatus.UNAUTHORIZED:
            hint = "; set TANDEM_API_KEY or OPENAI_API_KEY to a key that it takes"
        raise ServerError(f"{error}{hint}") from None
    except ValueError as error:
        raise ServerError(f"{url}: cannot be read: {error}") from None
