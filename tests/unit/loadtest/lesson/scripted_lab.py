"""A lab of one process that answers as a lab does, computes nothing, and notes what it is asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from serving.tracing.events import Attempt, Phase, RequestSpan, StepEvent, TracedReplica

STRATEGIES = ("sequential", "batched", "speculative")
PROMPT_IDS = [7, 8, 9]
FIRST_TOKEN_ID = 100


@dataclass
class ScriptedLab:
    """What it should do, and what happened.

    Attributes:
        refuses: status of every completion, instead of an answer.
        clock_offset_ns: added to the instants of steps, as on another machine.
        models: of strategies whose lane has another model than the lab's.
        drafts: tokens drafted in each decode step; all but the last one are accepted.
        schedules_ahead: one step more for each request, which brings nothing.
        cuts_streams: they end without `[DONE]`.
        asked: bodies of completions, each with its path and `x-request-id`.
        started, stopped: recordings, by strategy; `queries` of those that were started.
        refuses_recordings: status of every recording, instead of one.
        cut_off_events: how many of the events that it names do not come.
        others, others_emit: requests that somebody else sends meanwhile, and the tokens of a step of each.
    """

    strategies: tuple[str, ...] = STRATEGIES
    refuses: int = 0
    leases: int = 0
    lost_events: int = 0
    clock_offset_ns: int = 0
    drafts: dict[str, int] = field(default_factory=lambda: {"speculative": 3})
    schedules_ahead: bool = False
    models: dict[str, dict[str, str]] = field(default_factory=dict)
    cuts_streams: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    recording_bodies: list[bytes] = field(default_factory=list)
    refuses_recordings: int = 0
    cut_off_events: int = 0
    others: int = 0
    others_emit: int = 1
    spans: list[RequestSpan] = field(default_factory=list)
    events: dict[str, list[StepEvent]] = field(default_factory=dict)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> Any:
        if path == "/scheduler":
            return {"leases": self.leases, "waiting": 0}
        if path == "/targets":
            return [{"targets": [self.url.removeprefix("http://")], "labels": {"role": "gateway"}}]
        if path.startswith("/tandem/spans"):
            return {"gateway_id": "g", "is_complete": True, "spans": msgspec.to_builtins(self.spans)}
        model = {"name": "tiny", "path": "/nowhere", "max_model_len": 2048}
        lanes = [
            {"name": f"{one}-lane", "strategy": one, "max_num_seqs": 16, "model": self.models.get(one)}
            for one in self.strategies
        ]
        facts = {"engine": "vllm", "engine_version": "vllm 1", "dtype": "float32", "device": "cpu"}
        replicas = [
            facts
            | {
                "replica": f"{one}-1",
                "lane": f"{one}-lane",
                "strategy": one,
                "url": f"{self.url}/replica/{one}",
            }
            for one in self.strategies
        ]
        return {"config": {"model": model, "lanes": lanes}, "replicas": replicas}

    def record(self, path: str) -> bytes:
        _, _, strategy, *rest = path.split("/")
        if rest[-1].startswith("start"):
            self.started.append(strategy)
            self.queries.append(rest[-1])
            self.events[strategy] = []
            return b'{"recording": 1}'
        self.stopped.append(strategy)
        found = self.events.pop(strategy)
        found += [
            replace(found[0], request_id=f"other-{number}", emitted_tokens=self.others_emit)
            for number in range(self.others)
        ]
        lane = f"{strategy}-lane"
        replica = TracedReplica(f"{strategy}-1", lane, strategy, "vllm", len(found), self.lost_events)
        kept = found[: len(found) - self.cut_off_events]
        return msgspec.json.Encoder().encode_lines([replica, *kept])

    def complete(self, path: str, request_id: str, body: dict[str, Any]) -> Any:
        """Noted as a prompt's step and steps of a microsecond behind it, all in the past by then."""
        with self.lock:
            self.asked.append(body | {"path": path, "request_id": request_id})
            lane = body["model"].partition(":")[2]
            now_ns = time.monotonic_ns()
            attempt = Attempt(request_id, now_ns, lane=lane)
            self.spans.append(RequestSpan("g", request_id, request_id, now_ns, (attempt,)))
            strategy = body["model"].partition(":")[2].removesuffix("-lane")
            asked = body.get("prompt")
            prompt: list[int] = asked if isinstance(asked, list) else PROMPT_IDS
            events = self.events[strategy]
            made = [FIRST_TOKEN_ID]
            events.append(self._step(events, strategy, request_id, len(prompt), (), made[:1], Phase.PREFILL))
            while len(made) < body["max_tokens"]:
                drafts = self.drafts.get(strategy, 0)
                accepted = max(0, drafts - 1)
                room = body["max_tokens"] - len(made)
                fresh = [FIRST_TOKEN_ID + len(made) + place for place in range(1 + accepted)][:room]
                drafted = [*(FIRST_TOKEN_ID + len(made) + place for place in range(accepted)), 5][:drafts]
                events.append(
                    self._step(
                        events,
                        strategy,
                        request_id,
                        1 + drafts,
                        tuple(drafted),
                        fresh,
                        Phase.DECODE,
                        accepted,
                    )
                )
                made += fresh
            if self.schedules_ahead:
                events.append(self._step(events, strategy, request_id, 1, (), [], Phase.DECODE))
        choice: dict[str, Any] = {"text": "x" * len(made)}
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": PROMPT_IDS, "token_ids": made}
            choice |= {"logprobs": {"token_logprobs": [-0.5] * len(made)}}
        if "prompt_logprobs" in body:
            scored = [{str(token): {"logprob": -0.25}} for token in prompt[1:]]
            choice |= {"prompt_logprobs": [None, *scored]}
        return {"choices": [choice]}

    def _step(
        self,
        events: list[StepEvent],
        strategy: str,
        request_id: str,
        scheduled: int,
        drafted: tuple[int, ...],
        emitted: list[int],
        phase: Phase,
        accepted: int = 0,
    ) -> StepEvent:
        now_ns = time.monotonic_ns()
        while time.monotonic_ns() == now_ns:
            pass  # a step lasts, however coarse the clock
        started_ns, ended_ns = now_ns + self.clock_offset_ns, time.monotonic_ns() + self.clock_offset_ns
        return StepEvent(
            f"{strategy}-1", len(events) + 1, started_ns, ended_ns, f"cmpl-{request_id}-0", phase, scheduled,
            len(drafted), accepted, len(emitted), drafted or None, tuple(emitted),
        )  # fmt: skip


@contextmanager
def scripted_lab(lab: ScriptedLab) -> Iterator[ScriptedLab]:
    """Serve it on a free port of the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, json.dumps(lab.get(self.path)).encode())

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            if self.path.startswith("/replica/"):
                lab.recording_bodies.append(raw)
                if lab.refuses_recordings:
                    self._answer(lab.refuses_recordings, b'{"error": "another one goes on"}')
                else:
                    self._answer(200, lab.record(self.path))
            elif lab.refuses:
                self._answer(lab.refuses, b'{"error": "no"}')
            else:
                body = json.loads(raw)
                said = json.dumps(lab.complete(self.path, self.headers["x-request-id"], body)).encode()
                if body.get("stream"):
                    said = b"data: " + said + (b"" if lab.cuts_streams else b"\n\ndata: [DONE]\n\n")
                self._answer(200, said)

        def _answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    lab.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield lab
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
