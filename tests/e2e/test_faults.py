"""A relay that refuses, dies or stays away costs a pause at worst. The tests build on each other, in this order."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tasks
from checks import Served, limit
from client import Answer, generate
from cluster import HOST
from flip import order_flip
from matrix import ANSWER_TOKENS, COLD_TOKENS
from test_disconnect import Caller

pytestmark = pytest.mark.on("faults")
PEER_TIMEOUT_S = 12.0  # after this P has forgotten a silent relay

_seeds = itertools.count(9000)


def _cold(prompt_tokens: int = COLD_TOKENS, answer_tokens: int = ANSWER_TOKENS) -> tasks.Task:
    return tasks.cold(next(_seeds), prompt_tokens, answer_tokens)


def test_short_prompts_when_the_policy_is_always(served: Served) -> None:
    for tokens, answer in ((12, 3), (60, 15), (200, 40)):
        served.ask(_cold(tokens, answer))
    assert served.grown("prefill", "relay.opened") >= 1


def test_the_copy_begins_with_the_first_chunk(served: Served) -> None:
    room = served.room(served.ask(_cold()).rid)
    sent = served.events("prefill", "wan_sent", room=room)
    queued = served.wait_for("prefill", "queued", room=room)["t"]
    assert min(e["t"] - e["seconds"] for e in sent) < queued, "it waited for the end of prefill"


def test_three_cold_prompts_and_room_for_one_relay(served: Served) -> None:
    three = [_cold() for _ in range(3)]
    for task in three:
        served.reference.answer(task.prompt, limit(task))
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(served.ask, three))
    assert served.grown("prefill", "relay.refused") + served.grown("relay", "relay.refused") >= 1
    assert any(served.story(answer)[0]["RLD"] for answer in answers)


def test_a_damaged_page_changes_the_answer(served: Served) -> None:
    """If this fails, the other tests could not notice KV that came across wrong."""
    task = _cold()
    words = task.prompt.split()
    # The edge that the walk takes last: `; key value`, looked up long after MD has taken over.
    key = next(i for i in range(len(words) - 2) if words[i] == ";" and words[i + 1] == task.walk[-3])
    order = order_flip(served.cluster.spec, key + 2)
    answer = generate(served.cluster.url, task.prompt, limit(task))
    assert not order.exists(), "nothing was damaged"
    assert answer.ids != served.reference.answer(task.prompt, limit(task)).ids
    with pytest.raises(AssertionError, match="ids part at"):
        served.check(answer, task, limit(task))


def test_relay_dies_while_it_decodes(served: Served) -> None:
    task = _cold()
    killed = threading.Event()

    def kill(answer: Answer) -> None:
        if len(answer.ids) >= 20 and not killed.is_set():
            killed.set()
            served.cluster.relays[0].kill()

    served.ask(task, on_reply=kill)
    assert killed.is_set()


def test_relay_just_died(served: Served) -> None:
    """P still counts on it."""
    served.ask(_cold())


def test_relay_died_long_ago(served: Served) -> None:
    time.sleep(PEER_TIMEOUT_S)
    answer = served.ask(_cold())
    assert served.story(answer)[0]["RLD"] == 0
    assert served.counters("prefill")["peers{role=relay}"] == 0


def test_relay_comes_back(served: Served) -> None:
    served.restart(served.cluster.relays[0])
    answer = served.ask(_cold())
    made, extended = served.story(answer)
    assert made["RLD"] >= 1 and extended >= 2, (made, extended)


def test_relay_dies_in_mid_copy(served: Served) -> None:
    task = _cold(7000, 300)
    before = len(served.events("relay", "relay_start"))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(served.ask, task)
        while len(served.events("relay", "relay_start")) == before and not job.done():
            time.sleep(0.01)
        time.sleep(0.3)  # some chunks of the prompt are across
        served.cluster.relays[0].kill()
        answer = job.result()
    assert served.story(answer)[0]["RLD"] == 0


def test_prefill_stops_only_when_its_copies_have_left(served: Served) -> None:
    """P's client has its answer, MD's copy is on the way, and P is told to stop."""
    task = _cold()
    told = threading.Event()
    prefill = served.cluster.prefills[0]

    def stop(answer: Answer) -> None:
        room = served.room(answer.rid)
        if served.events("prefill", "queued", room=room) and not told.is_set():
            assert not served.events("main", "landed", room=room)
            told.set()
            prefill.terminate()

    answer = served.ask(task, on_reply=stop)
    assert told.is_set()
    assert served.events("main", "landed", room=served.room(answer.rid)), "the copy was cut off"
    prefill.reap()
    served.restart(prefill)


def test_main_dies_while_the_relay_decodes(served: Served) -> None:
    """P and RLD get over it: `Served.end` checks that they hold nothing any more."""
    main, prompt = served.cluster.mains[0], _cold().prompt
    if not served.cluster.relays[0].alive:
        served.restart(served.cluster.relays[0])
    # Past the router, which takes its time to see that P is back.
    bootstrap = served.cluster.bootstrap_ports[0]
    place = {"bootstrap_host": HOST, "bootstrap_port": bootstrap, "bootstrap_room": secrets.randbits(62)}
    callers = [Caller(server.url, prompt, **place) for server in (served.cluster.prefills[0], main)]
    served.wait_for("main", "emit", room=place["bootstrap_room"], source="RLD")
    main.kill()
    for caller in callers:
        caller.hang_up()
    served.settle()
    served.restart(main)
