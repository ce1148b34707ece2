"""Handovers in the middle of what the OpenAI-compatible APIs offer, and of what an operator may do meanwhile."""

from __future__ import annotations

import http.client
import itertools
import random
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests
import tasks
import word_model
from checks import Served, wait
from force import forced_rid
from test_seam import ANSWER_TOKENS, EOS, ID, PROMPT_TOKENS, _body, _post, same_rows, through_both

pytestmark = pytest.mark.on("seam", "full-seam-sync")

THINK_FIRST = {"logit_bias": {str(ID["</think>"]): 100}}  # P's token ends the reasoning, then grammars begin
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "yz",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]},
    },
}
CHATS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2, **NO_THINKING},
    "regex_after_reasoning": {"regex": "([a-z]{4}){6}", **THINK_FIRST},
    "tool_call": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, **NO_THINKING},
    "stop": {"stop": ["."], **NO_THINKING},
}
_seeds = itertools.count(30_000)


def _cold(prompt_tokens: int = PROMPT_TOKENS, answer_tokens: int = ANSWER_TOKENS) -> tasks.Task:
    return word_model.cold(next(_seeds), prompt_tokens, answer_tokens)


def _choice(reply: Any) -> Any:
    choice = reply["choices"][0]
    for call in choice.get("message", {}).get("tool_calls") or ():
        call.pop("id", None)
    return choice


@pytest.mark.parametrize("name", CHATS)
def test_chat(served: Served, name: str) -> None:
    messages = [{"role": "user", "content": _cold().prompt}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 20, **CHATS[name]}
    expected = _post(served.reference.single.url, body, "/v1/chat/completions")
    if name == "tool_call":
        assert _choice(expected)["message"].get("tool_calls"), expected
    tokens = expected["usage"]["completion_tokens"]
    rids = [forced_rid(place) for place in sorted({1, 2, 3, 5, tokens // 2, tokens - 2, tokens - 1})]

    def ask(rid: str) -> Any:
        return through_both(served, "/v1/chat/completions", {**body, "rid": rid})

    with ThreadPoolExecutor(len(rids)) as pool:
        for rid, found in zip(rids, pool.map(ask, rids), strict=True):
            mine, theirs = _choice(found), _choice(expected)
            logprobs = mine.pop("logprobs"), theirs.get("logprobs")
            assert mine == {k: v for k, v in theirs.items() if k != "logprobs"}, rid
            if logprobs[1]:
                same_rows(rid, [[t["logprob"], t["token"]] for t in logprobs[0]["content"]], _rows(logprobs[1]))
            for count in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
                assert found["usage"][count] == expected["usage"][count], (rid, count)


def _rows(logprobs: Any) -> list[Any]:
    return [[t["logprob"], t["token"]] for t in logprobs["content"]]


def test_completion(served: Served) -> None:
    body = {"model": "default", "prompt": _cold().prompt, "temperature": 0, "max_tokens": 12, "logprobs": 2}
    expected = _post(served.reference.single.url, body, "/v1/completions")
    rids = [forced_rid(place) for place in (1, 4, 11)]
    with ThreadPoolExecutor(len(rids)) as pool:
        found = list(pool.map(lambda rid: through_both(served, "/v1/completions", {**body, "rid": rid}), rids))
    right = expected["choices"][0]
    for rid, answer in zip(rids, found, strict=True):
        mine = answer["choices"][0]
        assert (mine["text"], mine["finish_reason"]) == (right["text"], right["finish_reason"]), rid
        assert mine["logprobs"]["tokens"] == right["logprobs"]["tokens"], rid
        same_rows(rid, mine["logprobs"]["token_logprobs"], right["logprobs"]["token_logprobs"])
        for count in ("prompt_tokens", "completion_tokens"):
            assert answer["usage"][count] == expected["usage"][count], (rid, count)


def test_usage_at_the_end_of_a_stream(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.cluster.url}/v1", api_key="none", timeout=120, max_retries=0)
    task = _cold()
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": task.prompt}],
        temperature=0,
        max_tokens=ANSWER_TOKENS + 1,
        stream=True,
        stream_options={"include_usage": True},
    )
    usages = [chunk.usage for chunk in stream if chunk.usage]
    assert len(usages) == 1
    assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS + 1)


def test_cached_tokens_are_those_of_prefill_and_main(served: Served) -> None:
    task = _cold()
    body = _body(task.prompt, forced_rid(4), {}, {})
    fresh = _post(served.cluster.url, body)["meta_info"]["cached_tokens"]
    served.settle()
    again = _post(served.cluster.url, {**body, "rid": secrets.token_hex(8)})["meta_info"]["cached_tokens"]
    assert fresh < 16 and again >= PROMPT_TOKENS - 16, (fresh, again)


def test_passes_and_modes_are_counted(served: Served) -> None:
    jobs = [_body(_cold().prompt, forced_rid(8), {}, {"return_logprob": own}) for own in [False] * 8 + [True]]
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda body: _post(served.cluster.url, body), jobs))
    assert served.grown("main", "handoffs{mode=catch-up}") == 9
    assert served.grown("main", "handoff.passes{kind=mixed}") >= 1
    assert served.grown("main", "handoff.passes{kind=own}") >= 1
    assert served.grown("main", "handoff.tokens") == 9 * 8


