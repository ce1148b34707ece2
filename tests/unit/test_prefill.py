"""P's state machine: who is there, what is relayed, and that every relay is given up in time."""

from __future__ import annotations

import dataclasses

from sglang_pdd.actions import AnswerEarly, Demote, DropRelay, Follow, KnowLandings, OpenRelay, Send
from sglang_pdd.config import PddConfig
from sglang_pdd.metrics import Counters
from sglang_pdd.prefill import PEER_TIMEOUT, Job, Prefill
from sglang_pdd.protocol import (
    Abort,
    Awaited,
    Chunk,
    Follows,
    Hello,
    Landing,
    RelayOpen,
    RelayReply,
    Request,
    Tokens,
    Welcome,
)

SAME = {"model": "m", "page_size": "16"}
JOB = Job(5, ("s1",), Request((1, 2, 3), {"temperature": 0.0}), landing_ms=2000.0)


def hello(role: str, session: str = "", fingerprint: dict[str, str] = SAME, capacity: int = 4, load: int = 0) -> Hello:
    address = "tcp://md:9310" if role == "main" else ""
    return Hello(role, address, (session,) if session else (), fingerprint, "key", capacity, load)


def machine(**config: object) -> Prefill:
    prefill = Prefill(Counters(), PddConfig(role="prefill", **config), SAME)  # type: ignore[arg-type]
    prefill.receive("md", hello("main", "s1"), 0.0)
    return prefill


def with_relay(**config: object) -> Prefill:
    prefill = machine(**config)
    prefill.receive("rld", hello("relay"), 0.0)
    return prefill


def test_every_hello_is_answered() -> None:
    prefill = Prefill(Counters(), PddConfig(role="prefill"), SAME)
    assert prefill.receive("md", hello("main", "s1"), 0.0) == [Send("md", Welcome(True))]
    assert prefill.receive("md", hello("main", "s1"), 1.0) == [Send("md", Welcome(True))]
    assert prefill.peers["md"].hello.role == "main"


def test_a_peer_that_differs_is_refused_with_the_reason() -> None:
    prefill = machine()
    (send,) = prefill.receive("x", hello("main", "s9", {**SAME, "page_size": "1"}), 0.0)
    assert isinstance(send, Send) and send.message == Welcome(
        False, "page_size: expected 16, found 1; start all roles with the same one"
    )
    (send,) = prefill.receive("y", hello("router"), 0.0)
    assert isinstance(send, Send) and isinstance(send.message, Welcome) and not send.message.accepted
    assert set(prefill.peers) == {"md"}
    assert prefill.counters.get("messages.dropped", cause="unwelcome") == 2


def test_a_slow_landing_opens_a_relay() -> None:
    prefill = with_relay()
    early, opened, send = prefill.bootstrapped(JOB)
    assert early == AnswerEarly(5)
    assert isinstance(opened, OpenRelay) and opened.room == 5
    assert isinstance(send, Send) and send.peer == "rld" and isinstance(send.message, RelayOpen)
    assert send.message.relay_room == opened.relay_room and send.message.main == "tcp://md:9310"
    assert prefill.counters.get("requests", pipeline="P-RLD-MD") == 1


def test_when_no_relay_is_opened() -> None:
    assert with_relay().bootstrapped(dataclasses.replace(JOB, landing_ms=100.0)) == [AnswerEarly(5)]
    assert with_relay(relay_policy="never").bootstrapped(JOB) == [AnswerEarly(5)]
    assert with_relay().bootstrapped(dataclasses.replace(JOB, obstacle="grammar")) == [AnswerEarly(5)]
    assert with_relay().bootstrapped(dataclasses.replace(JOB, request=Request((1,), {"max_new_tokens": 1}))) == [
        AnswerEarly(5)
    ]
    assert machine().bootstrapped(JOB) == [AnswerEarly(5)]  # nobody there
    stranger = with_relay()
    assert stranger.bootstrapped(dataclasses.replace(JOB, sessions=("unknown",))) == []
    assert stranger.counters.get("requests", pipeline="stock") == 1


def test_a_relay_may_be_opened_late_and_once() -> None:
    prefill = with_relay()
    soon = dataclasses.replace(JOB, landing_ms=100.0)
    assert prefill.bootstrapped(soon) == [AnswerEarly(5)]
    assert prefill.reconsidered(soon) == []
    opened, send = prefill.reconsidered(JOB)
    assert isinstance(opened, OpenRelay) and isinstance(send, Send) and send.peer == "rld"
    assert prefill.reconsidered(JOB) == [] and len(prefill) == 1
    assert prefill.reconsidered(dataclasses.replace(JOB, room=6, sessions=("unknown",))) == []
    assert prefill.reconsidered(dataclasses.replace(JOB, room=7, obstacle="beam")) == []
    assert prefill.counters.get("relay.opened") == prefill.counters.get("relay.opened_late") == 1
    assert prefill.counters.get("requests", pipeline="P-MD") == 1, "each request is counted once"


def test_always_means_always() -> None:
    assert len(with_relay(relay_policy="always").bootstrapped(dataclasses.replace(JOB, landing_ms=0.0))) == 3


def test_the_least_loaded_relay_is_asked_until_all_are_full() -> None:
    prefill = machine()
    prefill.receive("a", hello("relay", capacity=1), 0.0)
    prefill.receive("b", hello("relay", capacity=2, load=1), 0.0)
    asked = []
    for room in range(3):
        for action in prefill.bootstrapped(dataclasses.replace(JOB, room=room)):
            if isinstance(action, Send):
                asked.append(action.peer)
    assert asked == ["a", "b"]
    assert prefill.counters.get("relay.refused", reason="no_relay") == 1


