"""Speculation: are drafts right, does guessing pay, and did requests go where it does?"""

from __future__ import annotations

from dashboards.spec import LANE, Dashboard, Panel, Query, Row, per_second
from serving.metrics import names

PLAIN = '{lane="$plain"}'
NOT_ADAPTIVE = "this lab's scheduler.placement is not adaptive, or no such request has ended yet"


def _rate(metric: str, by: str = "lane") -> str:
    return per_second(metric, LANE, by)


def _over_plain(metric: str) -> str:
    return f"{metric}{LANE} / on () group_left () {metric}{PLAIN}"


def _since_start(metric: str, by: str) -> str:
    return f"sum by ({by}) ({metric}{LANE})"


SPECULATION = Dashboard(
    "speculation",
    "Speculation",
    "Are drafts right, does guessing pay, and did requests go where it does?",
    (
        Row(
            "Drafts",
            (
                Panel(
                    "Acceptance rate",
                    "Accepted over drafted tokens; it depends on how well the text can be guessed.",
                    "percentunit",
                    (Query(f"lane:tandem_acceptance:ratio_1m{LANE}", "{{lane}}"),),
                    width=8,
                ),
                Panel(
                    "Acceptance length",
                    "Tokens that a verified draft brings on average, the model's own one included.",
                    "suffix: tokens",
                    (Query(f"lane:tandem_acceptance_length:mean_1m{LANE}", "{{lane}}"),),
                    width=8,
                ),
                Panel(
                    "Acceptance by position",
                    "Share of drafts whose token at this position was kept; it falls from left to right.",
                    "percentunit",
                    (
                        Query(
                            f"{_rate(names.VLLM_ACCEPTED_BY_POSITION, 'lane, position')} "
                            f"/ on (lane) group_left () ({_rate(names.VLLM_NUM_DRAFTS)} > 0)",
                            "{{lane}} {{position}}",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Drafted and accepted",
                    "Tokens per second; what lies between the two lines was computed in vain.",
                    "suffix: tokens/s",
                    (
                        Query(f"{_rate(names.VLLM_DRAFT_TOKENS)} > 0", "{{lane}} drafted"),
                        Query(f"{_rate(names.VLLM_ACCEPTED_TOKENS)} > 0", "{{lane}} accepted"),
                    ),
                ),
                Panel(
                    "Tokens per step",
                    "Tokens generated per engine step; speculation and batching both raise it.",
                    "suffix: tokens",
                    (
                        Query(
                            f"{_rate(names.VLLM_GENERATED_TOKENS)} "
                            f"/ ({_rate(f'{names.VLLM_STEP_TOKENS}_count')} > 0)",
                            "{{lane}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Does it pay?",
            (
                Panel(
                    "Speed-up by time per token",
                    "TPOT p50 of the plain lane over each lane's; below 1 a lane is slower than without guessing.",
                    "suffix: x",
                    (
                        Query(
                            f"lane:{names.TPOT.name}:p50{PLAIN} "
                            f"/ on () group_right () lane:{names.TPOT.name}:p50{LANE}",
                            "{{lane}}",
                        ),
                        Query("vector(1)", "no gain"),
                    ),
                ),
                Panel(
                    "Speed-up by throughput",
                    "Tokens/s over those of the plain lane; a fair comparison only where both have the same load.",
                    "suffix: x",
                    (
                        Query(_over_plain("lane:tandem_generated_tokens:rate1m"), "{{lane}}"),
                        Query("vector(1)", "no gain"),
                    ),
                ),
                Panel(
                    "What a step costs and brings",
                    "Step time over the plain lane's, and tokens a draft brings: cost above gain does not pay.",
                    "suffix: x",
                    (
                        Query(
                            f"(lane:tandem_step_seconds:mean_1m{LANE} and on (lane) "
                            "lane:tandem_acceptance_length:mean_1m) / on () group_left () "
                            f"lane:tandem_step_seconds:mean_1m{PLAIN}",
                            "{{lane}} cost",
                        ),
                        Query(f"lane:tandem_acceptance_length:mean_1m{LANE}", "{{lane}} gain"),
                    ),
                ),
                Panel(
                    "Requests running per replica",
                    "The load under which the other panels stand: verification is cheap while the batch is small.",
                    "short",
                    (Query(f"avg by (lane) ({names.RUNNING.name}{LANE})", "{{lane}}"),),
                ),
            ),
        ),
        Row(
            "Adaptive placement",
            (
                Panel(
                    "Where requests went",
                    "Requests by the lane chosen and by kind of text; the choice should change with the load.",
                    "reqps",
                    (
                        Query(
                            _rate(names.PLACEMENT_CHOICES.name, "lane, kind"),
                            "{{lane}} {{kind}}",
                            NOT_ADAPTIVE,
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "And why",
                    "The same by reason: by score, kept as the last choice was near enough, or the only choice.",
                    "reqps",
                    (
                        Query(
                            _rate(names.PLACEMENT_CHOICES.name, "lane, why"), "{{lane}} {{why}}", NOT_ADAPTIVE
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "What lanes give over what their profile says",
                    "By about how many sequences run; 1 is as tandem calibrate measured it, and is come back to "
                    "while a lane runs nothing.",
                    "suffix: x",
                    (
                        Query(
                            f"{names.PLACEMENT_CORRECTION.name}{LANE}",
                            "{{lane}} at {{batch}}",
                            NOT_ADAPTIVE,
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Accepted, predicted and observed",
                    "Draft tokens of ended streams, as expected and as counted; both should run together.",
                    "suffix: tokens/s",
                    (
                        Query(
                            _rate(names.PREDICTED_ACCEPTED_TOKENS.name), "{{lane}} predicted", NOT_ADAPTIVE
                        ),
                        Query(_rate(names.OBSERVED_ACCEPTED_TOKENS.name), "{{lane}} observed", NOT_ADAPTIVE),
                    ),
                    width=8,
                ),
                Panel(
                    "Observed over predicted",
                    "By kind of text; 1 is as predicted, below it drafts were expected to do better than they did.",
                    "suffix: x",
                    (
                        Query(
                            f"{_rate(names.OBSERVED_ACCEPTED_TOKENS.name, 'lane, kind')} "
                            f"/ ({_rate(names.PREDICTED_ACCEPTED_TOKENS.name, 'lane, kind')} > 0)",
                            "{{lane}} {{kind}}",
                            NOT_ADAPTIVE,
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Observed acceptance by predicted",
                    "Since the scheduler's start, by the tenth that was predicted, named by its lower edge: "
                    "each should lie within its own.",
                    "percentunit",
                    (
                        Query(
                            f"{_since_start(names.RELIABILITY_ACCEPTED_TOKENS.name, 'lane, bin')} "
                            f"/ ({_since_start(names.RELIABILITY_DRAFT_TOKENS.name, 'lane, bin')} > 0)",
                            "{{lane}} from {{bin}}",
                            NOT_ADAPTIVE,
                        ),
                    ),
                    kind="stat",
                    width=8,
                ),
            ),
        ),
    ),
)
