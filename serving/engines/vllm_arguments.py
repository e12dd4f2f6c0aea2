"""What vLLM makes of arguments of `vllm serve`, and the child process that asks it before an engine starts.

Run as a module it reads a JSON list of `Question`s and writes a list of faults for each. It imports vLLM, which
takes seconds, so nothing imports this module before it is needed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

# What vLLM raises for settings it does not take; a speculation method may need a package.
REFUSALS = (ValueError, TypeError, ImportError, RuntimeError, AssertionError, OSError)


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which would end the process, and take the beginning of an option's name for the option."""

    def __init__(self) -> None:
        super().__init__(allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: list[str]) -> Namespace:
    """Raises: one of `REFUSALS`, with vLLM's words."""
    args: Namespace = make_arg_parser(_Parser()).parse_args(arguments)
    if args.model_tag is not None:  # what is left over of a list that an option of one value was given
        raise ValueError(f"one value is wanted; {args.model_tag!r} is one too many")
    validate_parsed_serve_args(args)
    return args


def configure(args: Namespace) -> Any:
    """vLLM's own settings of an engine. Reads the checkpoint's config.json, and that of a draft.

    Raises: one of `REFUSALS`, with vLLM's words.
    """
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def words_of(error: BaseException) -> str:
    """A refusal in one line. pydantic's say the same three times and link to its own pages."""
    if callable(entries := getattr(error, "errors", None)):
        return "; ".join(
            ": ".join([*map(str, entry["loc"]), str(entry["msg"]).removeprefix("Value error, ")])
            for entry in entries()
        )
    return " ".join(str(error).split())


def answer(question: dict[str, Any]) -> list[str]:
    """What vLLM refuses of a lane's arguments, a line each with the setting and its value.

    Args:
        question: a `Question` of `vllm_check` as JSON has it.
    """
    lane, base = question["lane"], question["base"]
    faults = []
    # One at a time: vLLM's words do not always name the option.
    for key, shown, words in question["engine_args"]:
        try:
            parse([*base, *words])
        except REFUSALS as error:
            faults.append(f"{lane}.engine_args.{key} = {shown}: vLLM refuses it: {words_of(error)}")
    if faults:
        return faults
    try:
        args = parse(question["arguments"])
        if question["has_checkpoint"]:
            configure(args)
    except REFUSALS as error:
        return [f"{lane}: vLLM refuses {question['given']}: {words_of(error)}"]
    return []


if __name__ == "__main__":
    questions = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # vLLM's log
        answers = [answer(question) for question in questions]
    json.dump(answers, sys.stdout)
