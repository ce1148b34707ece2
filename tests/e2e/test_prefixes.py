"""KV that is still on its way is shared: one transfer, whoever asks, and whatever becomes of who asked first."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests
import tasks
from breaks import order_break
from checks import Served, limit, wait
from client import Answer, generate
from cluster import HOST, MODEL
from matrix import ANSWER_TOKENS, COLD_TOKENS, FULL_LAYOUTS, LAYOUTS, ONE, RANKS_OF_ALL
from test_disconnect import Caller

_seeds = itertools.count(70_000)

SHARED, OWN = 2700, 300  # tokens of a prompt
SLACK = 1.05
MARKS = 8  # tokens that two turns can begin with alike; and the size of what crosses with a prompt's KV


def _bytes_per_token() -> int:
    config = json.loads((MODEL / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4)


def _family(count: int, shared: int = SHARED) -> list[tasks.Task]:
    """Prompts that no server has seen and that share nine tenths."""
    parent = tasks.cold(next(_seeds), shared - 100, 100)
    return [tasks.follow_up(parent, i, OWN, 40) for i in range(count)]


def _page(served: Served) -> int:
    return served.cluster.spec.page_size


def _sent(served: Served) -> float:
    """KV bytes that have crossed the WAN in this test, in tokens."""
    return served.grown("prefill", "wan.bytes") / _bytes_per_token()


def _ask_all(served: Served, family: Sequence[tasks.Task], pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    for task in family:
        served.reference.answer(task.prompt, limit(task))
    return [pool.submit(served.ask, task) for task in family]


@pytest.mark.on(*LAYOUTS, "many")
def test_eight_at_once_on_one_new_prefix(served: Served) -> None:
    family = _family(8)
    with ThreadPoolExecutor(8) as pool:
        for job in _ask_all(served, family, pool):
            job.result()
    served.settle()
    assert served.grown("main", "drc.followers") >= 1
    assert _sent(served) <= SLACK * (SHARED + 8 * OWN)


_Call = tuple[str, int, list[Caller]]


def _place(served: Served, prefill: int = 0) -> dict[str, Any]:
    """What a router adds to a request."""
    port, room = served.cluster.bootstrap_ports[prefill], secrets.randbits(62)
    return {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": room}


def _call(served: Served, task: tasks.Task, prefill: int = 0, main: int = 0, tokens: int = ANSWER_TOKENS) -> _Call:
    """A request past the router, of so many tokens whatever the model says: its id, its room, and who asks for it."""
    rid, place = secrets.token_hex(8), _place(served, prefill)
    room = int(place["bootstrap_room"])
    servers = (served.cluster.prefills[prefill], served.cluster.mains[main])
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return rid, room, [Caller(s.url, task.prompt, rid=rid, sampling_params=sampling, **place) for s in servers]


@contextmanager
def _leading(served: Served, task: tasks.Task) -> Iterator[tuple[str, int]]:
    """A request whose KV is on its way, and whose answer will not be complete before: its id on MD, and its room."""
    rid, room, callers = _call(served, task)
    served.wait_for("prefill", "wan_sent", room=room)
    served.wait_for("main", "emit", room=room)
    yield rid, room
    for caller in callers:
        caller.hang_up()


def _followers(served: Served, family: Sequence[tasks.Task], pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    before = len(served.events("main", "follows"))
    jobs = _ask_all(served, family, pool)
    wait(lambda: len(served.events("main", "follows")) >= before + len(family) or None, 30, "followers")
    return jobs


@pytest.mark.on("many")
def test_a_follower_at_another_prefill(served: Served) -> None:
    """Its own prefill sends little. It is relayed all the same, since what it waits for takes long to come."""
    leader, follower = _family(2, shared=6000)
    served.reference.answer(follower.prompt, limit(follower))
    _, before, callers = _call(served, follower, prefill=1, tokens=1)  # from then on that prefill has its KV at hand
    served.wait_for("main", "finish", room=before)
    served.settle()
    for first in callers:
        first.hang_up()
    requests.post(f"{served.cluster.mains[0].url}/flush_cache", timeout=30).raise_for_status()
    place = _place(served, prefill=1)
    room = place["bootstrap_room"]
    with _leading(served, leader) as (_, leading):
        caller = Caller(served.cluster.prefills[1].url, follower.prompt, return_logprob=True, **place)
        answer = generate(served.cluster.mains[0].url, follower.prompt, limit(follower), place=place)
        caller.hang_up()
    served.check(answer, follower, limit(follower))
    known = served.wait_for("prefill", "relay_open", room=room)
    assert served.events("main", "follows", room=room) and known["node"] != _node(served, "wan_sent", leading)
    assert served.story(answer)[0]["RLD"]


def _node(served: Served, event: str, room: int) -> str:
    return str(served.wait_for("prefill", event, room=room)["node"])


@pytest.mark.on(*RANKS_OF_ALL)
def test_the_leaders_client_hangs_up(served: Served) -> None:
    """Its transfer goes on for those who follow."""
    leader, *others = _family(4)
    for task in others:
        served.reference.answer(task.prompt, limit(task))
    with ThreadPoolExecutor(4) as pool, _leading(served, leader) as (rid, room):
        jobs = _followers(served, others, pool)
        assert not served.events("main", "landed", room=room)
        requests.post(f"{served.cluster.mains[0].url}/abort_request", json={"rid": rid}, timeout=30)
        for job in jobs:
            job.result()
    served.settle()
    assert served.grown("main", "drc.refetched") == 0
    assert _sent(served) <= SLACK * (SHARED + 4 * OWN)


@pytest.mark.on(*RANKS_OF_ALL)
def test_the_leaders_transfer_fails(served: Served) -> None:
    """Those who follow fetch what they miss of it again, once; not what had landed."""
    leader, *others = _family(4)
    for task in others:
        served.reference.answer(task.prompt, limit(task))
    with ThreadPoolExecutor(4) as pool, _leading(served, leader) as (_, room):
        jobs = _followers(served, others, pool)
        assert not served.events("main", "landed", room=room)
        order = order_break(served.cluster.spec, room)
        wait(lambda: not order.exists() or None, 10, "the transfer to break")
        for job in jobs:
            job.result()
    served.settle()
    page = _page(served)
    owed = max(0, SHARED // page * page - served.grown("main", "drc.salvaged"))
    assert owed <= served.grown("main", "drc.refetched") <= owed + page + MARKS
    assert served.grown("main", "drc.refetches_failed") == 0


@pytest.mark.on(*ONE, *FULL_LAYOUTS)
def test_only_what_is_new_crosses(served: Served) -> None:
    """Prompt, relayed tokens and MD's own are all there when the next turn comes, to the page."""
    page = _page(served)
    task = tasks.cold(next(_seeds), COLD_TOKENS, ANSWER_TOKENS)
    answer = served.ask(task)
    assert served.story(answer)[0]["RLD"] and served.story(answer)[0]["MD"]
    for seed in range(2):
        served.settle()
        served.begin()
        known = (task.prompt_tokens + task.answer_tokens) // page * page
        task = tasks.follow_up(task, seed, 60, 20)
        answer = served.ask(task)
        assert served.wait_for("main", "opened", rid=answer.rid)["hit"] == known
        served.settle()
        assert _sent(served) <= task.prompt_tokens - known + page + MARKS


