import contextlib
import random
from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pdd import protocol as p
from sglang_pdd.protocol import (
    Abort,
    Awaited,
    Chunk,
    Follows,
    Hello,
    Landing,
    Logprobs,
    Message,
    Ping,
    Pong,
    ProtocolError,
    RelayOpen,
    RelayReply,
    Request,
    Stop,
    Tokens,
    VersionMismatch,
    Welcome,
    decode,
    encode,
)

text = st.text(max_size=40)
small = st.integers(0, 1 << 31)
prompt = st.integers(0, p.MAX_PROMPT)
rooms = st.integers(0, p.ROOM_LIMIT - 1)
token = st.integers(0, (1 << 31) - 1)
logprob = st.floats(width=32, allow_nan=False)


def tuples(element, size=20, exactly=None):
    return st.lists(element, max_size=size if exactly is None else exactly, min_size=exactly or 0).map(tuple)


@st.composite
def chunks(draw):
    ids = draw(tuples(token))
    lp = None
    if draw(st.booleans()):
        k = draw(st.integers(0, 3))
        n = len(ids)
        lp = Logprobs(
            draw(tuples(logprob, exactly=n)),
            k,
            draw(tuples(logprob, exactly=n * k)),
            draw(tuples(token, exactly=n * k)),
            draw(tuples(logprob, exactly=n * draw(st.integers(0, 2)))),
        )
    cached = st.none() | tuples(st.integers(0, 1 << 40), 4)
    return Chunk(draw(rooms), draw(small), ids, lp, draw(st.none() | text), draw(cached))


sampling = st.dictionaries(
    text,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | text | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=5,
)
landing = st.builds(Landing, text, st.integers(1, 65535), st.binary(max_size=64))
BY_KIND = {
    Hello: st.tuples(tuples(text, 8), st.booleans()).flatmap(
        lambda drawn: st.builds(
            Hello,
            text,
            text,
            st.just(drawn[0]),
            st.dictionaries(text, text, max_size=8),
            text,
            capacity=small,
            load=small,
            landings=st.tuples(*[landing] * len(drawn[0]) * drawn[1]),
        )
    ),
    Welcome: st.builds(Welcome, st.booleans(), text),
    RelayOpen: st.builds(
        RelayOpen,
        rooms,
        rooms,
        text,
        text,
        st.builds(
            Request,
            tuples(token),
            sampling,
            st.booleans(),
            st.integers(0, 256),
            tuples(token),
            text,
            st.booleans(),
            text,
            text,
        ),
    ),
    RelayReply: st.builds(RelayReply, rooms, st.booleans(), text),
    Tokens: st.builds(Tokens, tuples(chunks(), 4), st.integers(0, 100)),
    Stop: st.builds(Stop, rooms, small, text),
    Abort: st.builds(Abort, rooms, text),
    Ping: st.builds(Ping, tuples(rooms)),
    Pong: st.builds(Pong, tuples(rooms)),
    Awaited: st.builds(Awaited, rooms, st.booleans()),
    Follows: st.builds(Follows, rooms, prompt, tuples(st.tuples(rooms, prompt))),
}
messages = st.one_of(*BY_KIND.values())

HELLO = Hello("main", "", ("h:1",), {"model": "m"}, "", 4, 0, (Landing("h", 9311, b"token"),))
REQUEST = Request((1, 2, 3), {"temperature": 0.5}, True, 2, (4, 5), "processor", True, "key", "salt")
OPEN = RelayOpen(7, 8, "tcp://h:1", "", REQUEST)
TOKENS = Tokens((Chunk(1, 0, (5, 6), Logprobs((-1.0, -2.0), 1, (-1.0, -2.0), (5, 6)), "stop", (1, 2, 3, 4)),), 3)


def raw(message: Message) -> list:
    return msgpack.unpackb(encode(message))


def with_request(**fields) -> RelayOpen:
    return replace(OPEN, request=replace(REQUEST, **fields))


