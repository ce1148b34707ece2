"""Several prefills, relays and mains: any relay serves any pair, and relays come and go while the others run."""

from __future__ import annotations

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import tasks
from checks import Served, limit, wait
from matrix import ANSWER_TOKENS, COLD_TOKENS

pytestmark = pytest.mark.on("many")

_seeds = itertools.count(50_000)


def _cold(prompt_tokens: int = COLD_TOKENS, answer_tokens: int = ANSWER_TOKENS) -> tasks.Task:
    return tasks.cold(next(_seeds), prompt_tokens, answer_tokens)


def _ask_all(served: Served, asked: list[tasks.Task]) -> None:
    for task in asked:
        served.reference.answer(task.prompt, limit(task))
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(served.ask, asked))


def _opened(served: Served, which: int) -> float:
    state = served.cluster.state(served.cluster.relays[which])
    return float(state["counters"].get("relay.opened", 0))


def test_several_prefills_share_several_relays(served: Served) -> None:
    before = [_opened(served, i) for i in range(2)]
    _ask_all(served, [_cold(2000, 300) for _ in range(8)])
    assert all(_opened(served, i) > before[i] for i in range(2)), "the least loaded relay was not chosen"
    for server in served.cluster.prefills:
        assert served.cluster.state(server)["counters"].get("requests{pipeline=P-RLD-MD}"), server.name


@pytest.mark.on("full-mains")
def test_several_mains_share_a_relay(served: Served) -> None:
    _ask_all(served, [_cold(2000, 300) for _ in range(8)])
    for server in served.cluster.mains:
        assert served.cluster.state(server)["counters"].get("tokens.emitted{source=RLD}"), server.name


def test_a_relay_drains(served: Served) -> None:
    """It finishes what it has, takes nothing new, and ends by itself; nobody notices."""
    cluster = served.cluster
    leaving = cluster.relays[0]
    asked = [_cold() for _ in range(4)]
    for task in asked:
        served.reference.answer(task.prompt, limit(task))
    before = _opened(served, 0)
    with ThreadPoolExecutor(len(asked)) as pool:
        jobs = [pool.submit(served.ask, task) for task in asked]
        wait(lambda: _opened(served, 0) > before or None, 30, "a relay to be opened")
        leaving.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        for job in jobs:
            job.result()
    wait(lambda: not leaving.alive or None, 90, "the relay to end")
    for event in served.events("relay", "relay_start", prompt_tokens=COLD_TOKENS):
        assert served.events("relay", "relay_end", room=event["room"]), "a relay was cut off"


def test_the_others_go_on_without_it(served: Served) -> None:
    before = _opened_of_the_living(served)
    _ask_all(served, [_cold(2000, 300) for _ in range(4)])
    assert _opened_of_the_living(served) > before


def test_a_relay_is_added(served: Served) -> None:
    new = served.cluster.add_relay()
    served.log_offsets[new.name] = new.log.stat().st_size
    before = [_opened(served, i) for i in (1, 2)]
    _ask_all(served, [_cold(2000, 300) for _ in range(6)])
    assert all(_opened(served, i) > before[i - 1] for i in (1, 2))


def _opened_of_the_living(served: Served) -> float:
    return sum(_opened(served, i) for i, server in enumerate(served.cluster.relays) if server.alive)
