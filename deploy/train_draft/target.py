"""The target: its states for training, and text that it writes itself.

Its forward pass is written out here, for both uses need what a library's generation does not give: the residual
stream between layers, compiled, and thousands of rows decoded in step from a static cache, replayed as CUDA graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Who put a token there: a prompt or a turn's header, the answer, the user's turn, an answer kept from ending.
FORCED, ANSWER, USER, LENGTHENED = 0, 1, 2, 3
WINDOW = 64  # the cache is read in multiples of this many tokens


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Token ids around the turns of a chat; ``end`` closes a turn, be it the user's or the answer."""

    before_user: list[int]
    before_answer: list[int]  # after the user's ``end``
    before_next_user: list[int]  # after the answer's ``end``
    end: int


class Layer(NamedTuple):
    """Weights of a decoder layer; those that read the same input lie in one matrix."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Sizes(NamedTuple):
    """What a layer's arithmetic needs beside its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


@lru_cache(maxsize=16)  # made on the host: a copy to the device in every step would wait for it
def rope_table(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim / 2] of the rotary embedding, float32."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [..., head_dim] by ``cos`` and ``sin``, which broadcast to its halves."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def layer_forward(x: Tensor, layer: Layer, sizes: Sizes, cos: Tensor, sin: Tensor) -> Tensor:
    """The residual stream [batch, tokens, hidden] after one more layer, causal."""
    batch, tokens, _ = x.shape
    heads = F.linear(rms_norm(x, layer.input_norm, sizes.eps), layer.qkv)
    heads = heads.view(batch, tokens, -1, sizes.head_dim).transpose(1, 2)
    q, k, v = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], 1)
    mixed = F.scaled_dot_product_attention(
        rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
    )
    x = x + F.linear(mixed.transpose(1, 2).reshape(batch, tokens, -1), layer.out)
    gate, up = F.linear(rms_norm(x, layer.mlp_norm, sizes.eps), layer.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, layer.down)


class Target:
    """A frozen Llama-like model: grouped-query attention, rotary embedding, SwiGLU, no biases."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Takes the weights of a transformers model.

        Raises:
            ValueError: the model computes something else than this class does.
        """
        c = model.config
        rope = dict(getattr(c, "rope_parameters", None) or {})
        if rope.get("rope_type", "default") != "default" or c.hidden_act != "silu":
            raise ValueError(f"{c.model_type}: rope {rope}, activation {c.hidden_act}: only default, silu")
        if odd := [
            name for name, _ in model.named_parameters() if name.endswith(".bias") or "q_norm" in name
        ]:
            raise ValueError(f"{c.model_type}: {odd[0]}: only layers without biases and norms of heads")

        def own(*weights: Tensor) -> Tensor:
            return torch.cat([w.detach() for w in weights]).to(device, dtype).contiguous()

        self.device, self.dtype, self.vocabulary, self.hidden = device, dtype, c.vocab_size, c.hidden_size
        self.theta = float(rope.get("rope_theta") or c.rope_theta)
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.sizes = Sizes(c.num_attention_heads, c.num_key_value_heads, head_dim, float(c.rms_norm_eps))
        self.mlp = int(c.intermediate_size)
        self.embedding = own(model.get_input_embeddings().weight)
        self.output = own(model.get_output_embeddings().weight)
        self.norm = own(model.model.norm.weight)
        self.layers = [
            Layer(
                own(m.input_layernorm.weight),
                own(m.self_attn.q_proj.weight, m.self_attn.k_proj.weight, m.self_attn.v_proj.weight),
                own(m.self_attn.o_proj.weight),
                own(m.post_attention_layernorm.weight),
                own(m.mlp.gate_proj.weight, m.mlp.up_proj.weight),
                own(m.mlp.down_proj.weight),
            )
            for m in model.model.layers
        ]
        self.layer: Callable[[Tensor, Layer, Sizes, Tensor, Tensor], Tensor] = layer_forward

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    @torch.no_grad()
    def states(self, tokens: Tensor, aux_layers: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The residual stream after each of ``aux_layers`` layers (ascending), and the final normed state."""
        cos, sin = rope_table(tokens.shape[1], self.sizes.head_dim, self.theta, self.device)
        x = self.embed(tokens)
        streams = []
        for layer in self.layers:
            streams.append(x)
            x = self.layer(x, layer, self.sizes, cos, sin)
        streams.append(x)
        return [streams[i] for i in aux_layers], rms_norm(x, self.norm, self.sizes.eps)


def load_target(directory: Path, device: str) -> Target:
    """The frozen model, in bfloat16 on a GPU and in float32 elsewhere."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return Target(model, torch.device(device), dtype)


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
        raise ValueError(
            f"chat template: {after_user!r} and {rest!r} do not begin with the end token {end!r}"
        )

    def ids(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False))

    return ChatFormat(
        ids(before), ids(after_user[len(end) :]), ids(rest[len(end) :]), int(tokenizer.eos_token_id)
    )


