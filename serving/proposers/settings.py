"""What our proposers are told: vLLM hands its `additional_config` through to its workers as it is."""

from __future__ import annotations

from typing import Any

from serving.config import StepCosts
from serving.proposers.decide import Policy
from serving.proposers.from_profile import cost_model

KEY = "tandem_proposer"


def settings_of(vllm_config: Any) -> Any:
    """What `additional_config` has for us."""
    return vllm_config.additional_config[KEY]


def policy_of(settings: dict[str, Any], max_drafts: int) -> Policy:
    """The policy of an adaptive lane; `settings`: `drafter`, `probe_steps`, and `costs` as `StepCosts` has them."""
    cost = cost_model(StepCosts(**settings["costs"]), settings["drafter"])
    return Policy(cost, max_drafts, settings["probe_steps"])
