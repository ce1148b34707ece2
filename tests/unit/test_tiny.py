"""The tiny graph-walk model in examples/tiny: its task generators (no torch) and its answers (CPU)."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

import tasks  # noqa: E402

MODEL = TINY / "model"
SIZE_LIMIT_BYTES = 8_000_000


@pytest.mark.parametrize("prompt_tokens", [5, 60, 61, 62, 1000, 6000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_cold_has_the_sizes_asked_for_and_the_answer_its_edges_give(prompt_tokens: int, share: float) -> None:
    answer_tokens = max(1, int(share * ((prompt_tokens - 2) // 3)))
    task = tasks.cold(7, prompt_tokens, answer_tokens)
    assert len(task.prompt.split()) == task.prompt_tokens == prompt_tokens
    assert len(task.answer.split()) == task.answer_tokens == answer_tokens
    assert task.ends and task.answer.endswith(tasks.STOP)
    assert tasks.solve(task.prompt) == task.answer


def test_seeds_fix_the_task() -> None:
    assert tasks.cold(1, 100, 20) == tasks.cold(1, 100, 20)
    assert tasks.cold(1, 100, 20).prompt != tasks.cold(2, 100, 20).prompt
    assert tasks.cold(0, 30, 4).prompt == tasks.cold(0, 30, 4).turn


def test_every_word_has_one_edge_and_one_mention_as_value() -> None:
    tokens = tasks.cold(3, 3000, 500).prompt.split()
    edges = [(tokens[i + 1], tokens[i + 2]) for i, token in enumerate(tokens[:-3]) if token == tasks.EDGE]
    keys = [key for key, _ in edges if key != tasks.EDGE]
    values = [value for key, value in edges if key != tasks.EDGE and value != tasks.STOP]
    assert len(set(keys)) == len(keys) > 900
    assert len(set(values)) == len(values)


def test_short_answers_have_one_to_four_tokens() -> None:
    assert {tasks.short(seed, 200).answer_tokens for seed in range(8)} == {1, 2, 3, 4}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", tasks.MODES)
def test_follow_up_extends_the_whole_first_turn(seed: int, mode: str) -> None:
    first = tasks.cold(seed, 150 + seed, 20)
    second = tasks.follow_up(first, seed, 90 + seed, 1 + seed, mode)
    assert second.prompt == f"{first.prompt} {first.answer} {second.turn}"
    assert len(second.turn.split()) == 90 + seed
    assert second.answer_tokens == 1 + seed
    assert tasks.solve(second.prompt) == second.answer
    assert [message["role"] for message in second.chat()] == ["user", "assistant", "user"]
    assert " ".join(message["content"] for message in second.chat()) == second.prompt
    third = tasks.follow_up(second, seed, 100, 12)
    assert tasks.solve(third.prompt) == third.answer


def test_mixed_follow_up_needs_edges_of_both_turns() -> None:
    first = tasks.cold(5, 300, 10)
    second = tasks.follow_up(first, 0, 100, 20)
    with pytest.raises(ValueError):
        tasks.solve(second.turn)
    with pytest.raises(ValueError):
        tasks.solve(first.prompt.rsplit(" ", 1)[0] + " " + second.walk[0])
    assert tasks.solve(tasks.follow_up(first, 0, 100, 20, "new").turn)
    assert set(tasks.follow_up(first, 0, 100, 5, "old").walk) <= first.used | {tasks.STOP}


def test_follow_up_after_a_cut_answer() -> None:
    first = tasks.endless(1, 200, 60, cycle=10)
    assert not first.ends and first.answer.split()[:10] == first.answer.split()[10:20]
    assert tasks.solve(first.prompt, max_tokens=60) == first.answer
    cut = " ".join(first.answer.split()[:7])
    second = tasks.follow_up(first, 1, 80, 9, answered=f" {cut}")
    assert second.prompt.startswith(f"{first.prompt} {cut} {tasks.EDGE}")
    assert tasks.solve(second.prompt) == second.answer


@pytest.mark.parametrize(
    "make",
    [
        lambda: tasks.cold(0, 4, 1),
        lambda: tasks.cold(0, 60, 0),
        lambda: tasks.cold(0, 60, 20),
        lambda: tasks.cold(0, 8000, 400),
        lambda: tasks.endless(0, 60, 30, cycle=1),
        lambda: tasks.endless(0, 60, 8192),
        lambda: tasks.follow_up(tasks.cold(0, 60, 5), 0, 60, 5, "other"),
        lambda: tasks.follow_up(tasks.cold(0, 60, 5), 0, 60, 6, "old"),
        lambda: tasks.follow_up(tasks.cold(0, 60, 5), 0, 20, 15, "new"),
        lambda: tasks.follow_up(tasks.cold(0, 6000, 500), 0, 1690, 5),
        lambda: tasks.follow_up(tasks.endless(0, 60, 30), 0, 60, 6, "old"),
        lambda: tasks.solve("; a b ; c d"),
        lambda: tasks.solve("; a b ; c d # a"),
    ],
)
def test_impossible_requests_are_refused(make) -> None:
    with pytest.raises(ValueError):
        make()


def test_the_shipped_files_are_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < SIZE_LIMIT_BYTES


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_one_token_a_word_and_nothing_added(tokenizer) -> None:
    text = " ".join((*tasks.MARKS, *tasks.WORDS))
    ids = tokenizer(text).input_ids
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert len(set(ids)) == len(text.split()) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode(ids[: count + 1]) for count in range(20)]
    assert all(longer.startswith(shorter + " ") for shorter, longer in pairwise(pieces))


def test_chat_template_gives_the_plain_prompt(tokenizer) -> None:
    second = tasks.follow_up(tasks.cold(0, 60, 5), 0, 40, 6)
    rendered = tokenizer.apply_chat_template(second.chat(), tokenize=False, add_generation_prompt=True)
    assert rendered == second.prompt


def _conversation(length: int) -> list[tasks.Task]:
    first = tasks.cold(length, length, 12)
    return [first, tasks.follow_up(first, 1, 90, 15, "mixed"), tasks.follow_up(first, 2, 30, 8, "old")]


@pytest.mark.parametrize("length", [60, 333, 1200])
def test_greedy_answers_are_right(model, tokenizer, length: int) -> None:
    for task in (*_conversation(length), tasks.short(length, length)):
        ids = tokenizer(task.prompt, return_tensors="pt").input_ids
        output = model.generate(ids, max_new_tokens=task.answer_tokens + 5)[0, ids.shape[1] :]
        assert tokenizer.decode(output, skip_special_tokens=True) == task.answer
        assert output[-1] == tokenizer.eos_token_id


def test_long_walk_is_right_by_a_margin_and_not_certain(model, tokenizer) -> None:
    import torch

    task = tasks.cold(1, 4000, 450)
    ids = tokenizer(f"{task.prompt} {task.answer}{tokenizer.eos_token}", return_tensors="pt").input_ids
    answer = ids[0, task.prompt_tokens :]
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
    top = logits.topk(2)
    assert torch.equal(top.indices[:, 0], answer)
    assert (top.values[:, 0] - top.values[:, 1]).min() > 1.0
    logprobs = logits.log_softmax(-1).gather(1, answer[:, None])
    assert -0.5 < logprobs.mean() < -0.05 and logprobs.std() > 0.02


def test_another_value_in_the_context_changes_the_answer(model, tokenizer) -> None:
    task = tasks.cold(2, 600, 30)
    word, right = task.walk[20], task.walk[21]
    wrong = tasks.cold(3, 600, 30).walk[0]
    prompt = task.prompt.replace(f"{tasks.EDGE} {word} {right}", f"{tasks.EDGE} {word} {wrong}")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = tokenizer.decode(model.generate(ids, max_new_tokens=21)[0, ids.shape[1] :]).split()
    assert output[:20] == list(task.walk[1:21]) and output[20] == wrong