class Writer:
    """Decodes ``rows`` texts of ``length`` tokens in step, so that none is padded.

    A prompt's tokens are forced one by one. Turns alternate until a row is full: user turns are sampled at
    temperature 1, answers at the row's temperature (0: greedy), and an answer does not end before the row's
    ``min_answer`` tokens, as load tests ask for.
    """

    def __init__(
        self, target: Target, form: ChatFormat, rows: int, length: int, *, cuda_graphs: bool
    ) -> None:
        device, s = target.device, target.sizes
        self.target, self.end, self.rows, self.length = target, form.end, rows, length
        after = max(len(form.before_answer), len(form.before_next_user))
        self.headers = torch.full((2, after), -1, dtype=torch.long, device=device)
        for i, header in enumerate((form.before_answer, form.before_next_user)):
            self.headers[i, : len(header)] = torch.tensor(header, device=device)
        self.header_columns = 2 + torch.arange(after, device=device)
        self.columns = length + after + 1
        cache = (len(target.layers), rows * s.kv_heads, -(-length // WINDOW) * WINDOW, s.head_dim)
        self.keys = torch.zeros(cache, dtype=target.dtype, device=device)
        self.values = torch.zeros(cache, dtype=target.dtype, device=device)
        self.positions = torch.arange(cache[2], device=device)
        self.cos, self.sin = rope_table(length, s.head_dim, target.theta, device)

        def table() -> Tensor:
            return torch.zeros(rows, self.columns, dtype=torch.long, device=device)

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        self.tokens, self.forced, self.writer = table(), table(), table()
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.in_answer, self.temperature = column(torch.bool), column(torch.float32)
        self.written, self.min_answer = column(torch.long), column(torch.long)
        self.graphs: dict[int, Any] = {}
        if cuda_graphs:
            self._capture()

    def write(
        self, prompts: list[list[int]], in_answer: list[bool], temperature: list[float], min_answer: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Continue each prompt to a full row; ``in_answer`` says whose turn it leaves open.

        Returns tokens (int32) and who wrote them (int8), both [rows, length], in main memory.
        """
        self._reset(prompts, in_answer, temperature, min_answer)
        for place in range(self.length - 1):
            window = (place // WINDOW + 1) * WINDOW
            if self.graphs:
                self.graphs[window].replay()
            else:
                self._step(window)
        n = self.length
        return self.tokens[:, :n].to("cpu", torch.int32), self.writer[:, :n].to("cpu", torch.int8)

    def _reset(
        self, prompts: list[list[int]], in_answer: list[bool], temperature: list[float], min_answer: list[int]
    ) -> None:
        n = self.columns
        forced = torch.tensor([p[: self.length] + [-1] * (n - min(len(p), self.length)) for p in prompts])
        self.forced.copy_(forced)
        self.tokens.zero_()
        self.tokens[:, 0] = self.forced[:, 0]
        self.writer.zero_()
        self.place.zero_()
        self.written.zero_()
        self.in_answer.copy_(torch.tensor(in_answer))
        self.temperature.copy_(torch.tensor(temperature))
        self.min_answer.copy_(torch.tensor(min_answer))

    @torch.no_grad()
    def _step(self, window: int) -> None:
        """Write the token after ``place`` in each row; the cache is read up to ``window`` tokens.

        Everything that changes lies in tensors that stay where they are, so that a captured step can be replayed.
        """
        place = self.place
        logits = self._logits(window)
        too_early = self.in_answer & (self.written < self.min_answer)
        logits[:, self.end].masked_fill_(too_early, float("-inf"))
        heat = torch.where(self.in_answer, self.temperature, 1.0)
        # Gumbel noise times the temperature, added to the logits: the largest is a sample of their softmax.
        noise = torch.empty(logits.shape, device=logits.device).exponential_().log_()
        chosen = noise.mul_(-heat[:, None]).add_(logits).argmax(-1)
        next_place = place + 1
        forced = self.forced.index_select(1, next_place)[:, 0]
        free = forced < 0
        chosen = torch.where(free, chosen, forced)
        answer = torch.where(too_early, LENGTHENED, ANSWER)
        by = torch.where(free, torch.where(self.in_answer, answer, USER), FORCED)
        self.tokens.index_copy_(1, next_place, chosen[:, None])
        self.writer.index_copy_(1, next_place, by[:, None])
        ended = free & (chosen == self.end)
        columns = place + self.header_columns
        slot = self.forced.index_select(1, columns)
        header = self.headers[self.in_answer.long()]
        self.forced.index_copy_(1, columns, torch.where(ended[:, None], header, slot))
        self.written.copy_(torch.where(ended, 0, self.written + (free & self.in_answer).long()))
        self.in_answer.logical_xor_(ended)
        place.add_(1)

    def _logits(self, window: int) -> Tensor:
        """Of the token after ``place``, [rows, vocabulary]; enters the token at ``place`` into the cache."""
        t, s, place = self.target, self.target.sizes, self.place
        groups = (self.rows * s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        cos, sin = self.cos.index_select(0, place), self.sin.index_select(0, place)
        hidden_from = torch.where(self.positions[:window] <= place, 0.0, float("-inf")).to(t.dtype)
        x = t.embed(self.tokens.index_select(1, place)[:, 0])
        for i, layer in enumerate(t.layers):
            heads = F.linear(rms_norm(x, layer.input_norm, s.eps), layer.qkv).view(self.rows, -1, s.head_dim)
            turned = rotate(heads[:, : s.heads + s.kv_heads], cos, sin)
            queries = turned[:, : s.heads].reshape(groups) * s.head_dim**-0.5
            self.keys[i].index_copy_(1, place, turned[:, s.heads :].reshape(-1, 1, s.head_dim))
            self.values[i].index_copy_(1, place, heads[:, s.heads + s.kv_heads :].reshape(-1, 1, s.head_dim))
            scores = queries @ self.keys[i, :, :window].transpose(1, 2) + hidden_from
            mixed = scores.softmax(-1) @ self.values[i, :, :window]
            x = x + F.linear(mixed.view(self.rows, -1), layer.out)
            gate, up = F.linear(rms_norm(x, layer.mlp_norm, s.eps), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(rms_norm(x, t.norm, s.eps), t.output)

    def _capture(self) -> None:
        """Record one step for each window; launching its 900 kernels one by one could cost more than they do."""
        windows = range(WINDOW, self.keys.shape[2] + 1, WINDOW)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for window in (windows[0], windows[-1]):  # libraries set themselves up outside the recording
                self._step(window)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        for window in windows:
            self.place.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._step(window)
            self.graphs[window] = graph
        torch.cuda.synchronize()
