"""Roles of different tensor-parallel sizes: SGLang sends slices of heads, and MD takes over all the same."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import tasks
from checks import Served
from matrix import HETERO
from test_answers import assert_relayed

pytestmark = pytest.mark.on(*HETERO)
PROMPT_TOKENS, ANSWER_TOKENS = 200, 1500

_seeds = itertools.count(70_000)


def _endless() -> tasks.Task:
    return tasks.endless(next(_seeds), PROMPT_TOKENS, ANSWER_TOKENS, cycle=60)


def test_relayed(served: Served) -> None:
    answer = served.ask(_endless(), ANSWER_TOKENS)
    assert_relayed(served, answer)


def test_several_at_once(served: Served) -> None:
    asked = [_endless() for _ in range(4)] + [tasks.cold(next(_seeds), 60, 15) for _ in range(4)]
    for task in asked:
        served.reference.answer(task.prompt, task.answer_tokens)
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda task: served.ask(task, task.answer_tokens), asked))
