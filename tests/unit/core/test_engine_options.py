"""Which options of `vllm serve` a lane may give, and how they look on its command line."""

from __future__ import annotations

from typing import Any

import pytest

from serving.core import engine_options


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_size", 32, ["--block-size=32"]),
        ("block-size", 32, ["--block-size=32"]),
        ("max-num-batched-tokens", "4k", ["--max-num-batched-tokens=4k"]),
        ("swap", -1.5, ["--swap=-1.5"]),
        ("chat-template", "--odd", ["--chat-template=--odd"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enforce_eager", False, ["--no-enforce-eager"]),
        ("cudagraph_capture_sizes", [1, 2], ["--cudagraph-capture-sizes", "1", "2"]),
        ("hf_overrides", {"rope_theta": 1}, ['--hf-overrides={"rope_theta": 1}']),
        ("compilation_config.mode", 0, ["--compilation-config.mode=0"]),
        # Keys below an option are the option's own, as they are; a text must not be read as a number.
        ("hf_overrides.rope_scaling.type", "3", ['--hf-overrides.rope_scaling.type="3"']),
        ("compilation_config.use_inductor", False, ["--compilation-config.use_inductor=false"]),
    ],
)
def test_a_key_and_its_value_on_the_command_line(key: str, value: Any, words: list[str]) -> None:
    assert engine_options.as_arguments(key, value) == words


@pytest.mark.parametrize("option", sorted(engine_options.REFUSED))
def test_what_the_lab_sets_is_refused_in_each_spelling(option: str) -> None:
    reason = engine_options.REFUSED[option]
    for key in (option, option.replace("-", "_"), f"no-{option}", f"no_{option}", f"{option}.method"):
        shown = "***" if option in engine_options.SECRETS else "1"
        assert engine_options.faults({key: 1}) == [f"{key} = {shown}: {reason}"]


@pytest.mark.parametrize(
    ("engine_args", "fault"),
    [
        ({"data_parallel_size": 2}, "use lanes[].replicas"),
        ({"ssl-keyfile": "/k"}, "put a proxy with TLS in front"),
        ({"--seed": 1}, "without its leading dashes"),
        ({"-tp": 2}, "without its leading dashes"),
        ({"seed=1 --port": 2}, "must be the long name"),
        ({"seed": None}, "null gives no value"),
        ({"middleware": ["m.M", "--host=0.0.0.0"]}, "no entry of a list may begin with a dash"),
        ({"block-size": 16, "block_size": 32}, "is given twice, in two spellings"),
    ],
)
def test_a_fault_says_why(engine_args: dict[str, Any], fault: str) -> None:
    assert fault in "; ".join(engine_options.faults(engine_args))


def test_other_options_are_for_vllm_to_judge() -> None:
    given = {
        "seed": 1,
        "model-impl": "vllm",
        "compilation-config.mode": 0,
        "compilation_config.level": 0,
        "x": [],
    }
    assert engine_options.faults(given) == []
