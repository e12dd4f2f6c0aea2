from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.offer.load import Arrival
from loadtest.offer.prompt_tokens import BYTE_ESTIMATE
from loadtest.offer.prompts import (
    CONVERSATIONS_AT_ONCE,
    COPY_TASKS,
    QUESTIONS_PER_CONTEXT,
    TURNS,
    code_snippets,
    passages,
)
from loadtest.offer.request_body import ChatRequest
from loadtest.offer.workload import MIXED_WEIGHTS, WORKLOAD_NAMES, load_workload

# In `shared-prefix` and `rag`, so in `mixed`, a beginning is shared on purpose; `multi-turn` grows one.
SHARING = {"shared-prefix", "rag", "mixed", "multi-turn"}
INDEPENDENT = tuple(name for name in WORKLOAD_NAMES if name not in SHARING)


def text(request: ChatRequest) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in request.messages)


def texts(name: str, seed: int, count: int) -> list[str]:
    return [text(load_workload(name).request(seed, number)) for number in range(count)]


def test_passages_are_many_and_longer_than_an_answer() -> None:
    assert len(passages()) >= 30
    assert len(set(passages())) == len(passages())
    # 80 words are over 100 tokens: an answer of 48 never runs out of text to copy.
    assert all(80 <= len(one.split()) <= 140 for one in passages())


def test_code_snippets_compile_one_by_one() -> None:
    assert len(code_snippets()) >= 10
    for snippet in code_snippets():
        compile(snippet, "snippet", "exec")


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_same_seed_and_number_give_the_same_prompt(name: str) -> None:
    first = texts(name, 7, 20)
    load_workload.cache_clear()
    assert texts(name, 7, 20) == first
    # In any order: a prompt does not depend on those made before it.
    backwards = [text(load_workload(name).request(7, number)) for number in reversed(range(20))]
    assert backwards[::-1] == first
    assert texts(name, 8, 20) != first


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_different_numbers_are_different_prompts(name: str) -> None:
    assert len(set(texts(name, 3, 1000))) == 1000


@pytest.mark.parametrize("name", INDEPENDENT)
def test_prompts_of_a_run_do_not_begin_alike(name: str) -> None:
    # 300 characters are past the wording of every task: more in common is text that a cache would save.
    longest = max(shared_length(one, other) for one, other in pairwise(sorted(texts(name, 3, 300))))
    assert longest < 300


def shared_length(one: str, other: str) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def test_copy_prompts_hold_the_text_to_copy() -> None:
    (message,) = load_workload("copy").request(0, 0).messages
    assert any(passage in message["content"] for passage in passages())
    assert any(message["content"].startswith(task.partition("{")[0]) for task in COPY_TASKS)


def test_an_edit_names_something_that_is_in_its_code() -> None:
    for number in range(len(code_snippets())):
        content = load_workload("edit").request(5, number).messages[0]["content"]
        task, code = content.split("```python\n")
        old, new = task.split("`")[1::2]
        assert old in code
        assert new not in code


def test_requests_about_the_same_sources_share_them() -> None:
    prompts = texts("rag", 2, 2 * QUESTIONS_PER_CONTEXT)
    same, other = prompts[:QUESTIONS_PER_CONTEXT], prompts[QUESTIONS_PER_CONTEXT:]
    assert all(shared_length(prompts[0], one) > 0.9 * len(one) for one in same)
    assert all(shared_length(prompts[0], one) < 0.1 * len(one) for one in other)


def test_a_shared_prefix_is_the_same_for_all_requests_of_a_seed() -> None:
    load = load_workload("shared-prefix")
    systems = {load.request(1, number).messages[0]["content"] for number in range(50)}
    assert len(systems) == 1
    assert load.request(2, 0).messages[0]["content"] not in systems
    (system,) = systems
    assert BYTE_ESTIMATE.count(system) == pytest.approx(512 * 7 / 8, abs=4)


def test_a_turn_begins_with_the_turn_before_it() -> None:
    load = load_workload("multi-turn")
    for conversation in range(CONVERSATIONS_AT_ONCE):
        turns = [
            load.request(4, conversation + turn * CONVERSATIONS_AT_ONCE).messages for turn in range(TURNS)
        ]
        assert [len(messages) for messages in turns] == [1, 3, 5, 7, 9]
        for earlier, later in pairwise(turns):
            assert later[: len(earlier)] == earlier
        assert [message["role"] for message in turns[-1]] == ["user", "assistant"] * 4 + ["user"]
    first = load.request(4, 0).messages
    assert load.request(4, TURNS * CONVERSATIONS_AT_ONCE).messages[0] != first[0], "a new conversation"


