"""What a sweep is asked to find, and how. Kept in its directory, so that it can go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from loadtest.client.record import faults_in_words
from loadtest.judge.capacity import SearchSettings
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import Process
from loadtest.run.plan import MAX_ERROR_RATE
from loadtest.sweep.stages import CapacitySweep, ProbeLength

SWEEP_FILE = "sweep.json"
MIN_EXPECTED = 3.0  # requests of the longest probe: of fewer, a share says nothing
START_S = 30.0  # ceiling, warm-up, scrapes and report, besides the searches


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """The same settings and the same measurements make the same probes.

    Attributes:
        slo: the objective, in the form `loadtest.judge.slo` reads.
        first_rate_per_s: where each search begins, requests/s.
        resolution, repeats: as in `SearchSettings`.
        probe_s: shortest time that a rate is offered; three times as long is the longest.
        probe_requests: fewest requests of a probe, as far as the longest time allows.
        output_tokens: length of an answer; None: the workload's own.
        request_timeout_s, max_error_rate, needs_done: as in `loadtest.run.plan.Plan`.
        seed: of prompts and arrivals.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    lanes: tuple[str, ...]
    workload: str
    slo: str
    process: Process
    first_rate_per_s: float
    resolution: float
    repeats: int
    probe_s: float
    probe_requests: int
    output_tokens: int | None
    seed: int
    request_timeout_s: float | None = None
    max_error_rate: float = MAX_ERROR_RATE
    needs_done: bool = False

    @property
    def length(self) -> ProbeLength:
        return ProbeLength(self.probe_s, self.probe_requests, 3 * self.probe_s)

    def search(self, max_minutes: float) -> SearchSettings:
        """Of each lane, in a sweep that may take so long."""
        return SearchSettings(
            first_rate_per_s=self.first_rate_per_s,
            lowest_rate_per_s=min(self.first_rate_per_s, MIN_EXPECTED / self.length.most_s),
            resolution=self.resolution,
            repeats=self.repeats,
            max_s=max(1.0, (60 * max_minutes - START_S) / len(self.lanes)),
        )

    def sweep(self, max_minutes: float) -> CapacitySweep:
        return CapacitySweep(
            self.lanes,
            self.workload,
            parse_slo(self.slo),
            self.search(max_minutes),
            self.length,
            process=self.process,
            output_tokens=self.output_tokens,
            seed=self.seed,
        )

    def refuse_others(self, directory: Path, given: Mapping[str, Any], options: Mapping[str, str]) -> None:
        """Refuse settings that are not those of the sweep in `directory`.

        Args:
            given: what is asked for now, by the names of these attributes; what is not in it may be anything.
            options: the command's option for each.

        Raises:
            ValueError: with both values of each that differs.
        """
        own = asdict(self)
        different = [
            f"{options[name]} was {_shown(own[name])}, is {_shown(value)}"
            for name, value in given.items()
            if value != own[name]
        ]
        if different:
            raise ValueError(
                f"{directory}: the sweep was made with other settings: {'; '.join(different)}; "
                "leave them out to go on with its own"
            )


_ADAPTER = TypeAdapter(SweepSettings)


def write_settings(settings: SweepSettings, directory: Path) -> None:
    (directory / SWEEP_FILE).write_bytes(_ADAPTER.dump_json(settings, indent=1) + b"\n")


def read_settings(directory: Path) -> SweepSettings:
    """The settings of the sweep in `directory`.

    Raises:
        ValueError: the file is missing or not as it should be; the text names it.
    """
    path = directory / SWEEP_FILE
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; is this the directory of a sweep?"
        ) from None
    except ValidationError as error:
        raise ValueError(f"{path}: {faults_in_words(error)}") from None


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else f"{value}"