def test_aborts_in_every_state_of_a_handover(served: Served) -> None:
    """Also while a middle pass is in flight: each request's KV is given back exactly once."""
    task = _cold(PROMPT_TOKENS, 15)
    endless = {"ignore_eos": True, "max_new_tokens": 400}
    rng = random.Random(5)
    rids = [forced_rid(rng.randrange(1, 60), 99) for _ in range(40)]

    def ask(rid: str) -> None:
        requests.post(f"{served.cluster.url}/generate", json=_body(task.prompt, rid, endless, {}), timeout=120)

    threads = [threading.Thread(target=ask, args=(rid,)) for rid in rids]
    for thread in threads:
        thread.start()
    for rid in rids:
        time.sleep(rng.random() * 0.05)
        _abort(served, rid)
    for rid in rids:
        _abort(served, rid)  # some had not arrived yet
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def _abort(served: Served, rid: str) -> None:
    for server in (*served.cluster.mains, *served.cluster.prefills):
        requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=30)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_in_the_middle(served: Served, mode: str) -> None:
    """Weights may change in a pause; the requests go on afterwards and end as if nothing had been."""
    main = served.cluster.mains[0].url
    jobs = [_cold(PROMPT_TOKENS, 15) for _ in range(6)]
    expected = [_post(served.reference.single.url, _body(t.prompt, secrets.token_hex(8), {}, {})) for t in jobs]
    bodies = [_body(task.prompt, forced_rid(3 + i, 99), {}, {}) for i, task in enumerate(jobs)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(_post, served.cluster.url, body) for body in bodies]
        served.wait_for("main", "emit", room=served.room(bodies[-1]["rid"]))
        assert requests.post(f"{main}/pause_generation", json={"mode": mode}, timeout=30).ok
        time.sleep(0.5)
        assert requests.post(f"{main}/continue_generation", json={}, timeout=30).ok
        for answer, right in zip(answers, expected, strict=True):
            assert answer.result()["output_ids"] == right["output_ids"]


def test_an_answer_that_ends_while_it_is_taken_over(served: Served) -> None:
    """The last eager token is the answer's last: MD must not sample another."""
    rids = [forced_rid(land, 99) for land in range(1, 12)]
    task = _cold(PROMPT_TOKENS, 11)
    with ThreadPoolExecutor(len(rids)) as pool:
        found = list(pool.map(lambda rid: _post(served.cluster.url, _body(task.prompt, rid, {}, {})), rids))
    right = [*(ID[word] for word in task.answer.split()), EOS]
    assert all(answer["output_ids"] == right for answer in found)
    wait(lambda: not served.held() or None, 45, "everything given back", served.held)


def test_an_idle_connection_stays_open(served: Served) -> None:
    """SGLang closes it after five seconds; a router that sends at that moment loses its request."""
    servers = (*served.cluster.prefills, *served.cluster.mains)
    idle = [http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10) for server in servers]
    for wait_s in (6, 0):
        for connection in idle:
            connection.request("GET", "/health")
            reply = connection.getresponse()
            assert (reply.status, reply.read(), reply.will_close) == (200, b"", False)
        time.sleep(wait_s)
    for connection in idle:
        connection.close()