def refused(value, match: str = ".") -> None:
    with pytest.raises(ProtocolError, match=match) as caught:
        decode(msgpack.packb(value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_every_message_has_a_strategy_and_a_code_of_its_own() -> None:
    kinds = p.Message.__args__
    assert set(kinds) == set(BY_KIND)
    assert {kind.code for kind in kinds} == set(p._UNPACK) and len(p._UNPACK) == len(kinds)


@pytest.mark.parametrize("kind", list(BY_KIND), ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    @settings(max_examples=40, deadline=None)
    @given(BY_KIND[kind])
    def check(message: Message) -> None:
        assert decode(encode(message)) == message

    check()


def test_a_slice_of_logprobs_keeps_the_rows_together() -> None:
    lp = Logprobs((0.0, 1.0, 2.0), 2, (0.0, 0.5, 1.0, 1.5, 2.0, 2.5), (0, 1, 10, 11, 20, 21))
    assert lp.slice(1, 3) == Logprobs((1.0, 2.0), 2, (1.0, 1.5, 2.0, 2.5), (10, 11, 20, 21))
    assert lp.slice(1, 3).top_row(1) == ([2.0, 2.5], [20, 21])


def test_a_handover_of_100_ids_is_small() -> None:
    room = p.ROOM_LIMIT - 1
    ids = tuple(range(150_000, 150_100))
    assert len(encode(Tokens((Chunk(room, 1 << 17, ids),), 200))) <= 600
    one_by_one = [encode(Tokens((Chunk(room, (1 << 17) + i, (id,)),), 200)) for i, id in enumerate(ids)]
    assert sum(map(len, one_by_one)) + len(encode(Stop(room, (1 << 17) + 100, "landed"))) <= 6144


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError as error:
        assert "\n" not in str(error)


@settings(max_examples=400, deadline=None)
@given(messages, st.integers(0, 1 << 32))
def test_mutated_messages_raise_nothing_but_protocol_errors(message: Message, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(message))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 5))
        if not data:
            break
    with contextlib.suppress(ProtocolError):
        decode(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(p._UNPACK)), st.lists(sampling | messages.map(raw) | st.none() | text, max_size=10))
def test_wrong_fields_raise_nothing_but_protocol_errors(code: int, values: list) -> None:
    with contextlib.suppress(ProtocolError):
        decode(msgpack.packb([p.PROTOCOL, code, *values]))


@pytest.mark.parametrize("depth", [1, 100, 1000, 100_000])
def test_deep_nesting_is_a_protocol_error(depth: int) -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x93\x01\x08" + b"\x91" * depth + b"\x91\x05")


def test_other_versions_are_named() -> None:
    with pytest.raises(VersionMismatch, match="protocol version 9, expected 4: run the same sglang-pdd") as caught:
        decode(msgpack.packb([9, 1, "whatever"]))
    assert caught.value.theirs == 9


@pytest.mark.parametrize("value", [[], {}, 5, None, "x", [1], [True, 1], ["1", 1], [1, "1"], [1, True], [1, None]])
def test_what_is_no_message(value) -> None:
    refused(value, "not a PDD message")


def test_unknown_codes() -> None:
    refused([p.PROTOCOL, 99], "unknown message code 99")
    refused([p.PROTOCOL, 0], "unknown message code 0")


@pytest.mark.parametrize("message", [HELLO, OPEN, TOKENS, Welcome(True), RelayReply(1, True), Stop(1, 2, "x"), Ping()])
def test_missing_and_extra_fields(message: Message) -> None:
    refused(raw(message)[:-1], "bad field")
    refused([*raw(message), 1], "bad field")


def fields_of(message: Message) -> list[int]:
    return list(range(len(fields(message))))


@pytest.mark.parametrize("message", [HELLO, OPEN, TOKENS, Welcome(True), RelayReply(1, True), Stop(1, 2, "x"), Ping()])
def test_a_field_of_another_type(message: Message) -> None:
    for i in fields_of(message):
        values = raw(message)
        values[2 + i] = 1.5  # no field is a plain float
        refused(values)


LONG = "x" * (p.MAX_TEXT + 1)


