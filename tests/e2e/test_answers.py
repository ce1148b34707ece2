"""The answer is a single server's answer, whatever way it takes through the roles."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tasks
from checks import Served, limit
from client import Answer, generate
from cluster import MODEL
from matrix import ANSWER_TOKENS, COLD_TOKENS, KV_BYTES, LAYOUTS, ONE

_seeds = itertools.count(1000)


def cold(prompt_tokens: int = COLD_TOKENS, answer_tokens: int = ANSWER_TOKENS) -> tasks.Task:
    """A prompt that no server has seen."""
    return tasks.cold(next(_seeds), prompt_tokens, answer_tokens)


def assert_relayed(served: Served, answer: Answer) -> None:
    """The relay made tokens that the client got, and MD took over with a real pass over them."""
    made, extended = served.story(answer)
    assert made["RLD"] >= 1 and made["P"] + made["RLD"] >= 2, made
    assert extended >= 2 and made["MD"] >= 1, (made, extended)
    assert extended >= made["P"] + made["RLD"] - 1, (made, extended)
    assert sum(made.values()) == len(answer.ids)
    assert served.grown("main", "tokens.emitted{source=RLD}") >= made["RLD"]
    assert served.grown("main", "handoffs{mode=") >= 1
    assert served.grown("prefill", "relay.opened") >= 1


def assert_direct(served: Served, answer: Answer) -> None:
    """P and MD alone, and yet the first token came from P."""
    made, extended = served.story(answer)
    assert made["RLD"] == 0 and extended == 0, (made, extended)
    assert made["P"] == 1, made


@pytest.mark.on(*LAYOUTS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_cold_prompt_is_relayed(served: Served, stream: bool) -> None:
    task = cold()
    answer = served.ask(task, stream=stream)
    assert_relayed(served, answer)
    by_stream = served.grown("prefill", "stream.bytes{")
    assert served.grown("prefill", "wan.bytes") > 0
    assert by_stream == 0 if "engine" in served.cluster.spec.flags.get("prefill", ()) else by_stream > 0
    if stream:
        room = served.room(answer.rid)
        landed = served.wait_for("main", "landed", room=room)["t"]
        assert answer.arrivals[0] < landed, "the first token came no earlier than the KV"


@pytest.mark.on(*LAYOUTS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_cold_prompt_in_the_chat_api(served: Served, stream: bool) -> None:
    served.chat(cold(), stream)
    assert served.grown("main", "tokens.emitted{source=RLD}") >= 1
    assert served.grown("main", "handoff.tokens") >= 2


@pytest.mark.on(*LAYOUTS)
def test_second_turn_goes_without_relay(served: Served) -> None:
    first = cold()
    served.ask(first)
    served.settle()
    second = tasks.follow_up(first, 1, 60, 15)
    answer = served.ask(second)
    assert_direct(served, answer)
    hit = served.wait_for("main", "opened", rid=answer.rid)["hit"]
    assert hit > 0.9 * second.prompt_tokens - 16, hit


def test_short_prompt_goes_without_relay(served: Served) -> None:
    assert_direct(served, served.ask(cold(60, 15)))


@pytest.mark.on(*LAYOUTS)
def test_answer_finished_before_landing(served: Served) -> None:
    answer = served.ask(cold(COLD_TOKENS, 8))
    made, extended = served.story(answer)
    assert made["MD"] == 0 and extended == 0, (made, extended)
    assert served.grown("main", "finished_before_landing") == 1
    assert served.grown("prefill", "wan.bytes") < 0.9 * COLD_TOKENS * KV_BYTES, "the link was not freed"


@pytest.mark.on(*ONE)
@pytest.mark.parametrize("room", [1, 2, 20])
def test_token_limit_before_landing(served: Served, room: int) -> None:
    answer = served.ask(cold(), room)
    assert len(answer.ids) == room
    assert served.grown("main", "finished_before_landing") == 1


@pytest.mark.on(*ONE)
def test_several_samples_are_refused(served: Served) -> None:
    """Stock SGLang gives all of them one bootstrap room, and its schedulers end with an exception."""
    client = openai.OpenAI(base_url=f"{served.cluster.url}/v1", api_key="none", timeout=120, max_retries=0)
    messages: Any = cold(60, 12).chat()
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model="default", messages=messages, max_tokens=13, n=3)
    assert "send as many requests instead" in str(refused.value) or refused.value.status_code >= 500
    served.ask(cold(60, 12))


@pytest.mark.on(*ONE)
def test_stop_string_in_eager_tokens(served: Served) -> None:
    task = cold()
    word = task.answer.split()[10]
    expected = " ".join(task.answer.split()[:10])
    answer = generate(served.cluster.url, task.prompt, limit(task), stop=[f" {word}"])
    assert answer.text.strip() == expected
    assert answer.finish is not None and answer.finish["type"] == "stop"


@pytest.mark.on(*LAYOUTS)
def test_twenty_at_once(served: Served) -> None:
    history = cold(1500, 480)  # long enough for its KV to land
    served.ask(history)
    mixed = [cold(1500, 200) for _ in range(5)]
    mixed += [tasks.follow_up(history, i, 60, 15) for i in range(5)]
    mixed += [cold(1500, 4) for _ in range(3)]
    mixed += [cold(60, 15) for _ in range(4)]
    chats = [cold(800, 100) for _ in range(3)]
    for task in mixed:
        served.reference.answer(task.prompt, limit(task))
    for i, task in enumerate(chats):
        served.reference.chat(task, i % 2 == 0, limit(task))
    with ThreadPoolExecutor(20) as pool:
        jobs = [pool.submit(served.ask, task, stream=i % 2 == 0) for i, task in enumerate(mixed)]
        jobs += [pool.submit(served.chat, task, i % 2 == 0) for i, task in enumerate(chats)]
        for job in jobs:
            job.result()
    assert served.grown("main", "tokens.emitted{source=RLD}") >= 1


@pytest.mark.on(*ONE)
def test_bench_serving(served: Served, tmp_path: Path) -> None:
    result = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", served.cluster.url]
    command += ["--model", str(MODEL), "--tokenizer", str(MODEL), "--dataset-name", "random-ids", "--num-prompts", "8"]
    command += ["--random-input-len", "800", "--random-output-len", "60", "--max-concurrency", "4"]
    command += ["--output-file", str(result), "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(result.read_text().splitlines()[-1])["completed"] == 8
