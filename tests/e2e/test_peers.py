"""What strangers send to the PDD ports changes nothing but a counter."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgpack
import pytest
import tasks
import zmq
from checks import Served
from client import Answer
from cluster import HOST, Server
from matrix import ANSWER_TOKENS, COLD_TOKENS, ONE

from sglang_pdd.protocol import MAX_MESSAGE, PROTOCOL, Chunk, Hello, Message, Stop, Tokens, Welcome, decode, encode

FINGERPRINT = ("model", "tokenizer", "page_size", "transfer_engine", "kv_cache_dtype", "sampling")

pytestmark = pytest.mark.on(*ONE)

_seeds = itertools.count(7000)


class Stranger:
    """A raw connection to a role's PDD port."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: Server) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.identity = secrets.token_hex(8).encode()
        self._socket.connect(f"tcp://{HOST}:{server.pdd_port}")

    def say(self, *messages: Message | bytes) -> None:
        """Send messages, or bytes as they are."""
        for message in messages:
            self._socket.send(message if isinstance(message, bytes) else encode(message))

    def hear(self, timeout: float = 10) -> Message:
        """The next answer."""
        assert self._socket.poll(int(timeout * 1000)), "no answer"
        return decode(self._socket.recv())


@contextmanager
def stranger(server: Server) -> Iterator[Stranger]:
    """A stranger at a server's door."""
    context = zmq.Context()
    try:
        yield Stranger(context, server)
    finally:
        context.destroy(linger=500)


def _grown(served: Served, role: str, name: str, least: int = 1) -> None:
    end = time.monotonic() + 10
    while served.grown(role, name) < least:
        assert time.monotonic() < end, f"{role}: {name} has not grown by {least}: {served.counters(role)}"
        time.sleep(0.1)


def _rubbish() -> list[bytes]:
    tokens = Tokens((Chunk(1, 0, (5, 6)),))
    return [
        b"",
        b"\xc1",
        secrets.token_bytes(300),
        msgpack.packb([PROTOCOL, 99]),
        msgpack.packb([PROTOCOL, Tokens.code, "x", 7]),
        encode(tokens)[:-3],
        bytes(MAX_MESSAGE + 1),
    ]


def test_rubbish_in_the_middle_of_a_request(served: Served) -> None:
    seen: list[int] = []
    main, prefill = served.cluster.mains[0], served.cluster.prefills[0]
    with stranger(main) as at_main, stranger(prefill) as at_prefill, stranger(main) as flood:

        def disturb(answer: Answer) -> None:
            if len(answer.ids) >= 5 and not seen:
                room = served.room(answer.rid)
                seen.append(room)
                forged = Tokens((Chunk(secrets.randbits(62), 0, (7, 8, 9)),))
                old = Tokens((Chunk(room, 0, (answer.ids[0],)),))
                flood.say(bytes(2 * MAX_MESSAGE))
                for door in (at_main, at_prefill):
                    door.say(*_rubbish(), forged, old, old, Stop(room, 3, "because"))

        answer = served.ask(tasks.cold(next(_seeds), COLD_TOKENS, ANSWER_TOKENS), on_reply=disturb)
    assert seen and served.story(answer)[0]["RLD"] >= 1
    _grown(served, "main", "messages.dropped{cause=malformed}", 4)
    _grown(served, "main", "messages.dropped{cause=oversized}")
    _grown(served, "main", "messages.dropped{cause=unknown_room}")
    _grown(served, "prefill", "messages.dropped{cause=malformed}", 4)
    _grown(served, "prefill", "messages.dropped{cause=unwelcome}")


def test_tokens_for_a_request_that_is_over(served: Served) -> None:
    answer = served.ask(tasks.cold(next(_seeds), COLD_TOKENS, 8))
    room = served.room(answer.rid)
    with stranger(served.cluster.mains[0]) as at_main:
        at_main.say(Tokens((Chunk(room, 0, (answer.ids[0],)),)))
        _grown(served, "main", "messages.dropped{cause=stale}")


def _hello(served: Served) -> Hello:
    """What a relay that fits would say."""
    with stranger(served.cluster.prefills[0]) as probe:
        fingerprint = dict.fromkeys(FINGERPRINT, "?")
        right = dict(fingerprint)
        for name in fingerprint:
            probe.say(Hello("relay", "", ("nobody",), right, "", 0, 0))
            answer = probe.hear()
            assert isinstance(answer, Welcome) and not answer.accepted
            assert answer.reason.startswith(name), answer.reason
            right[name] = answer.reason.split("expected ")[1].split(",")[0]
    return Hello("relay", "", ("nobody",), right, "", 0, 0)


@pytest.mark.parametrize("name", FINGERPRINT)
def test_peer_that_does_not_fit(served: Served, name: str) -> None:
    hello = _hello(served)
    peers = served.counters("prefill")["peers{role=relay}"]
    with stranger(served.cluster.prefills[0]) as door:
        door.say(replace(hello, fingerprint={**hello.fingerprint, name: "another"}))
        answer = door.hear()
    assert isinstance(answer, Welcome) and not answer.accepted
    assert answer.reason.startswith(f"{name}: expected") and "found another" in answer.reason
    _grown(served, "prefill", "messages.dropped{cause=unwelcome}")
    assert served.counters("prefill")["peers{role=relay}"] == peers


def test_peer_of_another_protocol_version(served: Served) -> None:
    raw = msgpack.unpackb(encode(_hello(served)))
    with stranger(served.cluster.prefills[0]) as door:
        door.say(msgpack.packb([PROTOCOL + 1, *raw[1:]]))
        _grown(served, "prefill", "messages.dropped{cause=version}")
    served.ask(tasks.cold(next(_seeds), 60, 10))
