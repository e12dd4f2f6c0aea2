"""Asks the installed vLLM about lanes whose settings only it can judge, before anything starts.

Its import takes seconds and reads the environment, so it is asked in a process of its own, with the variables that
an engine gets, and only when a lane gives `engine_args`, or a speculation that is not known here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from serving import machine, model_store
from serving.config import LabConfig, LaneConfig
from serving.core import engine_options
from serving.core.errors import MAX_SHOWN_CHARS
from serving.engines.vllm import choose_device, choose_dtype, command_line, environment
from serving.progress import Say

LIMIT_S = (
    300  # of an import and a checkpoint's config.json for each lane, on a machine that does other things too
)

Ask = Callable[[list[dict[str, Any]], dict[str, str]], list[list[str]]]


class NoAnswerError(Exception):
    """vLLM could not be asked; the text says why."""


@dataclass(frozen=True, slots=True)
class Question:
    """What vLLM is asked of one lane.

    Attributes:
        lane: how faults name it.
        arguments: all that its engine gets; `base` are those without `engine_args`.
        engine_args: each key, its value as faults show it, and its words on the command line.
        given: what of the lane only vLLM can judge, as faults show it.
        has_checkpoint: whether the model is there, and its draft; else vLLM is asked about names and values only.
    """

    lane: str
    arguments: list[str]
    base: list[str]
    engine_args: list[tuple[str, str, list[str]]]
    given: str
    has_checkpoint: bool


def lanes_to_ask_about(config: LabConfig) -> list[LaneConfig]:
    """Lanes whose settings only vLLM can judge."""
    return [
        lane
        for lane in config.lanes
        if lane.engine == "vllm"
        and (lane.engine_args or (lane.speculation is not None and lane.speculation.needs_vllm))
    ]


def faults(config: LabConfig, say: Say, ask: Ask | None = None) -> list[str]:
    """What vLLM refuses of the lanes, a line each with key, value and its words; does nothing when none need it.

    Args:
        ask: puts questions to vLLM in an environment; by default in a process of its own.
    """
    if not (lanes := lanes_to_ask_about(config)):
        return []
    say(f"asking vLLM about the options of {', '.join(lane.name for lane in lanes)}")
    variables = os.environ | environment(lanes[0], config.model)
    try:
        answers = (ask or _ask)([asdict(_question(lane, config)) for lane in lanes], variables)
    except NoAnswerError as error:
        return [
            f"vLLM cannot be asked about the options of {', '.join(lane.name for lane in lanes)}: {error}"
        ]
    return [fault for answer in answers for fault in answer]


def _question(lane: LaneConfig, config: LabConfig) -> Question:
    model = config.model_of(lane)
    directory = model_store.directory_of(model.path)

    def arguments(of: LaneConfig) -> list[str]:
        device = choose_device(model)
        dtype = choose_dtype(model, device, machine.instruction_sets())
        return command_line(of, model, directory, [model.name], device, dtype)

    engine_args = lane.engine_args or {}
    given = {"engine_args": engine_args} if engine_args else {}
    if lane.speculation is not None:
        given["speculation"] = lane.speculation.model_dump(mode="json", exclude_unset=True)
    draft = None if lane.speculation is None else lane.speculation.draft_path
    return Question(
        lane=f"lanes[{lane.name}]",
        arguments=arguments(lane),
        base=arguments(lane.model_copy(update={"engine_args": None, "speculation": None})),
        engine_args=[
            (key, _shown(value), engine_options.as_arguments(key, value))
            for key, value in engine_args.items()
        ],
        given=", ".join(f"{key} = {_shown(value)}" for key, value in given.items()),
        has_checkpoint=all(map(model_store.is_here, filter(None, (model.path, draft)))),
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _ask(questions: list[dict[str, Any]], variables: dict[str, str]) -> list[list[str]]:
    """Raises: NoAnswerError: vLLM is not installed, or its process ends or lasts too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "serving.engines.vllm_arguments"],
            env=variables,
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {LIMIT_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise NoAnswerError(f"its process ended with exit code {done.returncode}: {last}")
    answers: list[list[str]] = json.loads(done.stdout)
    return answers
