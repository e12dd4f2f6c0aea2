from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.offer import user_files
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
from loadtest.offer.request_body import ChatRequest, build_body
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


def prompts_of(path: Path, *rows: object) -> list[ChatRequest]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    load = load_workload(f"file:{path}", output_tokens=30)
    found = [load.request(1, number) for number in range(len(rows))]
    return sorted(found, key=lambda one: json.dumps(one.messages))


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "One?"},
                                  {"from": "gpt", "value": "1"}, {"from": "human", "value": "More?"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "Hi"}]},
    {"id": "c", "conversations": [{"from": "gpt", "value": "Hi"}, {"from": "user", "value": "Two?"}]},
]  # fmt: skip


@pytest.mark.parametrize("chunk_chars", [7, 1_000_000])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_gzipped", [False, True])
def test_sharegpt_s_array_asks_the_first_question_of_each_conversation(
    indent: int | None,
    is_gzipped: bool,
    chunk_chars: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_files, "CHUNK_CHARS", chunk_chars)
    path = tmp_path / ("t.json.gz" if is_gzipped else "t.json")
    data = json.dumps(SHAREGPT, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if is_gzipped else data)
    load = load_workload(f"file:{path}")
    assert {text(load.request(1, number)) for number in range(2)} == {"user: One?", "user: Two?"}
    assert load.notes == (
        f"{path}: of each of 3 conversations the first question is sent",
        f"{path}: 1 conversations are left out: nobody asks anything in them",
    )


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_an_array_that_is_cut_is_refused_with_its_item(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(SHAREGPT)[:-cut])
    with pytest.raises(ValueError, match=r"t\.json, item \d: not JSON"):
        load_workload(f"file:{path}")


def test_wildchat_s_conversations(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Why?", "language": "English"},
        {"role": "assistant", "content": "So."},
    ]
    (request,) = prompts_of(
        tmp_path / "t.jsonl", {"conversation_hash": "x", "conversation": turns, "turn": 1}
    )
    assert text(request) == "user: Why?"


def test_an_openai_batch_file_is_heard_and_what_is_not_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"custom_id": str(size), "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "m", "messages": [{"role": "user", "content": f"{size}?"}], key: size, "temperature": 1}}
        for size, key in ((7, "max_tokens"), (9, "max_completion_tokens"))
    ]  # fmt: skip
    assert [(text(one), one.output_tokens) for one in prompts_of(path, *rows)] == [
        ("user: 7?", 7), ("user: 9?", 9),
    ]  # fmt: skip
    notes = load_workload(f"file:{path}", output_tokens=30).notes
    assert notes == (f"{path}: keys that are not sent: model, temperature",)


def test_a_row_s_max_tokens_is_the_length_of_its_answer(tmp_path: Path) -> None:
    (request,) = prompts_of(tmp_path / "t.jsonl", {"prompt": "a", "max_tokens": 11})
    assert request.output_tokens == 11
    assert load_workload(f"file:{tmp_path / 't.jsonl'}").notes == ()


def test_tools_and_content_parts_are_sent_as_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {}}]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]
    row = {"messages": messages, "tools": tools, "tool_choice": "auto"}
    (request,) = prompts_of(tmp_path / "t.jsonl", row)
    body = build_body(request, model="m", seed=1)
    assert [body[key] for key in ("messages", "tools", "tool_choice")] == [messages, tools, "auto"]
    salted = build_body(request, model="m", seed=1, salts_text=True)["messages"]
    assert salted[0]["content"][0]["text"].startswith("Run ")
    assert salted[0]["content"][1:] == parts
    assert request.messages == tuple(messages)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "output_tokens": 5, "max_tokens": 6}, "output_tokens=5, max_tokens=6 contradict"),
        ({"prompt": "a", "max_tokens": 0}, r"max_tokens=0 must be a whole number in 1\.\."),
        ({"prompt": "a", "tools": "f"}, "tools='f' must be a list of objects"),
        (
            {"instruction": "i", "output": "o"},
            r"the keys of Alpaca; make prompts of it: jq -c .* > .*t\.prompts\.jsonl",
        ),
        ({"instruction": "i", "response": "o"}, "the keys of Dolly; "),
        ({"custom_id": "1", "body": {"model": "m", "input": "i"}}, "the keys of OpenAI's Responses API; "),
        ({"question": "q"}, r"has question; name yours: jq -c .*\.YOURS"),
    ],
)
def test_a_row_of_another_layout_is_named_with_the_line_that_converts_it(
    row: object, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=fault):
        load_workload(f"file:{tmp_path / 't.jsonl'}")


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
@pytest.mark.parametrize("name", ["t.json", "t.jsonl", "t.jsonl.gz", "t.txt"])
def test_the_line_that_converts_works(name: str, tmp_path: Path) -> None:
    rows = [{"instruction": "Add", "input": "1 1", "output": "2"}, {"instruction": "Stop", "output": "."}]
    data = json.dumps(rows) if name == "t.json" else "\n".join(map(json.dumps, rows))
    if name == "t.txt":
        data = "Add\n1 1"
    (tmp_path / name).write_bytes(gzip.compress(data.encode()) if name.endswith(".gz") else data.encode())
    with pytest.raises(ValueError, match="jq") as error:
        load_workload(f"file:{tmp_path / name}")
    said = str(error.value)
    command = said[said.index("gzip -dc") :] if name.endswith(".gz") else said[said.index("jq -") :]
    subprocess.run(["sh", "-c", command], check=True)
    made = load_workload(f"file:{tmp_path / 't.prompts.jsonl'}")
    wanted = {"user: Add", "user: 1 1"} if name == "t.txt" else {"user: Add\n1 1", "user: Stop\n"}
    assert {text(made.request(1, number)) for number in range(2)} == wanted


def test_a_file_of_text_is_told_how_to_become_json(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("What is a lock?\n")
    with pytest.raises(ValueError, match=r"line 1: not JSON.*; a text file with a prompt a line: jq -Rc"):
        load_workload(f"file:{tmp_path / 't.txt'}")


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
