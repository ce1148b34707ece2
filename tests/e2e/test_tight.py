"""MD's pool is too small for all who come, and SGLang retracts requests now and then: all wait, none fails."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import word_model
from checks import Served
from force import forced_rid
from test_seam import ID, PROMPT_TOKENS, _body, _post

pytestmark = pytest.mark.on("tight")

_seeds = itertools.count(60_000)


def test_a_full_pool_delays_and_never_fails(served: Served) -> None:
    jobs = [word_model.cold(next(_seeds), PROMPT_TOKENS, 15) for _ in range(12)]
    longer = {"ignore_eos": True, "max_new_tokens": 90}
    expected = [_post(served.reference.single.url, _body(t.prompt, forced_rid(0), longer, {})) for t in jobs]
    assert [ID[w] for w in jobs[0].answer.split()] == expected[0]["output_ids"][:15]
    bodies = [_body(t.prompt, forced_rid(5 * i, min(99, 8 * i)), longer, {}) for i, t in enumerate(jobs)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda body: _post(served.cluster.url, body), bodies))
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine["output_ids"] == theirs["output_ids"], bodies[i]["rid"]
    log = served.cluster.mains[0].log.read_text()
    assert "etract requests" in log or "esting retraction" in log, "the pool was never short"
