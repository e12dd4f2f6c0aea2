"""The training of a draft head: its arithmetic against the library's, and the whole command at tiny size."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from deploy.train_draft import __main__ as command  # noqa: E402
from deploy.train_draft import evaluation, training  # noqa: E402
from deploy.train_draft.head import DraftHead, HeadShape, dense_mask, load  # noqa: E402
from deploy.train_draft.target import ANSWER, FORCED, LENGTHENED, USER, ChatFormat, Target, Writer  # noqa: E402

VOCABULARY = 96
FORM = ChatFormat([1, 10, 11], [12, 13], [14], 2)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target(model: Any) -> Target:
    return Target(model, torch.device("cpu"), torch.float32)


def test_the_targets_states_are_those_of_transformers(model: Any, target: Target) -> None:
    tokens = torch.randint(VOCABULARY, (3, 17))
    with torch.no_grad():
        theirs = model.model(input_ids=tokens, output_hidden_states=True).hidden_states
    aux, last = target.states(tokens, (0, 2, 3))
    for ours, layer in zip(aux, (0, 2, 3), strict=True):
        torch.testing.assert_close(ours, theirs[layer], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, theirs[-1], rtol=1e-4, atol=1e-4)


def test_greedy_text_is_what_the_model_finds_most_likely(model: Any, target: Target) -> None:
    prompts = [[1, 10, 11, 40, 2, 12, 13], [1, 10, 11, 50, 60, 70, 2, 12, 13]]
    writer = Writer(target, FORM, 2, 40, cuda_graphs=False)
    tokens, by = writer.write(prompts, [True, True], [0.0, 0.0], [0, 200])
    with torch.no_grad():
        logits = model(input_ids=tokens.long()).logits
    for row in range(2):
        assert tokens[row, : len(prompts[row])].tolist() == prompts[row]
        assert (by[row, : len(prompts[row])] == FORCED).all()
        for t in range(39):
            if by[row, t + 1] == ANSWER:
                assert tokens[row, t + 1] == logits[row, t].argmax(), (row, t)
            if by[row, t + 1] == LENGTHENED:
                assert tokens[row, t + 1] != FORM.end
    assert (by[1, 9:] == LENGTHENED).all()


def test_turns_alternate_and_have_their_headers(target: Target) -> None:
    writer = Writer(target, FORM, 16, 128, cuda_graphs=False)
    tokens, by = writer.write([FORM.before_user] * 16, [False] * 16, [1.0] * 16, [0] * 16)
    ends = 0
    for row in range(16):
        for t in range(3, 120):
            if tokens[row, t] == FORM.end and by[row, t] in (USER, ANSWER):
                header = FORM.before_answer if by[row, t] == USER else FORM.before_next_user
                after = t + 1 + len(header)
                assert tokens[row, t + 1 : after].tolist() == header
                assert by[row, after] == (ANSWER if by[row, t] == USER else USER)
                ends += 1
    assert ends > 5


def shape(layers: int) -> HeadShape:
    return HeadShape(32, 4, 2, 8, 40, layers, 24, (0, 2, 3), 10000.0, 1e-6)


@pytest.mark.parametrize("layers", [1, 2])
def test_training_sees_what_drafting_one_token_after_another_sees(target: Target, layers: int) -> None:
    torch.manual_seed(0)
    head = DraftHead(shape(layers))
    tokens = torch.randint(VOCABULARY, (1, 12))
    aux, _ = target.states(tokens, (0, 2, 3))
    padded = torch.nn.functional.pad(tokens, (0, 5))
    together = list(head.unroll(aux, target.embed(padded), 3))
    # Alone: the text ends at the anchor, and each step adds one token.
    anchor = 7
    alone_aux = [x[:, : anchor + 1] for x in aux]
    alone = list(head.unroll(alone_aux, target.embed(padded[:, : anchor + 5]), 3))
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a[:, anchor], b[:, -1], rtol=1e-4, atol=1e-5)


def test_a_later_step_sees_the_text_and_its_own_drafts_only() -> None:
    mask = dense_mask(4, 12, torch.device("cpu"))
    assert mask[2].nonzero()[:, 0].tolist() == [0, 1, 2, 6, 10]


def test_the_walk_counts_as_decoding_does() -> None:
    # Answer from place 3: two right drafts, then none, then one.
    steps, accepted = evaluation.walk([0, 0, 2, 9, 9, 0, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9], 3, 2, 7)
    assert (steps, accepted) == (3, [2, 1])


def test_a_choice_outside_the_vocabulary_teaches_no_hard_label() -> None:
    state = torch.randn(1, 2, 8)
    output = torch.randn(5, 8)
    soft = torch.zeros(1, 2, 5)
    loss, hit = training.draft_loss(state, output, soft, torch.tensor([[-1, -1]]), torch.ones(1, 2))
    assert float(loss) == 0
    assert not hit.any()
    loss, _ = training.draft_loss(state, output, soft, torch.tensor([[3, -1]]), torch.ones(1, 2))
    expected = -training.HARD_SHARE * (state @ output.T).log_softmax(-1)[0, 0, 3]
    torch.testing.assert_close(loss, expected)


def test_the_end_is_no_label_where_it_was_forbidden() -> None:
    output, last = torch.eye(4), torch.tensor([[0.0, 0, 9, 1], [0.0, 0, 9, 1]])
    said, choice = training.target_says(output, last, torch.tensor([2, 3]), 2, torch.tensor([True, False]))
    assert choice.tolist() == [3, 2]
    assert said[0, 0] == 0


class Tokenizer:
    """As much of a tokenizer as the command uses: a word is its number."""

    eos_token, eos_token_id = "</s>", 2

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [3 + sum(map(ord, w)) % (VOCABULARY - 3) for w in text.split()][:20]

    def __call__(self, texts: list[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t) for t in texts]}

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(f"word{i}." for i in row) for row in rows]

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool) -> str:
        return "".join(f"<{t['role']}> {t['content']}</s>" for t in turns)


def test_the_whole_command(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(command, "load_tokenizer", lambda _: Tokenizer())
    lines: list[str] = []
    monkeypatch.setattr(command, "say", lines.append)

    def run(*more: str) -> None:
        sizes = (
            "--rows 12 --length 64 --short-length 32 --step-tokens 256 --draft-vocab 32 --mlp 40 --unroll 3"
        )
        places = ["--model", str(tmp_path / "model"), "--work", str(tmp_path / "w"), "--device", "cpu"]
        command.main([*places, *sizes.split(), "--report-every", "1", "--learning-rate", "0.02", *more])

    run("--stages", "data", "--data-s", "0.1")
    run("--stages", "data", "--data-s", "0.1")
    assert len(list((tmp_path / "w" / "data").glob("long-*.pt"))) >= 2
    run("--stages", "train", "--max-steps", "30", "--train-until", "0.5")
    half = torch.load(tmp_path / "w" / "head.pt")
    run("--stages", "train,evaluate,export", "--max-steps", "30")
    whole = torch.load(tmp_path / "w" / "head.pt")
    assert (half["place"], whole["place"]) == (0.5, 1.0)
    assert (half["steps"], whole["steps"]) == (30, 60)
    losses = [float(x.split("loss ")[1].split()[0]) for x in lines if ": step " in x]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])

    head, draft_ids = load(tmp_path / "w" / "head")
    assert draft_ids.tolist() == whole["draft_ids"].tolist()
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, whole["average"][name].bfloat16().float())
    figures = json.loads((tmp_path / "w" / "head" / "figures.json").read_text())
    card = (tmp_path / "w" / "head" / "README.md").read_text()
    assert f"{figures['held_out']['story']['mean_accepted_length']['3']:.2f}" in card
