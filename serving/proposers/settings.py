"""What our proposers are told: vLLM hands its `additional_config` through to its workers as it is."""

from __future__ import annotations

from typing import Any

from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.proposers.decide import Policy

KEY = "tandem_proposer"


def settings_of(vllm_config: Any) -> Any:
    """What `additional_config` has for us."""
    return vllm_config.additional_config[KEY]


def policy_of(settings: dict[str, Any], max_drafts: int) -> Policy:
    """The policy of an adaptive lane; `settings` are `probe_steps` and those of `StepCosts`."""
    costs = settings["costs"]
    return Policy(
        CostModel(
            LinearStepTime(costs["fixed_s"], costs["token_s"], costs["kv_token_s"]),
            DraftCost(0.0, costs["draft_pass_s"], costs["draft_pass_sequence_s"]),
        ),
        max_drafts,
        settings["probe_steps"],
    )
