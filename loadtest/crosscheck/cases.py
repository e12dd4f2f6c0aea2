"""What the tools are asked to measure: the load, what the engine does, and who else wants the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Profile:
    """What the engine does; 64 tokens then take 2.8 s at one token a chunk, 0.9 s at four."""

    tokens_per_chunk: int
    ttft_ms: float = 300
    step_ms: float = 40

    @property
    def title(self) -> str:
        unit = "token" if self.tokens_per_chunk == 1 else "tokens"
        return f"TTFT {self.ttft_ms:g} ms, {self.tokens_per_chunk} {unit} each {self.step_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Case:
    """One load. All four tools offer Poisson arrivals at a rate, so that is what each case is.

    Attributes:
        rate_per_s: times the 2.86 s of an answer that is the number of streams open on average.
        requests: of each tool, per profile; the engine remembers its last 1,024 streams.
        busy_processes: that want a core each all the time, beside the tool.
        judged_by: what our figures must be: within tolerance of the truth or, where tools are pressed, the closest
            or a tie. An engine with many streams sees a request late, which is in all TTFTs but its own.
    """

    name: str
    rate_per_s: float
    requests: int
    busy_processes: int = 0
    judged_by: Literal["tolerance", "closest"] = "closest"
    profiles: tuple[Profile, ...] = (Profile(tokens_per_chunk=1),)
    output_tokens: int = OUTPUT_TOKENS
    prompt_tokens: int = PROMPT_TOKENS

    def title(self, profile: Profile, seed: int) -> str:
        beside = f", beside {self.busy_processes} busy processes" if self.busy_processes else ""
        return (
            f"{self.name}: {profile.title}; {self.requests} requests of {self.output_tokens} tokens, "
            f"Poisson {self.rate_per_s:g} requests/s, seed {seed}{beside}"
        )


CASES = (
    Case(
        "light",
        4,
        80,
        judged_by="tolerance",
        profiles=(Profile(tokens_per_chunk=1), Profile(tokens_per_chunk=4)),
    ),
    Case("streams", 90, 1000),  # 90/s x 2.86 s: 256 open on average
    Case("busy", 4, 80, busy_processes=2),
)