@pytest.mark.on(*ONE)
def test_a_prompt_that_lands_after_its_answer_is_kept(served: Served) -> None:
    task = tasks.cold(next(_seeds), COLD_TOKENS, 8)
    served.ask(task)
    assert served.grown("main", "finished_before_landing") == 1
    served.settle()
    assert served.grown("main", "drc.kept") == 1
    again = tasks.follow_up(task, 1, 60, 20)
    answer = served.ask(again)
    page = _page(served)
    assert served.wait_for("main", "opened", rid=answer.rid)["hit"] >= COLD_TOKENS // page * page


@pytest.mark.on("page1", "full:tp2")
def test_a_prompt_for_nobody_goes_last_until_somebody_comes(served: Served) -> None:
    late = tasks.cold(next(_seeds), 7000, 8)
    again = tasks.follow_up(late, 1, 60, 20)
    for task in (late, again):
        served.reference.answer(task.prompt, limit(task))
    room = served.room(served.ask(late).rid)
    served.wait_for("prefill", "demoted", room=room)
    served.ask(again)
    served.settle()
    story = [e["event"] for e in served.cluster.events("prefill") if e.get("room") == room]
    assert [word for word in story if word in ("demoted", "promoted")][:2] == ["demoted", "promoted"]
    assert served.events("main", "kept", room=room)
    assert served.grown("prefill", "wan.demoted") >= 1 and served.grown("main", "drc.followers") == 1


