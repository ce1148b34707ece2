"""Roles of different tensor-parallel sizes: SGLang sends slices of heads, and MD takes over all the same."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import tasks
from checks import Served
from matrix import HETERO

pytestmark = pytest.mark.on(*HETERO)
ANSWER_TOKENS = 2500  # the relay may not be done when four prompts have crossed
EQUAL_TOKENS, UNEQUAL_TOKENS = 1500, 200  # of a prompt, as P's ranks and RLD's are: the engine is slow if they are not

_seeds = itertools.count(70_000)


def _endless(prompt_tokens: int) -> tasks.Task:
    return tasks.endless(next(_seeds), prompt_tokens, ANSWER_TOKENS, cycle=60)


def test_several_at_once(served: Served) -> None:
    tps = served.cluster.spec.tps
    size = EQUAL_TOKENS if tps.get("prefill") == tps.get("relay") else UNEQUAL_TOKENS
    asked = [_endless(size) for _ in range(4)] + [tasks.cold(next(_seeds), 60, 15) for _ in range(4)]
    for task in asked:
        served.reference.answer(task.prompt, task.answer_tokens)
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda task: served.ask(task, task.answer_tokens), asked))
    assert served.grown("main", "handoff.tokens") >= 2, "nothing was taken over"