@pytest.mark.parametrize(
    "message",
    [
        *(replace(HELLO, **{name: LONG}) for name in ("role", "address", "public_key")),
        replace(HELLO, sessions=(LONG,)),
        replace(HELLO, fingerprint={LONG: "x"}),
        replace(HELLO, fingerprint={"x": LONG}),
        *(replace(HELLO, **{name: value}) for name in ("capacity", "load") for value in (-1, (1 << 31) + 1)),
        *(replace(OPEN, **{name: LONG}) for name in ("main", "main_key")),
        *(replace(OPEN, **{name: value}) for name in ("room", "relay_room") for value in (-1, p.ROOM_LIMIT)),
        with_request(prompt=(-1,)),
        with_request(sampling={1: 2}),
        with_request(top_logprobs=p.MAX_TOP_LOGPROBS + 1),
        with_request(return_logprob=1),
        with_request(named_ids=(1,) * (p.MAX_NAMED_IDS + 1)),
        with_request(logit_processor="x" * (p.MAX_PROCESSOR + 1)),
        with_request(cache_salt=LONG),
        Welcome(True, LONG),
        RelayReply(1, True, LONG),
        RelayReply(p.ROOM_LIMIT, True),
        Tokens((), 101),
        Stop(1, -1, "x"),
        Stop(-1, 1, "x"),
        Stop(1, 1, LONG),
        Abort(p.ROOM_LIMIT, "x"),
        Abort(1, LONG),
        Ping((-1,)),
        Ping((p.ROOM_LIMIT,)),
        Ping((0,) * (p.MAX_ROOMS + 1)),
        Pong((p.ROOM_LIMIT,)),
        Pong((0,) * (p.MAX_ROOMS + 1)),
        Tokens((), -1),
        Tokens((Chunk(1, 0, ()),) * (p.MAX_ROOMS + 1)),
        Tokens((Chunk(1, -1, ()),)),
        Tokens((Chunk(1, (1 << 31) + 1, ()),)),
        Tokens((Chunk(p.ROOM_LIMIT, 0, ()),)),
        Tokens((Chunk(1, 0, (-1,)),)),
        Tokens((Chunk(1, 0, (1,) * (p.MAX_STEP_TOKENS + 1)),)),
        Tokens((Chunk(1, 0, (), None, LONG),)),
        Tokens((Chunk(1, 0, (), None, None, (0,) * 17),)),
        Tokens((Chunk(1, 0, (), None, None, (-1,)),)),
        Tokens((Chunk(1, 0, (1,), Logprobs(())),)),
        Tokens((Chunk(1, 0, (1,), Logprobs((0.0,), 1)),)),
        Tokens((Chunk(1, 0, (1,), Logprobs((0.0,), 1, (0.0,), ())),)),
        Tokens((Chunk(1, 0, (), Logprobs((), p.MAX_TOP_LOGPROBS + 1)),)),
    ],
    ids=lambda message: f"{message!r:.60}",
)
def test_limits(message: Message) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        replace(HELLO, role="x" * p.MAX_TEXT),
        replace(HELLO, capacity=1 << 31),
        Stop(p.ROOM_LIMIT - 1, 1 << 31, ""),
        Ping((p.ROOM_LIMIT - 1,) * p.MAX_ROOMS),
        Tokens((Chunk(1, 0, (1,) * p.MAX_STEP_TOKENS),)),
        Tokens((Chunk(1, 0, ()),) * p.MAX_ROOMS),
        with_request(prompt=(1,) * p.MAX_PROMPT),
    ],
    ids=lambda message: f"{message!r:.60}",
)
def test_what_is_just_within_a_limit(message: Message) -> None:
    data = encode(message)
    assert len(data) <= p.MAX_MESSAGE and decode(data) == message


def test_the_largest_prompt_and_the_largest_message() -> None:
    with pytest.raises(ProtocolError, match=f"limit {p.MAX_PROMPT}"):
        decode(encode(with_request(prompt=(1,) * (p.MAX_PROMPT + 1))))
    with pytest.raises(ProtocolError, match=f"limit {p.MAX_MESSAGE}"):
        decode(bytes(p.MAX_MESSAGE + 1))


@pytest.mark.parametrize("blob", [b"abc", b"", "text", [1, 2], None])
def test_ids_are_whole_int32(blob) -> None:
    values = raw(OPEN)
    values[6][0] = blob
    if blob == b"":
        assert decode(msgpack.packb(values)).request.prompt == ()
    else:
        refused(values, "array")


@pytest.mark.parametrize(
    "landings, reason",
    [
        ([["h", 1, b"t"], ["h", 2, b"t"]], "2 landings for 1 sessions"),
        ([["h", 0, b"t"]], "integer"),
        ([["h", 1, b"t" * 65]], "token"),
        ([["h", 1, "t"]], "token"),
        ([["h" * 1025, 1, b"t"]], "text"),
        ([["h", 1]], "bad field"),
        ("x", "bad Hello"),
    ],
)
def test_landings_that_are_none(landings, reason: str) -> None:
    message = raw(HELLO)
    message[-1] = landings
    refused(message, reason)