@pytest.mark.on("full-mains")
def test_a_prompt_for_nobody_lands_after_another_mains(served: Served) -> None:
    """Prefill's link is one for both. The other request comes later and is larger, and its main is another one."""
    late, live = tasks.cold(next(_seeds), 6900, 8), tasks.cold(next(_seeds), 7000, 8)
    _, before, callers = _call(served, live, tokens=1)  # from then on prefill has its KV at hand
    served.wait_for("main", "finish", room=before)
    served.settle()
    _, late_room, more = _call(served, late, tokens=8)
    served.wait_for("prefill", "demoted", room=late_room)
    _, live_room, others = _call(served, live, main=1)
    served.wait_for("prefill", "copied", room=late_room)
    copied = [e["room"] for e in served.events("prefill", "copied", ok=True) if e["room"] in (late_room, live_room)]
    assert copied == [live_room, late_room]
    for caller in (*callers, *more, *others):
        caller.hang_up()
    served.wait_for("main", "kept", room=late_room)


@pytest.mark.on(*ONE)
def test_a_prompt_for_nobody_gives_way(served: Served) -> None:
    """An answer has ended, its KV is still coming, and somebody else wants the link. By engine nothing can go last."""
    late, other = tasks.cold(next(_seeds), 7000, 8), tasks.cold(next(_seeds), COLD_TOKENS, 40)
    for task in (late, other):
        served.reference.answer(task.prompt, limit(task))
    room = served.room(served.ask(late).rid)
    rooms = [served.room(served.ask(other).rid), room]
    served.settle()
    copied = [e["room"] for e in served.events("prefill", "copied", ok=True) if e["room"] in rooms]
    kept, given_up = served.events("main", "kept", room=room), served.events("prefill", "given_up", room=room)
    if "engine" not in served.cluster.spec.flags.get("prefill", ()):
        assert copied == rooms and kept and not given_up
    else:
        assert copied == rooms[:1] and given_up and not kept
        assert _sent(served) < 7000 + COLD_TOKENS


@pytest.mark.on("page1", "tp2", "full-hetero-p2", "full-hetero-md2")
def test_what_has_landed_of_a_transfer_that_is_cut_off_stays(served: Served) -> None:
    """The client hangs up and asks again: on every rank of MD there are the same whole pages."""
    task, page = tasks.cold(next(_seeds), 5000, 900), _page(served)  # the answer must not be complete before
    served.reference.answer(task.prompt, limit(task))
    caller = Caller(served.cluster.url, task.prompt)
    room, some = served.room(caller.rid), task.prompt_tokens * _bytes_per_token() // 4
    wait(
        lambda: sum(e["bytes"] for e in served.events("prefill", "wan_sent", room=room)) >= some or None,
        30,
        "some of the prompt to cross",
    )
    caller.hang_up()
    served.settle()
    kept = served.grown("main", "drc.salvaged")
    assert task.prompt_tokens / 8 < kept < task.prompt_tokens and kept % page == 0
    served.begin()
    answer = served.ask(task)
    assert kept <= served.wait_for("main", "opened", rid=answer.rid)["hit"] <= kept + MARKS
    served.settle()
    assert _sent(served) <= task.prompt_tokens - kept + page + MARKS


@pytest.mark.on(*ONE)
def test_a_follower_hangs_up(served: Served) -> None:
    leader, *others = _family(3)
    for task in (leader, others[1]):
        served.reference.answer(task.prompt, limit(task))
    with ThreadPoolExecutor(2) as pool:
        before = len(served.events("main", "opened"))
        lead = pool.submit(served.ask, leader)
        wait(lambda: len(served.events("main", "opened")) > before or None, 30, "the leader")
        gone = generate(served.cluster.url, others[0].prompt, limit(others[0]), on_reply=lambda _: False)
        served.wait_for("main", "follows", room=served.room(gone.rid))
        follow = pool.submit(served.ask, others[1])
        lead.result()
        follow.result()
