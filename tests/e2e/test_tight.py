"""MD's pool is too small for all who come, and SGLang retracts requests now and then: all wait, none fails. Some have a
higher priority.

Sampling seeds do not count on these servers. The prompts are made of words that mean the same to both tokenizers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import tasks
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
    rids = [forced_rid(5 * i, min(99, 8 * i)) for i in range(len(jobs))]
    bodies = [_body(t.prompt, rids[i], longer, {"priority": i % 3}) for i, t in enumerate(jobs)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda body: _post(served.cluster.url, body), bodies))
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine["output_ids"] == theirs["output_ids"], bodies[i]["rid"]
    log = served.cluster.mains[0].log.read_text()
    assert "etract requests" in log or "esting retraction" in log, "the pool was never short"


def test_temperature_keeps_the_distribution(served: Served) -> None:
    """Three tokens of three equally biased words: P's, RLD's and MD's. Both ways must draw from the same 27 triples."""
    words = [ID[w] for w in tasks.WORDS[100:103]]
    sampling = {"temperature": 6.0, "max_new_tokens": 3, "logit_bias": {str(w): 100.0 for w in words}}
    prompts = [word_model.cold(next(_seeds), 24, 5).prompt for _ in range(20)] * 15
    counts = []
    for url in (served.reference.single.url, served.cluster.url):
        with ThreadPoolExecutor(20) as pool:
            bodies = [_body(prompt, forced_rid(2), sampling, {}) for prompt in prompts]
            answers = pool.map(lambda body, url=url: _post(url, body), bodies)
            counts.append(Counter(tuple(answer["output_ids"]) for answer in answers))
    assert sum(counts[0].values()) == sum(counts[1].values()) == len(prompts)
    from scipy.stats import chi2_contingency

    common = [c for c in counts[0] | counts[1] if counts[0][c] + counts[1][c] >= 6]
    assert len(common) >= 10, "the test sees too little"
    table = [[count[c] for c in common] for count in counts]
    rare = [len(prompts) - sum(row) for row in table]
    if sum(rare):
        table = [[*row, left] for row, left in zip(table, rare, strict=True)]
    assert chi2_contingency(table).pvalue > 1e-6, counts
