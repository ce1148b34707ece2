"""A client that hangs up, in each state of its request, costs nobody anything."""

from __future__ import annotations

import http.client
import itertools
import json
import secrets
from collections.abc import Callable
from urllib.parse import urlparse

import pytest
import tasks
from checks import Served, wait
from client import Answer, generate
from cluster import HOST
from matrix import ANSWER_TOKENS, COLD_TOKENS, ONE, RANKS_OF_ALL

pytestmark = pytest.mark.on(*ONE)

_seeds = itertools.count(5000)


class Caller:
    """A request on a connection that can be cut at any time."""

    def __init__(self, url: str, prompt: str, stream: bool = True, **fields: object) -> None:
        self.rid = secrets.token_hex(8)
        where = urlparse(url)
        self._connection = http.client.HTTPConnection(where.hostname or HOST, where.port, timeout=120)
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS + 1}
        body = {"rid": self.rid, "text": prompt, "sampling_params": sampling, "stream": stream, **fields}
        self._connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})

    def hang_up(self) -> None:
        """Close the connection, whatever the server is doing."""
        self._connection.close()


def _cold(prompt_tokens: int = COLD_TOKENS) -> tasks.Task:
    return tasks.cold(next(_seeds), prompt_tokens, ANSWER_TOKENS)


def _rooms(served: Served, role: str) -> int:
    return sum(int(served.cluster.state(server)["rooms"]) for server in served.servers(role))


def test_while_main_waits_for_prefill(served: Served) -> None:
    """MD has the request, P never hears of it."""
    bootstrap = served.cluster.bootstrap_ports[0]
    place = {"bootstrap_host": HOST, "bootstrap_port": bootstrap, "bootstrap_room": secrets.randbits(62)}
    caller = Caller(served.cluster.mains[0].url, _cold().prompt, **place)
    served.room(caller.rid)
    caller.hang_up()


def test_while_prefill_waits_for_main(served: Served) -> None:
    """P has the request, MD never hears of it."""
    bootstrap = served.cluster.bootstrap_ports[0]
    place = {"bootstrap_host": HOST, "bootstrap_port": bootstrap, "bootstrap_room": secrets.randbits(62)}
    caller = Caller(served.cluster.prefills[0].url, _cold().prompt, **place)
    wait(lambda: _rooms(served, "prefill") or None, 20, "P to hold the request")
    caller.hang_up()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_during_prefill(served: Served, stream: bool) -> None:
    caller = Caller(served.cluster.url, _cold(7000).prompt, stream)
    room = served.room(caller.rid)
    served.wait_for("prefill", "bootstrapped", room=room)
    caller.hang_up()


def _hang_up_when(served: Served, state: Callable[[Answer], bool]) -> Answer:
    answer = generate(served.cluster.url, _cold().prompt, ANSWER_TOKENS + 1, on_reply=lambda answer: not state(answer))
    assert len(answer.ids) <= ANSWER_TOKENS, "the answer was complete before the client hung up"
    return answer


@pytest.mark.on(*RANKS_OF_ALL)
def test_while_eager_tokens_flow(served: Served) -> None:
    answer = _hang_up_when(served, lambda answer: len(answer.ids) >= 10)
    assert served.events("main", "emit", room=served.room(answer.rid), source="RLD")


@pytest.mark.on(*RANKS_OF_ALL)
def test_at_landing(served: Served) -> None:
    caller = Caller(served.cluster.url, _cold().prompt)
    served.wait_for("main", "landed", room=served.room(caller.rid))
    caller.hang_up()


@pytest.mark.on(*RANKS_OF_ALL)
def test_in_decode(served: Served) -> None:
    def md_decodes(answer: Answer) -> bool:
        if len(answer.ids) % 10 == 0:
            closed = served.events("main", "closed", room=served.room(answer.rid))
            return bool(closed) and len(answer.ids) > closed[0]["n"] + 5
        return False

    _hang_up_when(served, md_decodes)
