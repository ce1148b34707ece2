"""MD's state machine: exactly the right tokens, in order, whatever the network does."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sglang_pdd.actions import Action, Emit, GiveUp, Send
from sglang_pdd.main import MAX_HELD_TOKENS, RELAY_SILENCE, Main
from sglang_pdd.metrics import Counters
from sglang_pdd.protocol import UNKNOWN, Chunk, Logprobs, Ping, Pong, Stop, Tokens

ROOM = 7
ANSWER = tuple(random.Random(0).randrange(1000) for _ in range(40))


def machine() -> tuple[Main, Counters]:
    counters = Counters()
    main = Main(counters, 10_000)
    main.opened(ROOM)
    return main, counters


def tokens(start: int, stop: int, room: int = ROOM) -> Tokens:
    return Tokens((Chunk(room, start, ANSWER[start:stop]),))


def emitted(actions: list[Action]) -> list[int]:
    return [t for a in actions if isinstance(a, Emit) for t in a.ids]


def test_first_token_of_p_then_tokens_of_rld() -> None:
    main, counters = machine()
    actions = main.receive("p", tokens(0, 1), 0.0, prefill="p:1")
    assert actions == [Emit(ROOM, 0, ANSWER[:1], None, "P", None)]
    actions = main.receive("rld", tokens(0, 3), 0.0)
    assert actions == [Emit(ROOM, 1, ANSWER[1:3], None, "RLD", None, 0)]
    assert counters.get("tokens.duplicate") == 1


def test_cached_counts_are_taken_from_a_late_first_token() -> None:
    main, _ = machine()
    main.receive("rld", tokens(0, 2), 0.0)
    late = Tokens((Chunk(ROOM, 0, ANSWER[:1], None, None, (5, 5, 0, 0)),))
    assert main.receive("p", late, 0.0, prefill="p:1") == [Emit(ROOM, 2, (), None, "P", (5, 5, 0, 0))]


def test_logprobs_follow_their_tokens() -> None:
    main, _ = machine()
    main.receive("p", tokens(0, 1), 0.0, prefill="p:1")
    logprobs = Logprobs((-0.5, -1.0, -1.5), 1, (-0.5, -1.0, -1.5), (1, 2, 3))
    (emit,) = main.receive("rld", Tokens((Chunk(ROOM, 0, ANSWER[:3], logprobs),)), 0.0)
    assert isinstance(emit, Emit) and emit.logprobs == Logprobs((-1.0, -1.5), 1, (-1.0, -1.5), (2, 3))


def test_logprobs_that_only_p_knows_are_waited_for() -> None:
    main, _ = machine()
    relayed = Logprobs((-0.5, -1.0), named=(UNKNOWN, UNKNOWN, -7.0, -8.0))
    assert main.receive("rld", Tokens((Chunk(ROOM, 0, ANSWER[:2], relayed),)), 0.0) == []
    assert main.receive("rld", tokens(2, 4), 0.0) == []
    first = Logprobs((-0.5,), named=(-5.0, -6.0))
    actions = main.receive("p", Tokens((Chunk(ROOM, 0, ANSWER[:1], first),)), 0.0, prefill="p:1")
    assert emitted(actions) == list(ANSWER[:4])
    rows = [a.logprobs.named_row(0) for a in actions if isinstance(a, Emit) and a.logprobs]
    assert rows == [[-5.0, -6.0], [-7.0, -8.0]]


def test_a_relay_that_waited_for_p_and_had_another_token_is_muted() -> None:
    main, counters = machine()
    main.receive("rld", Tokens((Chunk(ROOM, 0, (ANSWER[0] + 1,), Logprobs((-0.5,), named=(UNKNOWN,))),)), 0.0)
    actions = main.receive("p", tokens(0, 1), 0.0, prefill="p:1")
    assert emitted(actions) == [ANSWER[0]]
    assert actions[-1] == Send("rld", Stop(ROOM, 1, "mismatch"))
    assert counters.get("tokens.mismatch") == 1


@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_any_order_any_duplicates(rng: random.Random, step: int) -> None:
    main, _ = machine()
    messages = [tokens(i, min(len(ANSWER), i + step)) for i in range(0, len(ANSWER), step)]
    messages += rng.sample(messages, rng.randrange(len(messages)))
    rng.shuffle(messages)
    output = [t for m in messages for t in emitted(main.receive("rld", m, 0.0))]
    assert output == list(ANSWER)


@given(st.randoms(use_true_random=False), st.integers(0, len(ANSWER)))
def test_nothing_after_the_cut(rng: random.Random, kept: int) -> None:
    main, counters = machine()
    output = emitted(main.receive("rld", tokens(0, kept), 0.0))
    stops = main.cut(ROOM, kept, "landed")
    late = main.receive("rld", tokens(kept, len(ANSWER)), 0.0)
    assert output == list(ANSWER[:kept]) and emitted(late) == []
    assert stops == [Send("rld", Stop(ROOM, kept, "landed"))]
    assert late == [Send("rld", Stop(ROOM, kept, "closed"))]  # said again: the first may have been lost
    assert counters.get("tokens.wasted") == len(ANSWER) - kept
    assert main.cut(ROOM, kept, "landed") == [] and len(main) == 0


def test_mismatch_mutes_the_relay() -> None:
    main, counters = machine()
    main.receive("p", tokens(0, 1), 0.0, prefill="p:1")
    actions = main.receive("rld", Tokens((Chunk(ROOM, 0, (ANSWER[0] + 1, 5)),)), 0.0)
    assert actions == [Send("rld", Stop(ROOM, 1, "mismatch"))]
    assert main.receive("rld", tokens(1, 3), 0.0) == []
    assert counters.get("tokens.mismatch") == 1


def test_a_relay_whose_first_token_is_lost_may_have_had_another() -> None:
    main, _ = machine()
    main.receive("p", tokens(0, 1), 0.0, prefill="p:1")
    assert main.receive("rld", tokens(1, 3), 0.0) == []  # the one before was lost, or is late
    assert emitted(main.receive("rld", tokens(0, 1), 0.0)) == list(ANSWER[1:3])


def test_a_muted_relay_is_told_again() -> None:
    main, _ = machine()
    main.receive("p", tokens(0, 1), 0.0, prefill="p:1")
    main.receive("rld", Tokens((Chunk(ROOM, 0, (ANSWER[0] + 1,)),)), 0.0)  # its Stop is lost
    assert main.receive("rld", Ping((ROOM,)), 0.0) == [Send("rld", Pong((ROOM,)))]


def test_only_one_relay_per_request() -> None:
    main, counters = machine()
    main.receive("rld", tokens(0, 2), 0.0)
    assert main.receive("other", tokens(2, 4), 0.0) == []
    assert counters.get("messages.dropped", cause="stale") == 1


def test_a_gap_is_held_within_a_bound() -> None:
    main, counters = machine()
    long = Chunk(ROOM, 1, tuple(range(MAX_HELD_TOKENS)))
    assert main.receive("rld", Tokens((long,)), 0.0) == []
    assert main.receive("rld", Tokens((Chunk(ROOM, 5000, (1,)),)), 0.0) == []
    assert counters.get("messages.dropped", cause="held") == 1


def test_ids_beyond_the_vocabulary_are_dropped() -> None:
    main, counters = machine()
    assert main.receive("rld", Tokens((Chunk(ROOM, 0, (10_000,)),)), 0.0) == []
    assert counters.get("messages.dropped", cause="malformed") == 1


def test_unknown_room_and_ping() -> None:
    main, counters = machine()
    assert main.receive("rld", tokens(0, 1, room=99), 0.0) == [Send("rld", Stop(99, 0, "closed"))]
    assert main.receive("p", tokens(0, 1, room=98), 0.0, prefill="p:1") == []
    assert counters.get("messages.dropped", cause="unknown_room") == 2
    assert main.receive("rld", Ping((ROOM, 99)), 0.0) == [Send("rld", Pong((99,)))]


def test_a_room_can_be_used_again() -> None:
    main, _ = machine()
    main.receive("rld", tokens(0, 5), 0.0)
    main.cut(ROOM, 5, "aborted")
    main.opened(ROOM)
    assert emitted(main.receive("rld2", tokens(0, 2), 0.0)) == list(ANSWER[:2])


def test_stuck_is_hopeless_only_without_a_relay() -> None:
    main, _ = machine()
    main.receive("rld", tokens(0, 2), 10.0)
    assert main.stuck(ROOM, 10.0 + RELAY_SILENCE) == []
    assert main.stuck(ROOM, 10.1 + RELAY_SILENCE) == [GiveUp(ROOM)]
    assert main.stuck(ROOM + 1, 100.0) == []


def test_stuck_is_hopeless_once_the_relay_has_said_all() -> None:
    main, _ = machine()
    main.receive("rld", Tokens((Chunk(ROOM, 0, ANSWER[:2], finished="length"),)), 10.0)
    assert main.stuck(ROOM, 10.0) == [GiveUp(ROOM)]


def test_the_load_of_the_relay_comes_with_its_tokens() -> None:
    main, _ = machine()
    assert main.receive("p", tokens(0, 1), 0.0, prefill="p:1")[0].load is None  # type: ignore[union-attr]
    (emit,) = main.receive("rld", Tokens((Chunk(ROOM, 0, ANSWER[:3]),), 75), 0.0)
    assert emit == Emit(ROOM, 1, ANSWER[1:3], None, "RLD", None, 75)
