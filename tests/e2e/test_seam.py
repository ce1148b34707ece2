"""A request that changes hands at any of its tokens is answered as by a single server, whatever it asks for."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
import word_model
from checks import LOGPROB_TOLERANCE, Served
from cluster import HOST, Server
from force import forced_rid

pytestmark = pytest.mark.on("seam", "full-seam-sync")

PROMPT_TOKENS, ANSWER_TOKENS = 60, 12
ID = word_model.vocabulary()
WORD = {index: word for word, index in ID.items()}
EOS = 1
_seeds = itertools.count(20_000)


@dataclass(frozen=True)
class Feature:
    """What a request asks for; ``sampling`` and ``fields`` may be functions of the greedy answer's ids."""

    name: str
    sampling: Any = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0
    """From which place on; what SGLang's own handoff carries for P's token is less than a message of P's does."""


def _stop_across(ids: list[int]) -> dict[str, Any]:
    return {"stop": [WORD[ids[6]][2:] + WORD[ids[7]]]}


def _processor() -> dict[str, Any]:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return {"custom_logit_processor": DisallowedTokensLogitsProcessor().to_str()}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "array", "items": {"enum": [1, 23]}, "minItems": 2}},
    "required": ["a", "b"],
}
FEATURES = [
    Feature("greedy"),
    Feature("frequency_penalty", {"frequency_penalty": 1.5, "ignore_eos": True}),
    Feature("presence_penalty", {"presence_penalty": 1.9, "ignore_eos": True}),
    Feature("repetition_penalty", {"repetition_penalty": 1.8, "ignore_eos": True}),
    Feature("min_new_tokens", {"min_new_tokens": ANSWER_TOKENS + 3, "max_new_tokens": ANSWER_TOKENS + 5}),
    Feature("one_token", {"max_new_tokens": 1}),
    Feature("exact_limit", {"max_new_tokens": ANSWER_TOKENS}),
    Feature("ignore_eos", {"ignore_eos": True, "max_new_tokens": ANSWER_TOKENS + 4}),
    Feature("stop_token", lambda ids: {"stop_token_ids": [ids[7]]}),
    Feature("stop_string", _stop_across),
    Feature("stop_string_kept", lambda ids: {**_stop_across(ids), "no_stop_trim": True}),
    Feature("stop_regex", lambda ids: {"stop_regex": [f"{WORD[ids[5]]}.{{2}}{WORD[ids[6]][2:]}"]}),
    Feature("logit_bias", lambda ids: {"logit_bias": {str(ids[4]): -100.0}}),
    Feature("special_tokens", {"skip_special_tokens": False}),
    Feature("logprobs", fields={"return_logprob": True}),
    Feature("top_logprobs", fields={"return_logprob": True, "top_logprobs_num": 3}),
    Feature("token_ids_logprob", fields={"return_logprob": True, "token_ids_logprob": [5, 77, 3000]}, first=1),
    Feature("input_logprobs", fields={"return_logprob": True, "logprob_start_len": 0}),
    Feature("top_p", {"top_p": 0.9, "top_k": 5, "min_p": 0.1}),
    Feature("regex", {"regex": "([a-z]{4}){10}", "max_new_tokens": 30}),
    Feature("ebnf", {"ebnf": 'root ::= ("tako" | "mire") ("{" | "}")+ "mire"', "max_new_tokens": 8}),
    Feature("json_schema", {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 30}),
    Feature("grammar_and_penalty", {"regex": "([a-z]{4}){12}", "frequency_penalty": 1.5}),
    Feature("seed", {"temperature": 1.5, "sampling_seed": 7, "ignore_eos": True}),
    Feature("seed_top_p", {"temperature": 2.0, "top_p": 0.9, "top_k": 50, "sampling_seed": 8, "ignore_eos": True}),
    Feature("logit_processor", lambda ids: {"custom_params": {"token_ids": [ids[3], ids[8]]}}, _processor()),
]


def _body(prompt: str, rid: str, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    limits = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS + 1}
    return {"rid": rid, "text": prompt, "sampling_params": {**limits, **sampling}, **fields}


def _post(url: str, body: Mapping[str, Any], path: str = "/generate") -> Any:
    response = requests.post(url + path, json=body, timeout=120)
    assert response.ok, f"{response.status_code}: {response.text[:2000]}"
    return response.json()


def through_both(served: Served, path: str, body: Mapping[str, Any], prefill: int = 0, main: int = 0) -> Any:
    """What MD answers if P and MD are asked as a router asks them."""
    cluster = served.cluster
    place = {
        "bootstrap_host": HOST,
        "bootstrap_port": cluster.bootstrap_ports[prefill],
        "bootstrap_room": secrets.randbits(62),
    }
    with ThreadPoolExecutor(2) as pool:
        servers: list[Server] = [cluster.prefills[prefill], cluster.mains[main]]
        jobs = [pool.submit(_post, server.url, {**body, **place}, path) for server in servers]
        jobs[0].result()
        return jobs[1].result()


def same(found: Any, expected: Any) -> None:
    """Ids and text equal, every kind of logprob within the tolerance, one entry a token."""
    assert found["output_ids"] == expected["output_ids"]
    assert found["text"] == expected["text"]
    mine, theirs = found["meta_info"], expected["meta_info"]
    for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert mine[name] == theirs[name], name
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        for side in ("output", "input"):
            key = f"{side}_{name}"
            if theirs.get(key) or mine.get(key):
                same_rows(key, mine.get(key), theirs.get(key))


def same_rows(name: str, found: Any, expected: Any) -> None:
    """Logprobs, of any nesting: (value, id, text) at the leaves."""
    if isinstance(expected, float):
        assert abs(found - expected) < LOGPROB_TOLERANCE, (name, found, expected)
    elif isinstance(expected, list):
        assert found is not None and len(found) == len(expected), (name, found, expected)
        for mine, theirs in zip(found, expected, strict=True):
            same_rows(name, mine, theirs)
    else:
        assert found == expected, (name, found, expected)


def places(tokens: int, first: int = 0) -> Sequence[str]:
    """Rids that hand over after each token of an answer, and some that go on with the relay after the landing."""
    at_each = [forced_rid(k) for k in range(first, tokens + 1)]
    return [*at_each, forced_rid(2, 99), forced_rid(min(tokens, 5), 99)]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_each_place(served: Served, feature: Feature) -> None:
    single = served.reference.single.url
    task = word_model.cold(next(_seeds), PROMPT_TOKENS, ANSWER_TOKENS)
    greedy = [ID[word] for word in task.answer.split()]
    sampling = feature.sampling(greedy) if callable(feature.sampling) else feature.sampling
    expected = _post(single, _body(task.prompt, secrets.token_hex(8), sampling, feature.fields))
    if feature.name == "greedy":
        assert expected["output_ids"] == [*greedy, EOS]
    rids = places(len(expected["output_ids"]) - 1, feature.first)
    with ThreadPoolExecutor(len(rids)) as pool:
        bodies = [_body(task.prompt, rid, sampling, feature.fields) for rid in rids]
        found = list(pool.map(lambda body: _post(served.cluster.url, body), bodies))
    for rid, answer in zip(rids, found, strict=True):
        try:
            same(answer, expected)
        except AssertionError as error:
            raise AssertionError(f"handed over {rid[-5:]} (land.take): {error}") from error
