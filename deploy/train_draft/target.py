"""The target: its states, and text that it writes itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

FORCED, ANSWER, USER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Token ids around the turns of a chat; ``end`` closes a turn, be it the user's or the answer."""

    before_user: list[int]
    before_answer: list[int]  # after the user's ``end``
    before_next_user: list[int]  # after the answer's ``end``
    end: int


def load_target(directory: Path, device: str) -> Any:
    """The frozen model, in bfloat16 on a GPU and in float32 elsewhere."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    model.requires_grad_(False)
    return model


def load_tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def chat_format(tokenizer: Any) -> ChatFormat:
    """Read the format off the tokenizer's chat template.

    Raises:
        ValueError: the template does not put the end token right after each turn.
    """
    user, answer = "QQQQ", "ZZZZ"
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template([*turns, turns[0]], tokenize=False)
    before, after_user, rest = text.split(user)[0], *text.split(user)[1].split(answer)
    end = tokenizer.eos_token
    if not (after_user.startswith(end) and rest.startswith(end)):
        raise ValueError(f"chat template: {after_user!r} and {rest!r} do not begin with the end token {end!r}")

    def ids(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    return ChatFormat(
        ids(before), ids(after_user[len(end) :]), ids(rest[len(end) :]), int(tokenizer.eos_token_id)
    )


@torch.no_grad()
def states(model: Any, tokens: Tensor, aux_layers: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """The residual stream after each of ``aux_layers`` layers, and the final normed state."""
    hidden = model.model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    return [hidden[i] for i in aux_layers], hidden[-1]


@torch.no_grad()
def write(
    model: Any,
    form: ChatFormat,
    prompts: list[list[int]],
    *,
    in_answer: Tensor,
    temperature: Tensor,
    min_answer: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Let the target continue each prompt to ``length`` tokens, turn after turn, all rows in step.

    A prompt's tokens are forced one by one, so no row is padded. ``in_answer`` says whose turn the prompt leaves
    open; user turns are sampled at temperature 1, answers at ``temperature`` (0: greedy); an answer is not ended
    before ``min_answer`` tokens, as load tests ask for. Returns tokens and who wrote them, [rows, length].
    """
    device = model.device
    rows = len(prompts)
    after = max(len(form.before_answer), len(form.before_next_user))
    forced = torch.full((rows, length + after + 1), -1, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        forced[i, : min(len(prompt), length)] = torch.tensor(prompt[:length])
    forced = forced.to(device)
    headers = torch.full((2, after), -1, dtype=torch.long, device=device)
    headers[0, : len(form.before_answer)] = torch.tensor(form.before_answer, device=device)
    headers[1, : len(form.before_next_user)] = torch.tensor(form.before_next_user, device=device)
    in_answer, temperature, min_answer = (x.to(device) for x in (in_answer, temperature, min_answer))
    written = torch.zeros_like(min_answer)
    tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
    tokens[:, 0] = forced[:, 0]
    writer = torch.zeros(rows, length, dtype=torch.int8, device=device)
    cache = DynamicCache()
    for t in range(length - 1):
        logits = model(input_ids=tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits[:, -1].float()
        too_early = in_answer & (written < min_answer)
        logits[:, form.end].masked_fill_(too_early, float("-inf"))
        heat = torch.where(in_answer, temperature, 1.0)
        # Adding Gumbel noise times the temperature and taking the largest samples from the softmax.
        noise = -torch.empty_like(logits).exponential_().log_()
        chosen = (logits + noise * heat[:, None]).argmax(-1)
        free = forced[:, t + 1] < 0
        chosen = torch.where(free, chosen, forced[:, t + 1])
        tokens[:, t + 1] = chosen
        writer[:, t + 1] = torch.where(free, torch.where(in_answer, ANSWER, USER), FORCED).to(torch.int8)
        ended = free & (chosen == form.end)
        slot = forced[:, t + 2 : t + 2 + after]
        slot.copy_(torch.where(ended[:, None], headers[in_answer.long()][:, : slot.shape[1]], slot))
        written = torch.where(ended, 0, written + (free & in_answer).long())
        in_answer = in_answer ^ ended
    return tokens.cpu(), writer.cpu()
