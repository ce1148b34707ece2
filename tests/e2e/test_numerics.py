"""MD computes attention with other kernels than P and RLD: Triton's, in its interpreter, against torch's."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import word_model
from checks import Served
from force import forced_rid
from test_seam import _body, _post, same

pytestmark = pytest.mark.on("triton")
PROMPT_TOKENS, ANSWER_TOKENS = 30, 8  # the interpreter takes a second a token

_seeds = itertools.count(40_000)


def test_handed_over_between_kernels(served: Served) -> None:
    task = word_model.cold(next(_seeds), PROMPT_TOKENS, ANSWER_TOKENS)
    fields = {"return_logprob": True, "top_logprobs_num": 2}
    rids = [forced_rid(place) for place in (0, 1, 2, 5, 7)] + [forced_rid(2, 99)]
    expected = _post(served.reference.single.url, _body(task.prompt, forced_rid(0), {}, fields))
    with ThreadPoolExecutor(len(rids)) as pool:
        for found in pool.map(lambda rid: _post(served.cluster.url, _body(task.prompt, rid, {}, fields)), rids):
            same(found, expected)
    assert served.grown("main", "handoff.tokens") >= 2 + 5 + 7
    assert "first batch for our attention kernel" in served.cluster.mains[0].log.read_text()
