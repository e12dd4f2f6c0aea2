"""What a config file may not say: each refusal names the file, the key, the value and the bound."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serving import config
from serving.core.errors import ConfigError
from serving.core.lane import Strategy

CHECKOUT = Path(__file__).parents[2]

LANES = """\
lanes:
  - name: batched
    strategy: batched
"""
SPECULATIVE = """\
lanes:
  - name: fast
    strategy: speculative
    speculation: {%s}
"""
ITERATIVE = """\
lanes:
  - name: a
    strategy: iterative
    refinement: {%s}
"""
ENGINE_ARGS = """\
lanes:
  - name: a
    strategy: batched
    engine_args: {%s}
"""


def one_of(names: tuple[str, ...]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    return str(caught.value).replace(str(path), "lab.yaml")


def test_the_default_lab_has_the_three_lanes_it_promises() -> None:
    lab = config.load(CHECKOUT / "deploy" / "lab.yaml")
    assert [(lane.name, lane.strategy, lane.max_running) for lane in lab.lanes] == [
        ("sequential", Strategy.SEQUENTIAL, 1),
        ("batched", Strategy.BATCHED, 16),
        ("speculative", Strategy.SPECULATIVE, 16),
    ]
    speculation = lab.lane("speculative").speculation
    assert speculation is not None
    assert (speculation.is_shipped, speculation.num_speculative_tokens) == (True, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LANES + "gatewy: {port: 1}\n", "lab.yaml: gatewy: unknown key (value {'port': 1})"),
        (LANES + "gateway: {prot: 80}\n", "lab.yaml: gateway.prot: unknown key (value 80)"),
        (
            LANES + "gateway: {port: 70000}\n",
            "lab.yaml: gateway.port = 70000: must be less than or equal to 65535",
        ),
        (
            LANES + "gateway: {cors_allowed_origins: ['https://a.example/']}\n",
            "lab.yaml: gateway.cors_allowed_origins: 'https://a.example/' must be an origin, such as "
            "https://chat.example.org, or *",
        ),
        (
            LANES + "gateway: {port: none}\n",
            "lab.yaml: gateway.port = 'none': must be a whole number",
        ),
        (
            LANES + "scheduler: {max_waiting_requests: -1}\n",
            "lab.yaml: scheduler.max_waiting_requests = -1: must be greater than or equal to 0",
        ),
        (
            LANES + "model: {dtype: int8}\n",
            "lab.yaml: model.dtype = 'int8': must be 'auto', 'float32', 'bfloat16' or 'float16'",
        ),
        (
            "lanes:\n  - {name: Fast Lane, strategy: batched}\n",
            "lab.yaml: lanes.0.name = 'Fast Lane': must be 1 to 63 of lower case letters, digits, '.' and '-', "
            "and begin with a letter or digit",
        ),
        (
            "lanes:\n  - {name: a, strategy: magic}\n",
            "lab.yaml: lanes[a].strategy = 'magic': must be 'sequential', 'batched', 'speculative' or 'iterative'",
        ),
        ("lanes:\n  - {name: a}\n", "lab.yaml: lanes[a].strategy: missing"),
        ("model: {}\n", "lab.yaml: lanes: missing"),
        (
            "lanes: []\n",
            "lab.yaml: lanes = []: must not be empty",
        ),
        (
            LANES + "  - {name: batched, strategy: batched}\n",
            "lab.yaml: lanes: lane name 'batched' is used twice; names must be distinct",
        ),
        (
            "lanes:\n  - {name: any, strategy: batched}\n",
            "lab.yaml: lanes: a lane may not be named 'any': metrics call so the requests that pin none",
        ),
        (
            LANES + "scheduler: {tenants: [{name: 'a b'}]}\n",
            "lab.yaml: scheduler.tenants.0.name: 'a b' must be printable ASCII without spaces: no header can "
            "carry it",
        ),
        (
            "lanes:\n  - {name: a, strategy: batched, takes_unpinned: false}\n",
            "lab.yaml: lanes: no lane of the lab's model takes unpinned requests; set takes_unpinned: true on at "
            "least one",
        ),
        (
            "lanes:\n  - {name: one, strategy: sequential, max_num_seqs: 4}\n",
            "lab.yaml: lanes[one]: a sequential lane runs one request at a time: max_num_seqs=4 must be 1 and "
            "dispatch_margin=0 must be 0",
        ),
        (
            "lanes:\n  - {name: one, strategy: sequential, max_num_seqs: 1, dispatch_margin: 2}\n",
            "lab.yaml: lanes[one]: a sequential lane runs one request at a time: max_num_seqs=1 must be 1 and "
            "dispatch_margin=2 must be 0",
        ),
        (
            "lanes:\n  - {name: fast, strategy: speculative}\n",
            "lab.yaml: lanes[fast]: speculation must be given for strategy speculative, and only there; "
            "strategy=speculative",
        ),
        (
            "lanes:\n  - {name: slow, strategy: batched, speculation: {}}\n",
            "lab.yaml: lanes[slow]: speculation must be given for strategy speculative, and only there; "
            "strategy=batched",
        ),
        (
            "lanes:\n  - {name: a, strategy: iterative}\n",
            "lab.yaml: lanes[a]: refinement must be given for strategy iterative, and only there; "
            "strategy=iterative",
        ),
        (
            "lanes:\n  - {name: a, strategy: batched, refinement: {}}\n",
            "lab.yaml: lanes[a]: refinement must be given for strategy iterative, and only there; "
            "strategy=batched",
        ),
        (
            ITERATIVE % "tails: false, pool: false",
            "lab.yaml: lanes[a].refinement: tails=false and pool=false leave nothing to guess with: one must be "
            "true",
        ),
        (
            ITERATIVE % "lookup_min: 4",
            "lab.yaml: lanes[a].refinement: lookup_min=4 exceeds lookup_max=3",
        ),
        (
            ITERATIVE % "max_ngrams: 0",
            "lab.yaml: lanes[a].refinement.max_ngrams = 0: must be greater than or equal to 1",
        ),
        (
            ITERATIVE % "" + "    engine_args: {additional_config: {}}\n",
            "lab.yaml: lanes[a]: engine_args.additional_config is set by refinement",
        ),
        (
            SPECULATIVE % "num_speculative_tokens: 65",
            "lab.yaml: lanes[fast].speculation.num_speculative_tokens = 65: must be less than or equal to 64",
        ),
        (
            SPECULATIVE % "prompt_lookup_min: 5",
            "lab.yaml: lanes[fast].speculation: prompt_lookup_min=5 exceeds prompt_lookup_max=4",
        ),
        (
            SPECULATIVE % "method: draft_model",
            "lab.yaml: lanes[fast].speculation: model must be given for methods draft_model, eagle, eagle3, and "
            "not for ngram, oracle, suffix; method=draft_model",
        ),
        (
            SPECULATIVE % "model: /models/draft",
            "lab.yaml: lanes[fast].speculation: model must be given for methods draft_model, eagle, eagle3, and "
            "not for ngram, oracle, suffix; method=ngram",
        ),
        (
            SPECULATIVE % "method: eagle3",
            "lab.yaml: lanes[fast].speculation: model must be given for methods draft_model, eagle, eagle3, and "
            "not for ngram, oracle, suffix; method=eagle3",
        ),
        (
            SPECULATIVE % "method: eagle, model: /models/head, suffix_decoding_max_tree_depth: 8",
            "lab.yaml: lanes[fast].speculation: suffix_decoding_max_tree_depth is for method suffix only; "
            "method=eagle",
        ),
        (
            SPECULATIVE % "method: draft_model, model: /models/draft, prompt_lookup_max: 4",
            "lab.yaml: lanes[fast].speculation: prompt_lookup_max is for method ngram only; method=draft_model",
        ),
        (
            SPECULATIVE % "method: adaptive",
            "lab.yaml: lanes[fast].speculation: method=adaptive decides by what a step costs: give profile or "
            "costs",
        ),
        (
            SPECULATIVE % "method: adaptive, drafter: eagle3, costs: {fixed_s: 1, token_s: 0}",
            "lab.yaml: lanes[fast].speculation: model must be given for methods draft_model, eagle, eagle3, and "
            "not for ngram, oracle, suffix; method=adaptive, drafter=eagle3",
        ),
        (
            SPECULATIVE
            % "method: adaptive, drafter: eagle3, model: auto, prompt_lookup_max: 4, profile: {path: p}",
            "lab.yaml: lanes[fast].speculation: prompt_lookup_max is for method ngram only; method=adaptive, "
            "drafter=eagle3",
        ),
        (
            SPECULATIVE % "method: adaptive, num_speculative_tokens_per_batch_size: auto, profile: {path: p}",
            "lab.yaml: lanes[fast].speculation: num_speculative_tokens_per_batch_size is for method draft_model, "
            "eagle, eagle3, ngram only; method=adaptive, drafter=ngram",
        ),
        (
            SPECULATIVE % "num_speculative_tokens_per_batch_size: auto",
            "lab.yaml: lanes[fast].speculation: num_speculative_tokens_per_batch_size=auto is made from a profile, "
            "which must be given",
        ),
        (
            SPECULATIVE % "profile: {path: p}",
            "lab.yaml: lanes[fast].speculation: profile is read for method adaptive, or for "
            "num_speculative_tokens_per_batch_size=auto; method=ngram",
        ),
        *(
            (
                SPECULATIVE % f"num_speculative_tokens_per_batch_size: {table}",
                f"lab.yaml: lanes[fast].speculation.num_speculative_tokens_per_batch_size: {row} must be [batch "
                f"from, to, tokens of a draft], the first from 1, none before the end of the one "
                f"before it ({last})",
            )
            for table, row, last in (
                ("[[2, 4, 1]]", "[2, 4, 1]", 0),
                ("[[1, 4, 1], [4, 8, 0]]", "[4, 8, 0]", 4),
                ("[[1, 4, -1]]", "[1, 4, -1]", 0),
                ("[[1, 0, 1]]", "[1, 0, 1]", 0),
            )
        ),
        (
            SPECULATIVE
            % "num_speculative_tokens: 2, num_speculative_tokens_per_batch_size: [[1, 4, 2], [5, 8, 3]]",
            "lab.yaml: lanes[fast].speculation: num_speculative_tokens_per_batch_size: [5, 8, 3] drafts 3 tokens, "
            "more than num_speculative_tokens=2",
        ),
        (
            SPECULATIVE % "method: mtp, probe_steps: 3",
            "lab.yaml: lanes[fast].speculation: probe_steps is for method adaptive only; method=mtp",
        ),
        (
            SPECULATIVE % "method: adaptive, drafter: eagle3, model: auto, costs: {fixed_s: 1, token_s: 1}, "
            "disable_padded_drafter_batch: true",
            "lab.yaml: lanes[fast].speculation: disable_padded_drafter_batch=true must be left out: drafts are cut "
            "in vLLM's padded batch; method=adaptive, drafter=eagle3",
        ),
        (
            SPECULATIVE % "method: oracle, acceptance: [0.5, 0.6], num_speculative_tokens: 2",
            "lab.yaml: lanes[fast].speculation.acceptance: acceptance at position 2 is 0.6, must be in 0..0.5: "
            "a draft token counts only where all before it were accepted",
        ),
        (
            SPECULATIVE % "method: oracle, acceptance: 1.2",
            "lab.yaml: lanes[fast].speculation.acceptance: acceptance at position 1 is 1.2, must be in 0..1: "
            "a draft token counts only where all before it were accepted",
        ),
        (
            SPECULATIVE % "method: oracle, acceptance: [0.5]",
            "lab.yaml: lanes[fast].speculation: acceptance has 1 positions, num_speculative_tokens=4: they must be "
            "as many",
        ),
        (
            "lanes:\n  - {name: fast, strategy: speculative, speculation: {method: oracle}, "
            "engine_args: {additional_config: {a: 1}}}\n",
            "lab.yaml: lanes[fast]: engine_args.additional_config is set by speculation; method=oracle",
        ),
        (
            SPECULATIVE % "method: mtp, day: 2026-01-01",
            "lab.yaml: lanes[fast].speculation.day = 2026-01-01: must be text, a number, true, false, a list, or "
            "keys and values",
        ),
        (
            ENGINE_ARGS % "port: 80, max_num_seqs: 4, gpu-memory-utilization: 0.5",
            "lab.yaml: lanes[a].engine_args: port = 80: engines listen where the lab finds them; use gateway.port; "
            "max_num_seqs = 4: is set by lanes[].max_num_seqs; "
            "gpu-memory-utilization = 0.5: is set by lanes[].gpu_memory_utilization",
        ),
        (
            ENGINE_ARGS % "seed: 2026-01-01",
            "lab.yaml: lanes[a].engine_args.seed = 2026-01-01: must be text, a number, true, false, a list, or "
            "keys and values",
        ),
        (
            "model: {path: /models/other}\n" + SPECULATIVE % "method: eagle3, model: auto",
            "lab.yaml: (top): lanes[fast].speculation.model = 'auto' is an eagle3 head for the default model; "
            "method=eagle3, "
            "model.path='/models/other'",
        ),
        (
            SPECULATIVE % "method: eagle, model: auto",
            "lab.yaml: (top): lanes[fast].speculation.model = 'auto' is an eagle3 head for the default model; "
            "method=eagle, "
            "model.path='auto'",
        ),
        (
            "lanes:\n  - {name: a, strategy: batched, tensor_parallel_size: 2, num_gpus: 1}\n",
            "lab.yaml: lanes[a]: num_gpus=1 must be left out or be tensor_parallel_size x "
            "pipeline_parallel_size = 2, a card for each, or be 0 where engines share the cards",
        ),
        (
            "lanes:\n  - {name: a, strategy: batched, engine: simulated, simulated: {}, "
            "pipeline_parallel_size: 2}\n",
            "lab.yaml: lanes[a]: tensor_parallel_size=1 and pipeline_parallel_size=2 are for engine vllm; "
            "engine=simulated",
        ),
        (
            ENGINE_ARGS % "tensor-parallel-size: 2",
            "lab.yaml: lanes[a].engine_args: tensor-parallel-size = 2: is set by lanes[].tensor_parallel_size",
        ),
        (
            "lanes:\n  - {name: a, strategy: batched, engine: simulated, simulated: {}, engine_args: {seed: 1}}\n",
            "lab.yaml: lanes[a]: engine_args are options of `vllm serve`; engine=simulated",
        ),
        (
            "lanes:\n  - {name: a, strategy: batched, engine: simulated}\n",
            "lab.yaml: lanes[a]: simulated must be given for engine simulated, and only there; "
            "engine=simulated",
        ),
        (
            LANES + "scheduler: {order: lifo}\n",
            f"lab.yaml: scheduler.order = 'lifo': must be {one_of(config.ORDERS)}",
        ),
        (
            LANES + "scheduler: {placement: random}\n",
            f"lab.yaml: scheduler.placement = 'random': must be {one_of(config.PLACEMENTS)}",
        ),
        (
            LANES + "scheduler: {bands: [{name: a}, {name: a}], default_band: a}\n",
            "lab.yaml: scheduler: bands: name 'a' is used twice; names must be distinct",
        ),
        (
            LANES + "scheduler: {bands: [{name: a}, {name: b}]}\n",
            "lab.yaml: scheduler: default_band='normal' is none of ['a', 'b']",
        ),
        (
            LANES + "scheduler: {bands: []}\n",
            "lab.yaml: scheduler: default_band='normal' is none of []",
        ),
        (
            LANES + "scheduler: {bands: [{name: a, reserved_share: 1}], default_band: a}\n",
            "lab.yaml: scheduler.bands[a].reserved_share = 1: must be less than 1",
        ),
        (
            LANES + "scheduler:\n  bands: [{name: a, reserved_share: 0.6}, {name: b, reserved_share: 0.5}]\n"
            "  default_band: b\n",
            "lab.yaml: scheduler: bands: reserved_share adds up to 1.1; it must stay below 1",
        ),
        (
            LANES + "scheduler: {tenants: [{name: x}, {name: x}]}\n",
            "lab.yaml: scheduler: tenants: name 'x' is used twice; names must be distinct",
        ),
        (
            LANES + "scheduler: {tenants: [{name: x, weight: 0}]}\n",
            "lab.yaml: scheduler.tenants[x].weight = 0: must be greater than 0",
        ),
        (
            LANES + "scheduler: {tenants: [{name: x, queue_share: 1.5}]}\n",
            "lab.yaml: scheduler.tenants[x].queue_share = 1.5: must be less than or equal to 1",
        ),
        (
            LANES + "    autoscaling: {min_replicas: 5}\n",
            "lab.yaml: lanes[batched].autoscaling: min_replicas=5 exceeds max_replicas=4",
        ),
        (
            LANES + "    replicas: 9\n    autoscaling: {}\n",
            "lab.yaml: lanes[batched]: replicas=9 is outside autoscaling 1..4",
        ),
        (
            LANES + "    autoscaling: {target_outstanding_tokens: 0}\n",
            "lab.yaml: lanes[batched].autoscaling.target_outstanding_tokens = 0: "
            "must be greater than or equal to 1",
        ),
        (
            LANES + "lanes: []\n",
            "lab.yaml: key 'lanes' is given twice (line 1)",
        ),
        (
            "gateway:\n  port: 1\n  port: 2\n" + LANES,
            "lab.yaml: key 'port' is given twice (line 2)",
        ),
        ("- a\n- b\n", "lab.yaml: expected keys and values at the top, got ['a', 'b']"),
        ("", "lab.yaml: expected keys and values at the top, got null"),
    ],
)
def test_refusals_name_file_key_value_and_bound(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text) == expected


def test_every_config_that_is_shipped_is_accepted() -> None:
    files = sorted((CHECKOUT / "deploy").glob("*.yaml"))
    assert {"lab.yaml", "gpu.yaml", "scale.yaml"} <= {path.name for path in files}
    for path in files:
        assert config.load(path).lanes, path.name


def test_the_engines_of_the_gpu_lab_share_one_gpu() -> None:
    lanes = config.load(CHECKOUT / "deploy" / "gpu.yaml").lanes
    assert sum(lane.replicas * lane.gpu_memory_utilization for lane in lanes) < 1
    assert 0 < sum(lane.replicas * lane.reserved_gpus("cuda") for lane in lanes) <= 1


def test_every_fault_is_named_not_only_the_first(tmp_path: Path) -> None:
    lines = refusal(tmp_path, LANES + "gateway: {port: 0, replicas: 0}\n").splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "lab.yaml: gateway.port",
        "lab.yaml: gateway.replicas",
    ]


def test_what_is_not_yaml_is_refused_with_the_place(tmp_path: Path) -> None:
    text = refusal(tmp_path, "lanes: [\n")
    assert text.startswith("lab.yaml: not YAML: ")
    assert "line 2" in text


def test_a_merge_key_still_works(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "lanes:\n  - &base {name: a, strategy: batched, max_num_seqs: 3}\n  - {<<: *base, name: b}\n"
    )
    assert [(lane.name, lane.max_num_seqs) for lane in config.load(path).lanes] == [("a", 3), ("b", 3)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file or directory"):
        config.load(tmp_path / "absent.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_bytes(b"\xff\xfe\x00lanes")
    with pytest.raises(ConfigError, match=r"lab\.yaml: "):
        config.load(path)


def test_settings_cannot_be_changed_once_read() -> None:
    lab = config.load(CHECKOUT / "deploy" / "lab.yaml")
    with pytest.raises(ValueError, match="frozen"):
        setattr(lab.gateway, "port", 1)  # noqa: B010 - the type checker knows already


def test_bands_are_numbered_from_the_highest() -> None:
    scheduler = config.SchedulerConfig()
    assert [scheduler.band_index(name) for name in ("high", "normal", "low", "none")] == [0, 1, 2, None]


def test_keys_of_one_speculation_method_exist_and_so_does_the_method() -> None:
    fields = config.SpeculationConfig.model_fields
    assert config.METHODS_OF_KEY.keys() == fields.keys() - {"method", "num_speculative_tokens"}
    assert set().union(*config.METHODS_OF_KEY.values()) == config.KNOWN_METHODS


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ("method: ngram", False),
        ("method: eagle3, model: /models/head", False),
        ("method: suffix, suffix_decoding_min_token_prob: 0.2", True),
        ("method: mtp", True),
        ("method: custom_class, model: mine.Drafts", True),
        ("method: ngram, num_speculative_tokens_per_batch_size: [[1, 4, 3]]", False),
        ("method: oracle", False),
        ("method: adaptive, costs: {fixed_s: 1, token_s: 1}, draft_sample_method: greedy", True),
        ("method: ngram, promt_lookup_max: 3", True),
    ],
)
def test_what_is_not_known_of_a_speculation_is_for_vllm_to_judge(
    settings: str, needs: bool, tmp_path: Path
) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(SPECULATIVE % settings)
    speculation = config.load(path).lane("fast").speculation
    assert speculation is not None
    assert speculation.needs_vllm == needs


def test_an_unknown_lane_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        config.load(CHECKOUT / "deploy" / "lab.yaml").lane("warp")


# Where the document describes each settings class, and under which prefix.
SECTIONS: dict[str, type[BaseModel]] = {
    "model": config.ModelConfig,
    "gateway": config.GatewayConfig,
    "scheduler": config.SchedulerConfig,
    "slo": config.SloConfig,
    "telemetry": config.TelemetryConfig,
    "processor": config.ProcessorConfig,
    "bands[]": config.BandConfig,
    "tenants[]": config.TenantConfig,
    "lanes[]": config.LaneConfig,
    "lanes[].model": config.LaneModelConfig,
    "speculation": config.SpeculationConfig,
    "refinement": config.RefinementConfig,
    "profile": config.ProfileUse,
    "costs": config.StepCosts,
    "simulated": config.SimulatedProfile,
    "autoscaling": config.AutoscalingConfig,
}


def documented() -> dict[str, tuple[str, str]]:
    """Default and bounds by key, from the tables of docs/configuration.md."""
    text = (CHECKOUT / "docs" / "configuration.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    # Rows of environment variables have no bounds, and no dot in their name.
    return {row[1].strip("`"): (row[3].strip("`"), row[4]) for row in rows if "." in row[1]}


def default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, tuple):
        return ", ".join(one.name for one in field.default) or "none"
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"


def bounds_text(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is UnionType and not any(isinstance(one, (Gt, Le)) for one in field.metadata):
        kind, *_ = get_args(kind)  # X | None
    if get_origin(kind) is tuple:
        return "list" if get_args(kind)[0] is str else "section below"
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(str(member) for member in kind)
    if kind is bool:
        return "true, false"
    if kind is str:
        longest = next((one.max_length for one in field.metadata if isinstance(one, MaxLen)), None)
        if longest is not None:
            return f"1 to {longest} characters"
        return "name" if any(hasattr(one, "pattern") for one in field.metadata) else "text"
    if not field.metadata:
        return "integer" if kind is int else "section below"
    low = next(
        f"above {one.gt}," if isinstance(one, Gt) else str(one.ge)
        for one in field.metadata
        if isinstance(one, (Ge, Gt))
    )
    high = next(
        (
            f"to {one.le}" if isinstance(one, Le) else f"below {one.lt}"
            for one in field.metadata
            if isinstance(one, (Le, Lt))
        ),
        "or more",
    )
    return f"{low}, {high}" if high.startswith("below") else f"{low} {high}"


def test_the_document_has_every_key_with_its_default_and_bounds() -> None:
    expected = {
        f"{prefix}.{name}": (default_text(field), bounds_text(field))
        for prefix, settings in SECTIONS.items()
        for name, field in settings.model_fields.items()
    }
    assert documented() == expected


def test_every_settings_class_is_documented() -> None:
    def reached(settings: type[BaseModel]) -> set[type[BaseModel]]:
        inner = {
            part
            for field in settings.model_fields.values()
            for part in (field.annotation, *get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        }
        return inner.union(*(reached(one) for one in inner))

    assert reached(config.LabConfig) == set(SECTIONS.values())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (LANES + "gateway: {port: true}\n", "gateway.port = True: must be a whole number"),
        (
            LANES + "telemetry: {otlp_endpoint: 'localhost:4318'}\n",
            "telemetry.otlp_endpoint: 'localhost:4318' must be a URL that begins with http:// or https://",
        ),
        (
            LANES + "telemetry: {otlp_endpoint: 'http://user:secret@localhost:4318'}\n",
            "telemetry.otlp_endpoint: must hold no user and password; OTEL_EXPORTER_OTLP_HEADERS can",
        ),
        (
            "lanes: [{name: b, strategy: batched, replicas: '2'}]\n",
            "lanes[b].replicas = '2': must be a whole number",
        ),
        (
            "lanes: [{name: b, strategy: batched, takes_unpinned: 'yes'}]\n",
            "lanes[b].takes_unpinned = 'yes': must be true or false",
        ),
        (LANES + "gateway: {host: ''}\n", "gateway.host = '': must not be empty"),
        (
            LANES + "scheduler: {seed: -1}\n",
            "scheduler.seed = -1: must be greater than or equal to 0",
        ),
        ("lanes: [5]\n", "lanes.0 = 5: must be keys and values"),
        ("lanes: [5, {name: b, speed: 1}]\n", "lanes[b].speed: unknown key (value 1)"),
        ("lanes: [5, {name: b, speed: 1}]\n", "lanes[b].strategy: missing"),
        ("lanes: [{strategy: batched}]\n", "lanes.0.name: missing"),
        ("lanes: [{strategy: batched, speed: 1}]\n", "lanes.0.speed: unknown key"),
        ("lanes: [{name: '', speed: 1}]\n", "lanes.0.speed: unknown key"),
        ("lanes: [{name: 7, speed: 1}]\n", "lanes.0.speed: unknown key"),
        ("lanes: [{name: b}, {name: b, speed: 1}]\n", "lanes.1.speed: unknown key"),
        ("[" * 3000, "nested too deeply"),
        (LANES + "gateway: {port: null}\n", "gateway.port = null: must be a whole number"),
        (LANES + "gateway: {port: 80.5}\n", "gateway.port = 80.5: must be a whole number"),
        (LANES + "gateway: {idle_timeout_s: '5'}\n", "gateway.idle_timeout_s = '5': must be a number"),
        (LANES + "gateway: {host: 1}\n", "gateway.host = 1: must be text"),
        (
            LANES + "gateway: {api_keys_file: keys}\n",
            "gateway.api_keys_file: 'keys' must be an absolute path",
        ),
        (LANES + "gateway: 8000\n", "gateway = 8000: must be keys and values"),
        ("lanes: batched\n", "lanes = 'batched': must be a list"),
        (LANES + "1: 2\n", "1 = 1: a key must be text"),
    ],
)
def test_values_of_the_wrong_type_are_not_guessed_at(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config.load(path)
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("model: 2024-13-45", "line 4, column 8: '2024-13-45' cannot be read as a date"),
        ("model: !!timestamp soon", "line 4, column 8: 'soon' cannot be read as a date"),
        ("gateway: {port: !!int ''}", "line 4, column 17: '' cannot be read as a number"),
        ("gateway: {port: !!bool si}", "line 4, column 17: 'si' cannot be read as true or false"),
        ("model: *nothing", "not YAML: line 4, column 8: found undefined alias 'nothing'"),
    ],
)
def test_what_yaml_cannot_build_is_refused_with_the_place(line: str, fault: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, f"{LANES}{line}\n").startswith(f"lab.yaml: {fault}")


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("gateway: {port: %s}" % ("9" * 5000), "line 4, column 17"),
        ("gateway: {port: 0x%s}" % ("f" * 5000), "gateway.port"),
        ("gateway: {host: %s}" % ("h" * 5000), "gateway.host"),
        ("? %s\n: 1" % ("k" * 500), "k" * 100),
    ],
)
def test_long_values_are_refused_in_a_short_line(line: str, place: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, f"{LANES}{line}\n")
    assert text.startswith(f"lab.yaml: {place}")
    assert len(text) < 250


@pytest.mark.parametrize(
    "line",
    [
        "model: []",
        "model: {path: 1}",
        "gateway: {port: a}",
        "scheduler: {bands: 1}",
        "scheduler: {seed: 1.5}",
    ],
)
def test_no_refusal_speaks_of_python(line: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, f"{LANES}{line}\n").lower()
    for word in ("tuple", "input", "valid", "instance", "dictionary", "string", "integer", "parse"):
        assert word not in text


def test_whole_numbers_are_good_where_fractions_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(LANES + "gateway: {idle_timeout_s: 7}\n")
    assert config.load(path).gateway.idle_timeout_s == 7


def test_aliases_that_stand_for_millions_of_values_are_refused(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 9)]
    path = tmp_path / "lab.yaml"
    path.write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="the limit is 100000"):
        config.load(path)


@pytest.mark.parametrize(("device", "reserved"), [("cuda", 4), ("cpu", 0)])
def test_ray_reserves_a_card_for_each_rank(device: str, reserved: float) -> None:
    lane = {"name": "a", "strategy": "batched", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    (found,) = config.from_data({"lanes": [lane]}, "x").lanes
    assert found.reserved_gpus(device) == reserved


def test_engines_of_several_ranks_that_share_their_cards_reserve_none() -> None:
    lane = {"name": "a", "strategy": "batched", "tensor_parallel_size": 2, "num_gpus": 0}
    (found,) = config.from_data({"lanes": [lane]}, "x").lanes
    assert found.reserved_gpus("cuda") == 0


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ("urls: ['http://me:secret@a']", "'http://a': must hold no user and password"),
        ("urls: ['http://a/v1?key=secret']", "'http://a/v1': must have no query"),
        ("urls: ['http://a/v1#secret']", "'http://a/v1': must have no query and no fragment"),
        (
            "urls: ['http://a'], api_key_env: sk-secret",
            "api_key_env: must be the name of an environment variable",
        ),
        ("urls: ['http://a'], health: ping", "health = 'ping': must begin with /"),
        ("urls: []", "urls must be given for engine openai"),
        (
            "urls: ['http://a'], model: {path: /models/b}",
            "lanes[a]: model is for engines of the lab's own only; engine=openai: the servers' own name of their "
            "model is served_model",
        ),
    ],
)
def test_a_server_s_settings_are_refused_in_words_of_their_own_and_without_a_secret(
    settings: str, fault: str, tmp_path: Path
) -> None:
    said = refusal(tmp_path, f"lanes: [{{name: a, strategy: batched, engine: openai, {settings}}}]")
    assert fault in said
    assert "secret" not in said


def lab_of(*lanes: str, model: str = "{name: plain, path: org/plain@main}") -> config.LabConfig:
    return config.from_data(yaml.safe_load(f"model: {model}\nlanes: [{', '.join(lanes)}]"), "lab.yaml")


OWN = "{name: own, strategy: batched}"


def test_a_lane_of_another_model_keeps_the_labs_other_settings() -> None:
    lab = lab_of(
        OWN,
        "{name: b, strategy: batched, model: {name: tuned, path: /t}}",
        model="{dtype: float32, path: /p}",
    )
    assert lab.model_of(lab.lane("b")) == lab.model.model_copy(update={"name": "tuned", "path": "/t"})
    assert lab.model_of(lab.lane("own")) == lab.model
    assert [lane.unpinned_model for lane in lab.lanes] == ["", "tuned"]


def test_checkpoints_are_those_of_lanes_that_compute_and_can_be_pinned_together() -> None:
    lab = lab_of(
        OWN,
        "{name: b, strategy: batched, model: {path: org/other@main}}",
        "{name: e, strategy: speculative, speculation: {method: eagle3, model: org/head@v1}}",
        "{name: m, strategy: speculative, speculation: {method: medusa, model: org/medusa@v1}}",
        "{name: o, strategy: speculative, speculation: {method: odd, model: as-it-is}}",
        "{name: s, strategy: batched, engine: simulated, simulated: {}, model: {path: nowhere}}",
    )
    assert lab.checkpoints == {
        "model.path": "org/plain@main",
        "lanes[b].model.path": "org/other@main",
        "lanes[e].speculation.model": "org/head@v1",
        "lanes[m].speculation.model": "org/medusa@v1",
    }
    pinned = lab.with_paths(lambda path: path.replace("@", "@pinned-"))
    assert list(pinned.checkpoints.values()) == [
        *("org/plain@pinned-main", "org/other@pinned-main", "org/head@pinned-v1", "org/medusa@pinned-v1")
    ]
    assert pinned.with_paths(lambda path: path.replace("pinned-", "")) == lab


def test_an_automatic_draft_is_a_checkpoint_only_where_it_has_to_be_made() -> None:
    speculation = "speculation: {method: %s, model: auto}"
    lab = lab_of(
        OWN,
        f"{{name: d, strategy: speculative, {speculation % 'draft_model'}}}",
        f"{{name: e, strategy: speculative, model: {{path: auto}}, {speculation % 'eagle3'}}}",
    )
    assert lab.checkpoints == {
        "model.path": "org/plain@main",
        "lanes[d].speculation.model": "auto",
        "lanes[e].model.path": "auto",
    }


def test_a_head_for_the_default_model_goes_by_the_lanes_own_model() -> None:
    head = "{name: e, strategy: speculative, speculation: {method: eagle3, model: auto}%s}"
    with pytest.raises(ConfigError, match=r"eagle3, model\.path='org/plain@main'"):
        lab_of(OWN, head % "")
    with pytest.raises(ConfigError, match=r"eagle3, lanes\[e\]\.model\.path='org/other@main'"):
        lab_of(OWN, head % ", model: {path: org/other@main}", model="{path: auto}")
    lab_of(OWN, head % ", model: {path: auto}")


def test_servers_that_already_run_need_no_checkpoint_and_serve_the_labs_model() -> None:
    lab = lab_of("{name: a, strategy: batched, engine: openai, urls: ['http://a']}")
    assert (lab.checkpoints, lab.needs_model, lab.lanes[0].unpinned_model) == ({}, False, "")


@pytest.mark.parametrize(
    ("lane", "fault"),
    [
        ("{name: plain, path: /x}", "lanes[b].model.name = 'plain' is the lab's (model.name): leave it out"),
        ("{name: Big, path: /x}", "lanes.2.model.name = 'Big': must be 1 to 63 of lower case letters"),
        ("{name: tuned}", "lanes[b].model.path: missing"),
        (
            "{name: first, path: /x}",
            "lanes[b].model.path = '/x': another lane's model 'first' has path '/first'",
        ),
    ],
)
def test_a_lanes_model_is_refused_with_key_and_value(lane: str, fault: str) -> None:
    first = "{name: a, strategy: batched, model: {name: first, path: /first}}"
    with pytest.raises(ConfigError) as raised:
        lab_of(OWN, first, f"{{name: b, strategy: batched, model: {lane}}}")
    assert fault in str(raised.value)


def test_the_labs_own_model_has_a_lane() -> None:
    with pytest.raises(ConfigError, match="no lane of the lab's model takes unpinned requests"):
        lab_of("{name: b, strategy: batched, model: {name: tuned, path: /t}}")