def test_turns_grow_evenly_to_the_size() -> None:
    load = load_workload("multi-turn", prompt_tokens=1000)
    sizes = [
        sum(BYTE_ESTIMATE.count(message["content"]) for message in load.request(4, number).messages)
        for number in range(0, TURNS * CONVERSATIONS_AT_ONCE, CONVERSATIONS_AT_ONCE)
    ]
    assert sizes == pytest.approx([200, 400, 600, 800, 1000], abs=8)


def test_a_mix_has_its_parts_by_weight() -> None:
    load = load_workload("mixed:copy=3,story=1")
    counts = Counter(
        "copy" if "text exactly" in text(load.request(1, number)) else "story" for number in range(2000)
    )
    assert counts["copy"] / 2000 == pytest.approx(0.75, abs=0.04)
    assert set(MIXED_WEIGHTS) <= set(WORKLOAD_NAMES)


def test_a_part_of_a_mix_is_what_it_is_alone() -> None:
    mixed = load_workload("mixed:rag=1", prompt_tokens=300)
    assert mixed.request(1, 5) == load_workload("rag", prompt_tokens=300).request(1, 5)
    assert mixed.request(1, 5).output_tokens == 32


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_lengths_of_a_trace_win(name: str) -> None:
    load = load_workload(name, prompt_tokens=900, output_tokens=5)
    for number in range(TURNS * CONVERSATIONS_AT_ONCE):
        request = load.request(1, number, Arrival(0, 400, 77))
        size = sum(BYTE_ESTIMATE.count(message["content"]) for message in request.messages)
        assert size == pytest.approx(400, abs=8)
        assert request.output_tokens == 77


def test_the_length_of_an_answer() -> None:
    assert load_workload("rag").request(1, 0).output_tokens == 32
    assert load_workload("rag").request(1, 0, Arrival(0, output_tokens=7)).output_tokens == 7
    for name in ("rag", "mixed:rag=1"):
        assert load_workload(name, output_tokens=50).request(1, 0).output_tokens == 50


def test_a_file_is_used_up_before_a_row_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Three?"}]
    rows = [
        {"prompt": "One?"},
        {"prompt": "Two?", "output_tokens": 9, "note": "ignored"},
        {"messages": own},
    ]
    path.write_text("\ufeff" + "\r\n".join(map(json.dumps, rows)) + "\r\n\r\n")
    load = load_workload(f"file:{path}", output_tokens=30)
    requests = [load.request(1, number) for number in range(6)]
    assert {text(one) for one in requests[:3]} == {
        "user: One?",
        "user: Two?",
        "system: Be brief.\nuser: Three?",
    }
    assert requests[:3] == requests[3:]
    assert {text(one): one.output_tokens for one in requests}["user: Two?"] == 9
    assert {one.output_tokens for one in requests} == {9, 30}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{}", "line 2: needs either messages or prompt"),
        ('{"prompt": "a", "messages": []}', "line 2: needs either messages or prompt"),
        ('{"prompt": " "}', "line 2: prompt=' ' must be text"),
        ('{"prompt": 5}', "line 2: prompt=5 must be text"),
        ('{"messages": []}', r"line 2: messages=\[\] must be a list of at least one"),
        ('{"messages": ["hi"]}', "line 2: 'hi' must be a message"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "must be a message with a role of system"),
        ('{"messages": [{"role": "user", "content": [1]}]}', r"content=\[1\] must be text"),
        ('{"prompt": "a", "output_tokens": 0}', r"output_tokens=0 must be a whole number in 1\.\."),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens=True must be a whole number"),
        ("not json", "line 2: not JSON"),
        ("7", "line 2: 7 is not an object"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=fault) as error:
        load_workload(f"file:{path}")
    assert str(path) in str(error.value)


def test_workloads_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"workload 'chess' is unknown; there are chat, rag, copy"):
        load_workload("chess")
    with pytest.raises(ValueError, match="cannot be read"):
        load_workload("file:")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no prompts in it"):
        load_workload(f"file:{tmp_path / 'empty.jsonl'}")
    with pytest.raises(ValueError, match="prompt_tokens=50, but a file's prompts are sent as they are"):
        load_workload(f"file:{tmp_path / 'empty.jsonl'}", prompt_tokens=50)
    with pytest.raises(ValueError, match=r"prompt_tokens=0 must be in 1\.\."):
        load_workload("chat", prompt_tokens=0)
    with pytest.raises(ValueError, match=r"output_tokens=0 must be in 1\.\."):
        load_workload("chat", output_tokens=0)
    for mix, fault in [
        ("mixed:chat", "weight '' of chat"),
        ("mixed:chat=0", "weight '0' of chat"),
        ("mixed:chess=1", "'chess' must be one of"),
        ("mixed:chat=1,chat=2", "'chat' must be one of .*, each once"),
    ]:
        with pytest.raises(ValueError, match=fault):
            load_workload(mix)