def relay_room_of(prefill: Prefill) -> int:
    opened = prefill.bootstrapped(JOB)[1]
    assert isinstance(opened, OpenRelay)
    return opened.relay_room


def test_refusal_abort_and_silence_drop_the_copy() -> None:
    for end, why in (
        (lambda p, r: p.receive("rld", RelayReply(r, False, "full: x"), 0.0), "refused"),
        (lambda p, r: p.receive("rld", Abort(r, "ended"), 0.0), "ended"),
        (lambda p, r: p.tick(PEER_TIMEOUT + 1), "silence"),
    ):
        prefill = with_relay()
        relay_room = relay_room_of(prefill)
        assert end(prefill, relay_room) == [DropRelay(5, relay_room, why)]
        assert len(prefill) == 0 and end(prefill, relay_room) == []


def test_only_the_asked_relay_can_refuse() -> None:
    prefill = with_relay()
    prefill.receive("other", hello("relay"), 0.0)
    relay_room = relay_room_of(prefill)
    asked = next(r.node for r in prefill._relays.values())
    wrong = "other" if asked == "rld" else "rld"
    assert prefill.receive(wrong, RelayReply(relay_room, False, "x"), 0.0) == []
    assert prefill.receive(wrong, Abort(relay_room, "x"), 0.0) == []


def test_strangers_are_ignored() -> None:
    prefill = with_relay()
    relay_room = relay_room_of(prefill)
    assert prefill.receive("stranger", Abort(relay_room, "x"), 0.0) == []
    assert prefill.counters.get("messages.dropped", cause="unwelcome") == 1


def test_a_failed_copy_tells_the_relay() -> None:
    prefill = with_relay()
    relay_room = relay_room_of(prefill)
    assert prefill.gave_up(relay_room, "aborted") == [Send("rld", Abort(relay_room, "aborted"))]
    assert prefill.gave_up(relay_room, "aborted") == []


def test_a_complete_copy_is_nobody_elses() -> None:
    prefill = with_relay()
    relay_room = relay_room_of(prefill)
    assert prefill.copied(relay_room) == [] and len(prefill) == 0
    assert prefill.receive("rld", Abort(relay_room, "ended"), 0.0) == []


def test_the_first_token_goes_to_the_owner_of_the_session() -> None:
    prefill = machine()
    chunk = Chunk(5, 0, (42,))
    assert prefill.first_token(("s1",), chunk) == [Send("md", Tokens((chunk,)))]
    assert prefill.first_token(("unknown",), chunk) == []


def test_a_peer_that_is_silent_is_forgotten() -> None:
    prefill = machine()
    assert prefill.tick(PEER_TIMEOUT + 1) == []
    assert not prefill.peers and prefill.counters.get("peers", role="main") == 0


def landing_hello(token: bytes, *sessions: str) -> Hello:
    places = tuple(Landing("md", 9311 + i, token) for i in range(len(sessions)))
    return Hello("main", "tcp://md:9310", sessions, SAME, "key", 0, 0, places)


def test_all_ranks_hear_where_streams_go_and_when_no_more() -> None:
    prefill = Prefill(Counters(), PddConfig(role="prefill"), SAME)
    first = landing_hello(b"1", "s1", "s2")
    assert prefill.receive("md", first, 0.0) == [KnowLandings(("s1", "s2"), first.landings), Send("md", Welcome(True))]
    assert prefill.receive("md", first, 1.0) == [Send("md", Welcome(True))]
    again = landing_hello(b"2", "s1", "s2")
    told = prefill.receive("md", again, 2.0)
    assert told[:2] == [KnowLandings(("s1", "s2"), ()), KnowLandings(("s1", "s2"), again.landings)]
    assert KnowLandings(("s1", "s2"), ()) in prefill.tick(2.1 + PEER_TIMEOUT)


def test_a_relay_takes_no_streams() -> None:
    prefill = Prefill(Counters(), PddConfig(role="prefill"), SAME)
    sneaky = dataclasses.replace(landing_hello(b"1", "s9"), role="relay")
    assert prefill.receive("rld", sneaky, 0.0) == [Send("rld", Welcome(True))]


def test_a_landing_time_that_wavers_about_the_threshold_does_not_change_the_decision() -> None:
    prefill = with_relay(relay_threshold_ms=200.0)
    prefill.receive("rld", hello("relay", capacity=99), 0.0)
    times = [100, 210, 230, 250, 190, 170, 210, 150, 210]
    relayed = [
        any(isinstance(a, OpenRelay) for a in prefill.bootstrapped(dataclasses.replace(JOB, room=i, landing_ms=ms)))
        for i, ms in enumerate(times, 1)
    ]
    assert relayed == [False, False, False, True, True, True, True, False, False]


def test_main_says_who_is_not_waited_for() -> None:
    prefill = with_relay()
    assert prefill.receive("md", Awaited(5, False), 0.0) == [Demote(5, ("s1",), True)]
    assert prefill.receive("md", Awaited(5, True), 0.0) == [Demote(5, ("s1",), False)]
    assert prefill.receive("rld", Awaited(5, False), 0.0) == []  # is no main decode
    assert prefill.receive("nobody", Awaited(5, False), 0.0) == []
    assert prefill.counters.get("messages.dropped", cause="unwelcome") == 1
    follows = Follows(5, 16, ((6, 32),))
    assert prefill.receive("md", follows, 0.0) == [Follow(5, ("s1",), 16, ((6, 32),))]
    assert not prefill.receive("rld", follows, 0.0) and not prefill.receive("nobody", follows, 0.0)
