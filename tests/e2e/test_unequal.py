"""Roles of different tensor-parallel sizes: SGLang sends slices of heads, and MD takes over all the same."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import tasks
from checks import Served
from matrix import HETERO

pytestmark = pytest.mark.on(*HETERO)
PROMPT_TOKENS, ANSWER_TOKENS = 1500, 2500  # four prompts take three seconds, and the relay may not be done by then

_seeds = itertools.count(70_000)


def _endless() -> tasks.Task:
    return tasks.endless(next(_seeds), PROMPT_TOKENS, ANSWER_TOKENS, cycle=60)


def test_several_at_once(served: Served) -> None:
    asked = [_endless() for _ in range(4)] + [tasks.cold(next(_seeds), 60, 15) for _ in range(4)]
    for task in asked:
        served.reference.answer(task.prompt, task.answer_tokens)
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda task: served.ask(task, task.answer_tokens), asked))
    assert served.grown("main", "handoff.tokens") >= 2, "nothing was taken over"
