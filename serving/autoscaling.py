"""How many replicas a lane wants, by the scheduler's own signal: outstanding tokens, waiting ones included.

Ray Serve calls the policy in its controller, and applies bounds and delays from the lane's `autoscaling` settings.
"""

from __future__ import annotations

import math
from typing import Any

METRIC = "outstanding_tokens"


def wanted_replicas(outstanding_tokens: float, target_tokens: float) -> int:
    """Replicas so that each has `target_tokens` outstanding, at least 1."""
    return max(1, math.ceil(outstanding_tokens / target_tokens))


class ScaleByOutstandingTokens:
    """The policy object of a lane's deployment.

    Args:
        target_tokens: outstanding tokens per replica to aim at.
    """

    def __init__(self, target_tokens: float) -> None:
        self._target_tokens = target_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Wanted replicas and no state; `context` is Ray Serve's AutoscalingContext."""
        per_replica = (context.aggregated_metrics or {}).get(METRIC, {})
        if not per_replica:
            return context.target_num_replicas, {}  # nothing reported yet: leave things as they are
        return wanted_replicas(sum(per_replica.values()), self._target_tokens), {}
