"""RLD's state machine: what it accepts, where tokens go, and that every relay ends."""

from __future__ import annotations

from sglang_pdd.actions import Dial, HangUp, Send, StartDecode, StopDecode
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import Abort, Chunk, Ping, Pong, RelayOpen, RelayReply, Request, Stop, Tokens
from sglang_pdd.relay import IDLE, SILENCE, Relay

MAIN = "tcp://b:9310"


def ask(relay_room: int = 1, room: int = 100, prompt: int = 10, key: str = "k", main: str = MAIN) -> RelayOpen:
    return RelayOpen(relay_room, room, main, key, Request(tuple(range(prompt)), {"max_new_tokens": 5}))


def machine(capacity: int = 4, pool: int = 100_000) -> Relay:
    return Relay(Counters(), capacity, pool, lambda key: key == "k")


def open_relay(relay: Relay, relay_room: int = 1, room: int = 100, peer: str = "p") -> None:
    actions = relay.receive(peer, ask(relay_room, room), 0.0, prefill="a:8998")
    assert isinstance(actions[1], StartDecode)


def test_accepts_and_dials_main() -> None:
    actions = machine().receive("p", ask(), 0.0, prefill="a:8998")
    assert actions[0] == Dial(MAIN, "k")
    assert actions[1] == StartDecode(1, "a:8998", Request(tuple(range(10)), {"max_new_tokens": 5}))
    assert actions[2] == Send("p", RelayReply(1, True))


def refusal(relay: Relay, message: RelayOpen, peer: str = "p") -> str:
    (send,) = relay.receive(peer, message, 0.0, prefill="a:8998")
    assert isinstance(send, Send) and isinstance(send.message, RelayReply) and not send.message.accepted
    return send.message.reason


def test_refuses_with_a_reason() -> None:
    relay = machine(capacity=1)
    open_relay(relay)
    assert refusal(relay, ask(2)).startswith("full")
    assert refusal(machine(pool=500), ask()).startswith("memory")
    assert refusal(machine(), ask(key="stranger")).startswith("key")
    assert refusal(machine(), ask(prompt=0)).startswith("prompt")


def test_one_prefill_cannot_take_everything() -> None:
    relay = machine(capacity=4)
    for i in range(3):
        open_relay(relay, i, 100 + i, "p")
    open_relay(relay, 3, 103, "q")
    relay.ended(3)
    open_relay(relay, 4, 104, "q")
    assert refusal(relay, ask(5), "p").startswith("full")
    relay.ended(0)
    relay.ended(4)
    open_relay(relay, 6, 106, "q")
    open_relay(relay, 7, 107, "p")
    relay.ended(6)
    open_relay(relay, 8, 108, "q")
    relay.ended(8)
    assert len(relay) == 3
    open_relay(relay, 9, 109, "p")  # nobody else is here now


def test_a_replayed_open_changes_nothing() -> None:
    relay = machine()
    open_relay(relay)
    assert relay.receive("p", ask(), 0.0, prefill="a:8998") == []
    assert len(relay) == 1


def test_only_a_prefill_opens_relays() -> None:
    assert machine().receive("m", ask(), 0.0) == []


def test_tokens_of_one_step_go_in_one_message_per_main() -> None:
    relay = machine()
    open_relay(relay, 1, 100)
    open_relay(relay, 2, 200)
    relay.receive("p", ask(3, 300, main="tcp://c:1"), 0.0, prefill="a:8998")
    actions = relay.produced([Chunk(1, 0, (5, 6)), Chunk(2, 3, (7,), None, "length"), Chunk(3, 0, (8,))])
    assert actions == [
        Send(MAIN, Tokens((Chunk(100, 0, (5, 6)), Chunk(200, 3, (7,), None, "length")), 75)),
        Send("tcp://c:1", Tokens((Chunk(300, 0, (8,)),), 75)),
    ]


def test_stop_abort_and_pong_end_a_relay_once() -> None:
    for end in (
        lambda r: r.receive(MAIN, Stop(100, 3, "landed"), 0.0),
        lambda r: r.receive(MAIN, Pong((100,)), 0.0),
        lambda r: r.receive("p", Abort(1, "aborted"), 0.0, prefill="a:8998"),
    ):
        relay = machine()
        open_relay(relay)
        (action,) = end(relay)
        assert isinstance(action, StopDecode) and action.relay_room == 1
        assert end(relay) == []
        assert relay.produced([Chunk(1, 0, (5,))]) == []  # what still comes is waste
        assert relay.ended(1) == [Send("p", Abort(1, "ended"))] and len(relay) == 0


def test_another_main_cannot_stop_it() -> None:
    relay = machine()
    open_relay(relay)
    assert relay.receive("tcp://evil:1", Stop(100, 0, "x"), 0.0) == []


def test_silence_of_main_ends_it() -> None:
    relay = machine()
    open_relay(relay)
    assert relay.tick(1.0) == [Send(MAIN, Ping((100,)))]
    relay.receive(MAIN, Pong(()), 5.0)
    assert not any(isinstance(a, StopDecode) for a in relay.tick(SILENCE + 4.0))
    assert any(isinstance(a, StopDecode) for a in relay.tick(SILENCE + 5.1))
    assert not any(isinstance(a, StopDecode) for a in relay.tick(SILENCE + 9.0))


def test_a_connection_that_nobody_needs_is_closed() -> None:
    relay = machine()
    open_relay(relay)
    relay.tick(1.0)
    relay.receive(MAIN, Pong(()), IDLE)
    assert HangUp(MAIN) not in relay.tick(IDLE + 2.0)  # it has a relay
    relay.ended(1)
    assert HangUp(MAIN) not in relay.tick(IDLE + 5.0)
    assert HangUp(MAIN) in relay.tick(2 * IDLE + 5.0)
    assert HangUp(MAIN) not in relay.tick(3 * IDLE)
