"""The model card that lies beside an exported head."""

from typing import Any


def model_card(facts: dict[str, Any]) -> str:
    """Data, training, figures, limits and licence, out of what the checkpoint and the evaluation say."""
    rows = [
        f"| {kind} ({r['prompts']} prompts) | "
        + " | ".join(f"{x:.2f}" for x in r["mean_accepted_length"].values())
        + f" | {' '.join(f'{x:.2f}' for x in r['acceptance_by_position'])} |"
        for kind, r in facts["held_out"].items()
    ]
    shape = facts["shape"]
    return f"""---
license: apache-2.0
---
# A learned draft (EAGLE-3 head)

For vLLM: `speculative_config: {{method: eagle3, model: <this directory>, num_speculative_tokens: 3}}`. It reads
the hidden states of the one model it was trained for and proposes the next tokens, which that model then checks.

**Data.** {facts["data_tokens"]:,} tokens, all written by the target itself, most at temperature 0; it wrote the
user's turns, too, after openings such as "Write a story about". The texts of the load lab were held out.

**Training.** `python -m deploy.train_draft` on {facts["device"]}: {facts["steps"]:,} steps over
{facts["tokens_seen"] / 1e6:,.0f} M tokens in {facts["train_s"]:,.0f} s, {facts["optimizer"]},
{facts["unroll"]} drafts unrolled, loss half the target's probabilities and half its choice, moving average of the
weights; {facts["place"]:.0%} of the learning rate's schedule.

**Shape.** Layers: {shape["layers"]}; MLP: {shape["mlp"]}; states after layers {shape["aux_layers"]};
draft vocabulary: {shape["draft_vocab"]:,} tokens ({facts["vocabulary_share"]:.1%} of those in answers);
{facts["size_bytes"]:,} bytes in bf16.

**Figures.** Mean accepted length (1 + accepted drafts / steps), greedy, over the first 48 tokens of answers to
held-out prompts, computed with plain torch; the last column is acceptance by position with five drafts:

| text | k=1 | 2 | 3 | 4 | 5 | by position |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

**Limits.** Only for the model whose config.json this one extends, with the same weights. Acceptance falls on text
unlike its data: code, other languages, long contexts (rows had at most 512 tokens). It changes the speed, not what
the target may say: greedy text is equal in float32, and in bfloat16 up to near-ties of two logits.

**Licence.** Apache-2.0, as its target's (SmolLM2-135M-Instruct): its output layer and last norm began as copies of
the target's.
"""
