"""What a Ray cluster is told of the run whose lab it carries, and what a run may stop there by it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Self


@dataclass(frozen=True)
class Record:
    """Which run deployed.

    Attributes:
        run_id: its mark.
        starts_serve: there was no Serve before, or only one that an earlier run had started.
        serve: the Serve that the lab is in, as its controller's id; None until the run has started it.
    """

    run_id: str
    starts_serve: bool
    serve: str | None

    def has_lab(self, serve_now: str | None) -> bool:
        """Whether the lab is in that Serve. After `serve shutdown` one of the same name is somebody else's."""
        return serve_now is not None and self.serve == serve_now

    def owns_serve(self, serve_now: str | None) -> bool:
        """Whether Serve is there for labs' sake, as long as no other application is in it."""
        return self.starts_serve and self.serve in (None, serve_now)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        given = json.loads(text)
        # Another release on the same cluster may write more.
        return cls(**{each.name: given[each.name] for each in fields(cls)})

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def claimed(run_id: str, before: Record | None, serve_now: str | None) -> Record:
    """The record of a run that is about to deploy where no lab is.

    Args:
        before: what an earlier run left.
    """
    starts_serve = serve_now is None or (before is not None and before.owns_serve(serve_now))
    return Record(run_id, starts_serve, serve_now)
